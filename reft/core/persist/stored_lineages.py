"""Decides which checkpoint on storage counts, and whose it is.

    decisions of a lineage ─► those that no other one supersedes ─► one:  its checkpoints
                                                                └► more: a person must choose
    lineages of a job ─► the one that memory knows; else the only one that has not ended
                      └► more: a person must choose

Invariants
  1. Decisions are ordered by what they know of one another, never by counter or clock, by the rule
     of `reft.core.recovery.lineage`. Two decisions that do not know each other are two histories,
     if a checkpoint was written under both.
  2. The newest history wins, not the greatest step: a job that went back to step 500 on purpose is
     not taken to step 900 of the history that it left.
  3. A checkpoint counts if the history went through it, however many attaches ago.
  4. Storage that was not listed is not empty: this file is never asked then, and attach stops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reft.core.commit.decision import Decision, counts
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.lineage import histories
from reft.errors import AttachError


@dataclass(frozen=True)
class StoredLineage:
    """What storage holds of one lineage.

    Attributes:
        ident: its name, 16 hex digits.
        decisions: of its attaches.
        checkpoints: versions with a manifest that was read and is sound.
        has_ended: whether a purge has ended it.
    """

    ident: str
    decisions: tuple[Decision, ...] = ()
    checkpoints: tuple[Version, ...] = ()
    has_ended: bool = False

    def histories(self) -> list[Decision]:
        """Returns the decision in force; several if there are several histories."""
        remembered = {str(number): each for number, each in enumerate(self.decisions)}
        return histories(remembered, {}, {version.epoch for version in self.checkpoints})

    def history(self) -> Decision | None:
        """Returns the decision in force; None if storage has no decision.

        Raises:
            AttachError: there are two histories.
        """
        histories = self.histories()
        if len(histories) > 1:
            names = "; ".join(
                f"epoch {each.epoch.counter}, up to {_newest(self.checkpoints, each)}" for each in histories
            )
            raise AttachError(
                f"lineage {self.ident} went on more than once on storage, and neither continuation knew of the other: "
                f"{names}.",
                "move the decisions and checkpoints of the history to give up elsewhere",
            )
        return histories[0] if histories else None

    def restorable(self) -> list[Version]:
        """Returns the checkpoints of the newest history, the newest one first.

        Raises:
            AttachError: there are two histories.
        """
        decision, decisions = self.history(), {each.epoch: each for each in self.decisions}
        kept = [each for each in self.checkpoints if decision is None or leads_to(each, decision, decisions)]
        return sorted(kept, key=_order, reverse=True)

    def back_to(self, version: Version) -> Decision:
        """Returns the decision under which memory counts too, if the job goes back to `version`.

        It is the decision in force. If that one was made later than `version`, then it is as if it
        had gone back to `version`: no newer version of an ended epoch counts.
        """
        decision = self.history() or Decision(version.epoch, None)
        return decision if version.epoch == decision.epoch else replace(decision, base=version, guard=None)


def leads_to(version: Version, decision: Decision, decisions: Mapping[Epoch, Decision]) -> bool:
    """Whether a history went through a version.

    Args:
        version: the version.
        decision: the history's newest decision.
        decisions: epoch → its decision, of all earlier attaches that are known.
    """
    if counts(version, decision):
        return True
    while decision.base is not None and decision.base.epoch.counter < decision.epoch.counter:
        if decision.base.epoch == version.epoch or decision.base.epoch not in decisions:
            return False
        decision = decisions[decision.base.epoch]
        if counts(version, decision):
            return True
    return False


def lineage_of(job: str, lineages: Sequence[StoredLineage], known: str = "", asked: str = "") -> StoredLineage | None:
    """Returns the lineage that an attach goes on with; None: storage has none.

    Args:
        job: name of the job, for the message.
        lineages: what storage holds of the job.
        known: the lineage that the daemons' memory knows; empty: none.
        asked: the lineage that the user asked for; empty: none.

    Raises:
        AttachError: the asked lineage is not there, or several are and none is known.
    """
    by_ident = {each.ident: each for each in lineages}
    if asked:
        if asked not in by_ident:
            raise AttachError(
                f"storage has no lineage {asked} of job {job}; it has {', '.join(sorted(by_ident)) or 'none'}.",
                "correct --lineage, or leave it out",
            )
        return by_ident[asked]
    if known:
        return by_ident.get(known)
    going_on = [each for each in lineages if not each.has_ended and each.checkpoints]
    if len(going_on) > 1:
        held = "; ".join(f"{each.ident} up to {_newest(each.checkpoints)}" for each in going_on)
        raise AttachError(
            f"storage has {len(going_on)} lineages of job {job}, and memory knows none of them: {held}.",
            "choose one by REFT_LINEAGE, or start under another job name",
        )
    return going_on[0] if going_on else None


def newer_than_memory(decision: Decision | None, lineage: StoredLineage) -> bool:
    """Whether storage has a history that ended the one in memory.

    Then a version in memory, however great its step, was left behind.

    Args:
        decision: the decision in force in the daemons' memory; None: they know none.
        lineage: the same job on storage.
    """
    if decision is None:
        return True
    return any(each.supersedes(decision.epoch) for each in lineage.decisions)


def refuse_rival(job: str, decision: Decision | None, lineage: StoredLineage) -> None:
    """Raises AttachError if memory and storage went on from each other's past, and neither knew.

    Args:
        job: name of the job.
        decision: the decision in force in the daemons' memory; None: they know none.
        lineage: the same job on storage.
    """
    stored = lineage.history()
    if decision is None or stored is None or stored.epoch == decision.epoch:
        return
    is_written = any(each.epoch == stored.epoch for each in lineage.checkpoints)
    if is_written and not (decision.supersedes(stored.epoch) or stored.supersedes(decision.epoch)):
        raise AttachError(
            f"job {job} went on more than once, and neither continuation knew of the other: epoch "
            f"{decision.epoch.counter} in memory, and epoch {stored.epoch.counter} on storage, lineage {lineage.ident}, "
            f"up to {_newest(lineage.checkpoints, stored)}.",
            f"reft-cli purge {job} to give up memory; or move that lineage elsewhere to give up storage",
        )


def unknown_decisions(stored: Iterable[Decision], own: Decision) -> list[Decision]:
    """Returns the decisions on storage that a coordinator's own decision does not know.

    If there is any, another attach went on. This coordinator is stale, and writes nothing more.
    """
    return [each for each in stored if each.epoch != own.epoch and not own.supersedes(each.epoch)]


def _newest(versions: Collection[Version], decision: Decision | None = None) -> str:
    counted = [each for each in versions if counts(each, decision)]
    return str(max(counted, key=_order)) if counted else "no checkpoint"


def _order(version: Version) -> tuple[object, ...]:
    return (version.order, version.epoch.ident)
