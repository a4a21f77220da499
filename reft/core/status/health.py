"""Health in one word and one sentence, and what survives which loss: from facts to what `status` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from reft.core.commit.version import Version
from reft.core.status.protection import Protection, ProtectionWord
from reft.core.text import every

LAG_STEPS = 3  # a step may be trained while the one before is sealed and announced; beyond this snapshots fail
NAMES_MAX = 3  # nodes that one line names


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
    """One job as its daemons see it.

    Attributes:
        backing: "tmpfs", "memfd", or "unlinked": files of a tmpfs that somebody has removed.
        silent_nodes: names of those that did not answer.
        protection: what survives what now; None if it is not known.
        is_degraded: whether it was restored after a loss, and not whole again yet.
        mismatched: leaves whose replicas were found to differ.
    """

    world: int
    ranks: Sequence[RankFacts]
    whole: Version | None
    backing: str
    silent_nodes: Sequence[str] = ()
    interval: int = 1
    protection: Protection | None = None
    is_degraded: bool = False
    mismatched: Sequence[str] = ()

    @property
    def word(self) -> ProtectionWord | None:
        """How well it is protected; None if it is not known."""
        if self.is_degraded:
            return ProtectionWord.DEGRADED
        return self.protection.word if self.protection else None


def judge(job: JobFacts) -> tuple[Health, str]:
    """The word, and the sentence that answers "what would I lose now?"."""
    if job.silent_nodes:
        return _without(job, ", ".join(job.silent_nodes))
    if job.whole is None:
        return Health.WARN, "nothing is whole yet: a failure now would lose all steps of this run."
    living = [rank for rank in job.ranks if rank.alive]
    troubled = [rank for rank in living if rank.trouble]
    newest = max((rank.step for rank in living), default=job.whole.step)
    if troubled:
        first = troubled[0]
        return Health.WARN, f"rank {first.rank} skips snapshots: {first.trouble} Held is step {job.whole.step}."
    if newest - job.whole.step > LAG_STEPS * job.interval:
        return Health.WARN, f"step {job.whole.step} is held, but training is at step {newest}: snapshots are skipped."
    if job.mismatched:
        return Health.WARN, f"replicas of {', '.join(job.mismatched)} differ between ranks: such steps are not kept."
    if job.backing == "unlinked":
        return (
            Health.WARN,
            f"step {job.whole.step} is held, but its files were removed: it is gone when the daemon ends.",
        )
    if job.word is ProtectionWord.DEGRADED:
        return Health.WARN, f"step {job.whole.step} is held, but less survives now than was asked for."
    if all(rank.closed for rank in job.ranks):
        return Health.OK, f"training has ended; step {job.whole.step} is still held."
    if len(living) < job.world:
        gone = job.world - len(living)
        return Health.WARN, f"trainers gone: {gone} of {job.world}; step {job.whole.step} is held."
    return Health.OK, f"step {job.whole.step} is held by {every(job.world, 'rank')}."


def _without(job: JobFacts, names: str) -> tuple[Health, str]:
    """The verdict where some daemons do not answer."""
    if job.protection is None:
        return Health.WARN, f"no answer from the daemon of {names}; what it holds is not known."
    if job.protection.version is not None:
        step = job.protection.version.step
        return Health.WARN, f"no answer from the daemon of {names}; step {step} can be restored without it."
    if job.whole is None:
        return Health.WARN, f"no answer from the daemon of {names}, and nothing is whole yet."
    return Health.ERR, f"no answer from the daemon of {names}, and without it no step can be restored."


def survival(job: JobFacts) -> list[tuple[str, bool, str]]:
    """(loss, whether the held state survives it, what is lost) for each kind of loss."""
    held = job.whole is not None
    step = f"steps after {job.whole.step}" if job.whole else "all steps of this run"
    everything = "all steps of this run"
    after = {
        "tmpfs": ("a daemon, trainers alive", held, "nothing"),
        "memfd": ("a daemon (memfd: while its trainers live)", held, "nothing while its trainers live"),
        "unlinked": ("a daemon (its files were removed)", False, everything),
    }
    stays = job.backing == "tmpfs"
    return [
        ("any number of trainers", held, step),
        after[job.backing],
        ("daemons and trainers", held and stays, step if stays else everything),
        *_nodes(job, step),
    ]


def _nodes(job: JobFacts, step: str) -> list[tuple[str, bool, str]]:
    """The losses of nodes, as far as they are known; nothing survives where it is not known."""
    everything = "all steps of this run"
    found = job.protection
    if job.whole is None or found is None or found.version is None or found.tolerated < 0:
        return [("a node", False, everything)]
    rows = [("a node", not found.fatal, step)]
    if found.fatal:
        safe = found.nodes - len(found.fatal)
        which = f", if it is {_names(found.fatal)}" if safe else ""
        rows = [("a node", False, everything + which)]
    if found.nodes > 2 and not found.fatal:
        rows.append(("two nodes", *_pairs(found, step, everything)))
    if 1 < found.domains < found.nodes:
        which = f", if it is {_names(found.fatal_domains)}" if len(found.fatal_domains) < found.domains else ""
        lost = everything + which if found.fatal_domains else step
        rows.append(("a failure domain", not found.fatal_domains, lost))
    return rows


def _pairs(found: Protection, step: str, everything: str) -> tuple[bool, str]:
    """Whether any two nodes may vanish, and what is lost."""
    if found.survives_pairs:
        return True, step
    fatal = found.fatal_pairs
    if fatal and len(fatal) < found.nodes * (found.nodes - 1) // 2:
        return False, f"{everything}, e.g. {' and '.join(fatal[0])}"
    return False, everything


def _names(names: Sequence[str]) -> str:
    more = f" or {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return " or ".join(names[:NAMES_MAX]) + more
