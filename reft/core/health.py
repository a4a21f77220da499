"""Health in one word and one sentence, and what survives which loss: from facts to what `status` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from reft.core.version import Version

LAG_STEPS = 3  # a step may be trained while the one before is sealed and announced; beyond this snapshots fail


class Health(Enum):
    OK = "OK"
    WARN = "WARN"
    ERR = "ERR"


@dataclass(frozen=True)
class RankFacts:
    """One rank as its daemon sees it.

    Attributes:
        alive: whether a trainer is attached and lives.
        closed: whether the trainer ended its session by itself.
        step: the newest step that the trainer reported on, sealed or void; -1 if none.
        sealed: the newest sealed version, None if there is none.
        trouble: why its last snapshot failed; empty if it did not.
    """

    rank: int
    node: str
    alive: bool
    closed: bool
    step: int
    sealed: Version | None
    trouble: str = ""


@dataclass(frozen=True)
class JobFacts:
    """One job as its daemons see it: `silent_nodes` did not answer; `backing` is "tmpfs" or "memfd"."""

    world: int
    ranks: Sequence[RankFacts]
    whole: Version | None
    backing: str
    silent_nodes: Sequence[str] = ()
    interval: int = 1


def judge(job: JobFacts) -> tuple[Health, str]:
    """The word, and the sentence that answers "what would I lose now?"."""
    if job.silent_nodes:
        return Health.WARN, f"no answer from the daemon of {', '.join(job.silent_nodes)}; what it holds is not known."
    if job.whole is None:
        return Health.WARN, "nothing is whole yet: a failure now would lose all steps of this run."
    living = [rank for rank in job.ranks if rank.alive]
    troubled = [rank for rank in living if rank.trouble]
    newest = max((rank.step for rank in living), default=job.whole.step)
    if troubled:
        first = troubled[0]
        return Health.WARN, f"rank {first.rank} takes no snapshots: {first.trouble} Held is step {job.whole.step}."
    if newest - job.whole.step > LAG_STEPS * job.interval:
        return Health.WARN, f"step {job.whole.step} is held, but training is at step {newest}: snapshots are skipped."
    if all(rank.closed for rank in job.ranks):
        return Health.OK, f"training has ended; step {job.whole.step} is still held."
    if len(living) < job.world:
        return (
            Health.WARN,
            f"{job.world - len(living)} of {job.world} trainers are gone; step {job.whole.step} is held.",
        )
    return Health.OK, f"step {job.whole.step} is held by all {job.world} ranks."


def survival(job: JobFacts) -> list[tuple[str, bool, str]]:
    """(loss, whether the held state survives it, what is lost) for each kind of loss."""
    held = job.whole is not None
    step = f"steps after {job.whole.step}" if job.whole else "all steps of this run"
    daemon = job.backing == "tmpfs"
    return [
        ("any number of trainers", held, step),
        (
            "a daemon, trainers alive" if daemon else "a daemon (memfd: while its trainers live)",
            held,
            "nothing" if daemon else "nothing while its trainers live",
        ),
        ("daemons and trainers", held and daemon, step if daemon else "all steps of this run"),
        ("a node", False, "all steps of this run"),
    ]
