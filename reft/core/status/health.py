"""Turns facts about a job into the content of `status`.

It shows health, and which losses the state survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from reft.core.commit.version import Version
from reft.core.recovery.holdings import Holdings, survives
from reft.core.status.protection import Protection, ProtectionWord
from reft.core.text import every, more
from reft.errors import FIX, split_remedy

LAG_STEPS = 3  # one step may train while the previous is sealed and announced; more means skipped snapshots
NAMES_MAX = 3  # one line names at most so many nodes


class Health(Enum):
    OK = "OK"
    WARN = "WARN"
    ERR = "ERR"


@dataclass(frozen=True)
class RankFacts:
    """One rank as its daemon sees it.

    Attributes:
        rank: the rank.
        node: name of its node.
        alive: whether a trainer is attached and lives.
        closed: whether the trainer closed its session.
        step: the newest step that the trainer reported, sealed or void; -1 if none.
        sealed: the newest sealed version; None if there is none.
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
        world: number of ranks.
        ranks: facts of each rank.
        whole: the newest whole version that is held; None if there is none.
        backing: "tmpfs", "memfd", or "unlinked": files of a tmpfs that were removed.
        silent_nodes: names of the nodes that did not answer.
        interval: snapshots are taken every so many steps.
        protection: what the state survives now; None if not known.
        is_degraded: whether the job was restored after a loss, and is not whole again yet.
        mismatched: leaves whose replicas differ.
        holdings: what is held now; None if not known.
        storage_trouble: what is wrong with the checkpoints on storage; empty: nothing.
        stored: the newest step on storage; None if there is none.
        refusing_nodes: those of the silent nodes whose daemons answer, and do not know this job.
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
    holdings: Holdings | None = None
    storage_trouble: str = ""
    stored: int | None = None
    refusing_nodes: Sequence[str] = ()

    @property
    def everything(self) -> str:
        """Returns the lost parts if all memory is lost."""
        return "all steps of this run" if self.stored is None else f"steps after {self.stored} (on storage)"

    @property
    def word(self) -> ProtectionWord | None:
        """Returns how well the job is protected; None if not known."""
        if self.is_degraded:
            return ProtectionWord.DEGRADED
        return self.protection.word if self.protection else None


def judge(job: JobFacts) -> tuple[Health, str]:
    """Returns the health, and a sentence on the possible loss now, perhaps with a remedy."""
    if job.holdings is not None and job.holdings.is_lost:
        return Health.ERR, job.holdings.reason
    if job.silent_nodes:
        return _judge_incomplete(job)
    if job.whole is None:
        return Health.WARN, "nothing is whole yet: a failure now would lose all steps of this run."
    living = [rank for rank in job.ranks if rank.alive]
    troubled = [rank for rank in living if rank.trouble]
    newest = max((rank.step for rank in living), default=job.whole.step)
    if troubled:
        first = troubled[0]
        why, remedy = split_remedy(first.trouble)
        others = more(len(troubled) - 1, "rank")
        skips = "skip" if others else "skips"
        sentence = f"rank {first.rank}{others} {skips} snapshots: {why} Step {job.whole.step} is held."
        return Health.WARN, f"{sentence}{FIX}{remedy}" if remedy else sentence
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
        return Health.WARN, f"step {job.whole.step} is held, but it survives fewer losses than requested."
    if job.storage_trouble:
        return Health.WARN, f"step {job.whole.step} is held, but checkpoints fail: {job.storage_trouble}"
    if all(rank.closed for rank in job.ranks):
        return Health.OK, f"training has ended; step {job.whole.step} is still held."
    gone = job.world - sum(rank.alive or rank.closed for rank in job.ranks)
    if gone:
        return Health.WARN, f"trainers gone: {gone} of {job.world}; step {job.whole.step} is held."
    ended = job.world - len(living)
    also = f" Training has ended on {ended} of {job.world} ranks." if ended else ""
    return Health.OK, f"step {job.whole.step} is held by {every(job.world, 'rank')}.{also}{_on_nodes(job)}"


def _on_nodes(job: JobFacts) -> str:
    """Returns a sentence on the newest protected step, if that is an older one."""
    protection = job.protection
    if job.whole is None or protection is None or protection.version is None:
        return ""
    if not protection.version.is_older_than(job.whole):
        return ""
    return f" {survives(job.whole.step, protection.version.step, protection.tolerated)}."


def _judge_incomplete(job: JobFacts) -> tuple[Health, str]:
    """Returns health and sentence if daemons are silent, or do not know the job."""
    silent = [name for name in job.silent_nodes if name not in job.refusing_nodes]
    words = [f"no answer from the daemon of {', '.join(silent)}"] if silent else []
    if job.refusing_nodes:
        words.append(
            f"the daemon of {', '.join(job.refusing_nodes)} does not know this job, or not by this node's token"
        )
    lacking = "; ".join(words)
    if job.holdings is None:
        return Health.WARN, f"{lacking}; its slots are not known."
    if job.holdings.version is None:
        return Health.WARN, f"{lacking}, and nothing is whole yet."
    return Health.WARN, f"{lacking}; step {job.holdings.version.step} can be restored without it."


def survival(job: JobFacts) -> list[tuple[str, bool, str]]:
    """Returns (loss, whether the state survives it, lost parts) for each kind of loss."""
    held = job.whole is not None
    everything = job.everything
    step = f"steps after {job.whole.step}" if job.whole else everything
    after = {
        "tmpfs": ("a daemon, trainers alive", held, "nothing" if held else everything),
        "memfd": (
            "a daemon (memfd: while its trainers live)",
            held,
            "nothing while its trainers live" if held else everything,
        ),
        "unlinked": ("a daemon (its files were removed)", False, everything),
    }
    stays = job.backing == "tmpfs"
    return [
        ("any number of trainers", held, step),
        after[job.backing],
        ("daemons and trainers", held and stays, step if stays else everything),
        *_node_losses(job, step),
    ]


def _node_losses(job: JobFacts, step: str) -> list[tuple[str, bool, str]]:
    """Returns the rows for losses of nodes. A loss that is not known counts as not survived."""
    everything, protection = job.everything, job.protection
    if job.whole is None or protection is None or protection.version is None or protection.tolerated < 0:
        return [("a node", False, everything)]
    if protection.version.is_older_than(job.whole):
        step = f"steps after {protection.version.step}"
    rows = [("a node", not protection.fatal, step)]
    if protection.fatal:
        safe = protection.nodes - len(protection.fatal)
        condition = f", if it is {_names(protection.fatal)}" if safe else ""
        rows = [("a node", False, everything + condition)]
    if protection.nodes > 2 and not protection.fatal:
        rows.append(("two nodes", *_pair_loss(protection, step, everything)))
    if 1 < protection.domains < protection.nodes:
        condition = (
            f", if it is {_names(protection.fatal_domains)}"
            if len(protection.fatal_domains) < protection.domains
            else ""
        )
        lost = everything + condition if protection.fatal_domains else step
        rows.append(("a failure domain", not protection.fatal_domains, lost))
    return rows


def _pair_loss(protection: Protection, step: str, everything: str) -> tuple[bool, str]:
    """Returns whether any two nodes may vanish, and the lost parts."""
    if protection.survives_pairs:
        return True, step
    fatal = protection.fatal_pairs
    if fatal and len(fatal) < protection.nodes * (protection.nodes - 1) // 2:
        return False, f"{everything}, e.g. {' and '.join(fatal[0])}"
    return False, everything


def _names(names: Sequence[str]) -> str:
    more = f" or {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return " or ".join(names[:NAMES_MAX]) + more


def held_version(announced: Version | None, holdings: Holdings | None) -> Version | None:
    """Returns the newest whole version that is held now; None if there is none.

    Args:
        announced: the newest version that the round called whole, or the base of the attach.
        holdings: what is held now; None if not known.
    """
    if holdings is None or (announced is None and holdings.version is None):
        return announced
    versions = [version for version in (announced, holdings.version) if version is not None]
    return None if holdings.version is None else min(versions, key=lambda version: version.order)
