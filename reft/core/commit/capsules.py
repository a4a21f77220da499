"""Capsules: what of a version must outlive its node beside coded blocks, and from when on a rank's answer counts.

    rank 3 ─ sealed(s) ─► owed to ──Keep──► node 5 ─ack─┐
                          each holder ─────► node 9 ─ack─┴─ all? ─► sealed(s) ─► the node's Round
           └ until then: pending(s) ─────────────────────────────► pending(s) ► the node's Round
    rank 3 ─ void(s) ────────────────────────────────────────────► void(s) ───► the node's Round

Invariants
  1. sealed(s) of a rank enters the round only after every holder has acknowledged the rank's capsule of s. So whole(s)
     implies that each capsule of s lies on its own node and on f nodes of f other failure domains.
  2. void(s) enters at once. So does sealed(s) on a node without holders.
  3. What the round has decided is owed to nobody: a void needs no capsule, a whole version has them, and what is older
     than a whole one is never restored.
  4. A holder lets go of a version only if a newer one is known to be whole, if its step is void, or if the decision in
     force excludes it. The decision's base is kept until a version of the new epoch is whole.

A lost Keep, or a lost acknowledgement of it, leaves the capsule owed: it is sent again, and the holder that has it already
says so again. A late or repeated acknowledgement changes nothing. A capsule that comes late, when its step is decided, is
acknowledged and not stored. A Keep brings the outcome that its sender knows: so a holder that is cut off from the coordinator
knows what is whole, and never has more undecided steps of a rank than the rank has slots. A daemon that was restarted has
forgotten who acknowledged what: it owes again all that its slots hold sealed. The oldest step goes first, so that a slow
holder gets to each of them in the end.
One `CapsuleAcks` belongs to one epoch of one node, as the `Round` beside it does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from reft.core.commit.decision import Decision, counts
from reft.core.commit.round import NO_DIGESTS, NOTHING, UNDECIDED_MAX, Digests, Outcome, StepReport
from reft.core.commit.version import Version

DIGESTS_MAX = 8 << 20  # bytes that travel with one capsule: digests of a million chunks


@dataclass
class CapsuleAcks:
    """Which capsules one node owes to whom.

    Args:
        holders: the nodes that keep this node's capsules, by their indexes in the manifest.
    """

    holders: tuple[int, ...]
    _outcome: Outcome = field(default_factory=Outcome)
    _said: dict[int, StepReport] = field(default_factory=dict)
    # rank → sealed step → holders that have not acknowledged it; none missing: the answer counts
    _missing: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    _digests: dict[int, dict[int, Mapping[int, int]]] = field(default_factory=dict)

    def hear_rank(self, rank: int, said: StepReport, digests: Digests = NO_DIGESTS) -> StepReport:
        """Takes what a local rank says; returns what of it counts already: the rest is pending.

        Args:
            digests: what the rank says of its cells, for the round; see `digests_of`.
        """
        self._said[rank] = self._said.get(rank, NOTHING).then(said).without(self._outcome)
        missing, kept = self._missing.setdefault(rank, {}), self._digests.setdefault(rank, {})
        for step in self._said[rank].sealed & said.sealed:
            if step not in missing:
                missing[step] = set(self.holders)
                kept[step] = digests.get(step, {})
        self._let_go(rank)
        return self._due(rank)

    def digests_of(self, rank: int) -> Digests:
        """What came with the rank's answers: it enters the round with them, however late they count."""
        return self._digests.get(rank, NO_DIGESTS)

    def owed(self, holder: int) -> list[tuple[int, int]]:
        """(rank, step) of what `holder` has not acknowledged, the oldest step first."""
        pairs = ((rank, step) for rank, steps in self._missing.items() for step in steps)
        owed = [(rank, step) for rank, step in pairs if holder in self._missing[rank][step]]
        return sorted(owed, key=lambda pair: (pair[1], pair[0]))

    def acknowledge(self, holder: int, kept: Iterable[tuple[int, int]]) -> dict[int, StepReport]:
        """Takes what `holder` keeps now, as (rank, step); returns what counts from now on, by rank."""
        due = {}
        for rank, step in kept:
            missing = self._missing.get(rank, {}).get(step)
            if missing and holder in missing:
                missing.remove(holder)
                if not missing:
                    due[rank] = self._due(rank)
        return due

    def forget(self, rank: int, step: int) -> None:
        """The rank's slots do not hold this step any more: nothing can be sent, and it stays pending."""
        self._missing.get(rank, {}).pop(step, None)
        self._digests.get(rank, {}).pop(step, None)

    def settle(self, outcome: Outcome) -> None:
        """Takes what the round decided."""
        self._outcome = outcome
        for rank, said in self._said.items():
            self._said[rank] = said.without(outcome)
            self._let_go(rank)

    def _due(self, rank: int) -> StepReport:
        said, missing = self._said[rank], self._missing[rank]
        counting = frozenset(step for step in said.sealed if missing.get(step) == set())
        return replace(said, sealed=counting, pending=said.pending | said.sealed - counting)

    def _let_go(self, rank: int) -> None:
        """Of what the rank has not sealed, or what is decided, nothing is kept."""
        for step in self._missing[rank].keys() - self._said[rank].sealed:
            self.forget(rank, step)


def surplus(kept: Collection[Version], decision: Decision, outcome: Outcome) -> set[Version]:
    """Which versions of one rank a holder lets go of: invariant 4, and no more than UNDECIDED_MAX undecided ones.

    Args:
        kept: the versions whose capsules it keeps.
        decision: the one in force.
        outcome: what it knows of the round of the decision's epoch.
    """
    newest_whole = Version(decision.epoch, outcome.whole) if outcome.whole >= 0 else None
    dropped = set()
    undecided = []
    for version in kept:
        is_over = newest_whole is not None and version.is_older_than(newest_whole)
        if is_over or not counts(version, decision):
            dropped.add(version)
        elif version.epoch == decision.epoch and version != newest_whole:
            if outcome.voids(version.step):
                dropped.add(version)
            else:
                undecided.append(version)
    undecided.sort(key=lambda version: version.step)
    return dropped | set(undecided[:-UNDECIDED_MAX])
