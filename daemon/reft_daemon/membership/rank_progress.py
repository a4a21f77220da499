"""Finds the rank of this node that holds up the training of its job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reft.core.membership.failure_detector import NodeReport, Signal, WatchedNode
from reft.core.membership.progress import Stall, StepProgress, laggard
from reft.wire.process import stat_of
from reft_daemon.jobs.leases import Lease

# after a rank was found to make no progress; by then other nodes have reported their ranks
KILL_AFTER_S = 1.0


@dataclass
class RankProgress:
    """The progress of this node's ranks, by the steps that they report."""

    _of_rank: dict[int, StepProgress] = field(default_factory=dict)

    def forget(self) -> None:
        """Forgets the usual step times: a new round or a new attach may change them."""
        self._of_rank.clear()

    def stall(self, leases: Mapping[int, Lease], now_s: float) -> Stall | None:
        """Returns the rank of this node that delays the others; None if all make progress."""
        stalls = []
        for rank, lease in leases.items():
            progress = self._of_rank.setdefault(rank, StepProgress())
            progress.saw(lease.step, now_s)
            still_s = progress.stands_still_s(now_s)
            if still_s is not None and lease.watch is not None:
                stalls.append(
                    Stall(rank, progress.step, still_s, progress.usual_s or 0.0, _is_stopped(lease.process.pid))
                )
        return laggard(stalls)


def awaited_stall(own: Stall, others: Iterable[WatchedNode]) -> Stall:
    """Returns the stall that the whole job waits for, as far as this node knows.

    It compares the ranks of this node with those that other nodes reported.
    """
    reports: list[NodeReport | None] = [each.word for each in others]
    return laggard([own, *(word.stall for word in reports if word is not None and word.stall is not None)]) or own


def stall_to_kill(stall: Stall | None, own: WatchedNode, others: Iterable[WatchedNode], now_s: float) -> Stall | None:
    """Returns the local rank that has kept the whole job waiting for long enough.

    None if the job waits for another node's rank, or for none.

    Args:
        stall: the local rank that stands still, if any.
        own: this node, as its own detector sees it.
        others: the other nodes of the job.
        now_s: time of the question.
    """
    if stall is None or own.signal is not Signal.SUSPECT or now_s - own.since_s < KILL_AFTER_S:
        return None
    others = list(others)
    if any(each.signal in (Signal.UNHEALTHY, Signal.OFFLINE) for each in others):
        return None  # ranks here wait for that node, and the job restarts because of it
    return stall if awaited_stall(stall, others) is stall else None


def _is_stopped(pid: int) -> bool:
    """Whether a process is known to be stopped, or stuck in the kernel."""
    with contextlib.suppress(OSError):
        stat = stat_of(pid)
        return stat is not None and stat.state in "TtD"
    return False
