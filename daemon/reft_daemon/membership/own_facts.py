"""What this daemon knows of its own node: its own lateness, and the state of its trainers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from reft.core.membership.failure_detector import LATE_S
from reft.wire.process import Process
from reft_daemon.jobs.leases import Lease

LATE_SHOWN_S = 3.0


@dataclass
class LoopLateness:
    """How late this daemon's own event loop was.

    A daemon that was stopped notices at its first look, which may come from a waiting message, such
    as its own agent's beat. Without this check all nodes would look silent.

    Args:
        last_look_s: time of the newest look.
        tick_s: the longest time between two looks of a daemon that is not late.
    """

    last_look_s: float
    tick_s: float
    _late_s: float = 0.0
    _noticed_s: float = 0.0

    def note_look(self, now_s: float) -> float:
        """Returns the seconds by which this look is late; negative if it is early."""
        late_s, self.last_look_s = now_s - self.last_look_s - self.tick_s, now_s
        if late_s > LATE_S:
            self._late_s, self._noticed_s = late_s, now_s
        return late_s

    def shown_s(self, now_s: float) -> float:
        """Returns the last long delay while people are told of it, else 0."""
        return self._late_s if now_s - self._noticed_s < LATE_SHOWN_S else 0.0


def died_trainers(
    leases: Mapping[int, Lease], ranks: Collection[int], ignored: Collection[Process]
) -> tuple[tuple[int, int], ...]:
    """Returns (rank, pid) of the trainers that died, or closed their sessions after an exception.

    Args:
        leases: rank → its trainer.
        ranks: the ranks that train on this node.
        ignored: trainers whose death says nothing about the membership view.
    """
    here = [(rank, leases[rank]) for rank in ranks if rank in leases]
    return tuple(
        (rank, lease.process.pid)
        for rank, lease in here
        if lease.watch is None and not lease.has_ended_well and lease.process not in ignored
    )


def has_completed(leases: Mapping[int, Lease], ranks: Collection[int], has_agent: bool) -> bool:
    """Whether all sessions of this node were closed well, so that its training has ended.

    With an agent, only the agent's FINISHED counts as the end: a worker may fail later.

    Args:
        leases: rank → its trainer.
        ranks: the ranks that train on this node.
        has_agent: whether an agent works for the job here.
    """
    return not has_agent and bool(ranks) and all(rank in leases and leases[rank].has_ended_well for rank in ranks)


def trainers_of(leases: Mapping[int, Lease], with_living: bool) -> frozenset[Process]:
    """Returns the trainers that have ended, or all of them."""
    return frozenset(each.process for each in leases.values() if with_living or each.watch is None)
