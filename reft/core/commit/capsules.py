"""Decides which capsules a node owes, and when a "sealed" may enter the round.

A node's memory may be lost. Shards on other nodes protect its cells, capsules protect the rest. A
*holder* is one of the nodes that keep this node's capsules. *Keep* is the message to a holder. A
step is *pending* if its answer does not count yet, although the rank has sealed the step.

    rank 3 ─ sealed(s) ─► owed to ──Keep──► node 5 ─ack─┐
                          each holder ─────► node 9 ─ack─┴─ all? ─► sealed(s) ─► the node's Round
           └ until then: pending(s) ─────────────────────────────► pending(s) ► the node's Round
    rank 3 ─ void(s) ────────────────────────────────────────────► void(s) ───► the node's Round

Invariants
  1. sealed(s) of a rank enters the round only after every holder has acknowledged the rank's
     capsule of s. So whole(s) implies that each capsule of s lies on its own node and on f nodes of
     f other failure domains.
  2. void(s) enters the round at once. So does sealed(s) on a node without holders.
  3. Capsules of decided steps are not owed: a void step needs none, a whole step has them all, and
     a version older than a whole one is never restored.
  4. A holder drops a version only if a newer one is known to be whole, if its step is void, or if
     the decision in force excludes it. A pinned version (core/commit/pins.py) is never dropped: it
     stays until pins arrive that no longer have it. So the decision's base is kept until a version
     of the new epoch is whole, and its guard until one is protected. One exception bounds memory:
     of a rank's undecided versions, a holder keeps only the newest UNDECIDED_MAX. A sender that
     owes more breaks the round's limit.

Two words differ here. The *round* decides a step: whole or void. A *decision* is the result of one
attach: the new epoch, and the base, which is the version that training starts from.

If a Keep or its acknowledgement is lost, the capsule stays owed. The node sends it again, and a
holder that has it acknowledges again. A late or repeated acknowledgement changes nothing. If a
capsule arrives after its step is decided, the holder acknowledges it without storing it. A Keep
also carries the outcome that its sender knows. So a holder that is cut off from the coordinator
knows which steps are whole and pinned, and drops old ones. A sender offers only steps that its
slots hold. So a holder keeps few undecided steps of a rank. A restarted daemon has no record of
acknowledgements: all sealed slots are owed again. The oldest step is sent first, so that a slow
holder gets each of them in the end.

One `CapsuleAcks` belongs to one epoch of one node, as does the `Round` beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from reft.core.commit.decision import Decision, counts
from reft.core.commit.pins import pinned_versions
from reft.core.commit.round import NO_DIGESTS, NOTHING, UNDECIDED_MAX, Digests, Outcome, StepReport
from reft.core.commit.version import Version

# Bytes of chunk digests that travel beside one capsule (CapsuleRecord): a million chunks. The
# digests below are other ones: those of whole cells, which the round compares.
DIGESTS_MAX = 8 << 20


@dataclass
class CapsuleAcks:
    """The capsules that one node must still send, and to which holders.

    Args:
        holders: the nodes that keep this node's capsules, by their indexes in the manifest.
    """

    holders: tuple[int, ...]
    _outcome: Outcome = field(default_factory=Outcome)
    _reports: dict[int, StepReport] = field(default_factory=dict)
    # rank → sealed step → holders that have not acknowledged the capsule. An empty set: all have,
    # so "sealed" counts. No entry: the capsule is not owed, and "sealed" does not count.
    _unacknowledged: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    _digests: dict[int, dict[int, Mapping[int, int]]] = field(default_factory=dict)

    def hear_rank(self, rank: int, report: StepReport, digests: Digests = NO_DIGESTS) -> StepReport:
        """Takes a local rank's report; returns the report that may enter the round.

        Sealed steps whose capsules are not acknowledged are pending in the result.

        Args:
            rank: the sender.
            report: its answers.
            digests: step → cell → digest, for the sealed steps; see `digests_of`.
        """
        self._reports[rank] = self._reports.get(rank, NOTHING).merge(report).without_decided(self._outcome)
        unacknowledged, digests_of_rank = self._unacknowledged.setdefault(rank, {}), self._digests.setdefault(rank, {})
        # Left out: steps that the rank answered otherwise before, and steps that are decided.
        for step in self._reports[rank].sealed & report.sealed:
            if step not in unacknowledged:
                unacknowledged[step] = set(self.holders)
                digests_of_rank[step] = digests.get(step, {})
        self._drop_unsealed(rank)
        return self._effective_report(rank)

    def digests_of(self, rank: int) -> Digests:
        """Returns the digests of the rank's sealed steps: step → cell → digest.

        They enter the round together with the answers, also if the answers count only later.
        """
        return self._digests.get(rank, NO_DIGESTS)

    def owed(self, holder: int) -> list[tuple[int, int]]:
        """Returns the (rank, step) that `holder` has not acknowledged, the oldest step first."""
        pairs = ((rank, step) for rank, steps in self._unacknowledged.items() for step in steps)
        owed = [(rank, step) for rank, step in pairs if holder in self._unacknowledged[rank][step]]
        return sorted(owed, key=lambda pair: (pair[1], pair[0]))

    def acknowledge(self, holder: int, kept: Iterable[tuple[int, int]]) -> dict[int, StepReport]:
        """Takes a holder's acknowledgement; returns the reports that changed, by rank.

        Args:
            holder: the node that acknowledges.
            kept: the (rank, step) of each capsule that the holder now keeps.
        """
        reports = {}
        for rank, step in kept:
            unacknowledged = self._unacknowledged.get(rank, {}).get(step)
            if unacknowledged and holder in unacknowledged:
                unacknowledged.remove(holder)
                if not unacknowledged:
                    reports[rank] = self._effective_report(rank)
        return reports

    def forget(self, rank: int, step: int) -> None:
        """Stops sending the capsule of a step: no undamaged slot of the rank holds the step now.

        The step stays pending, because too few nodes have the capsule. If the rank reports the step
        as sealed again, the capsule is owed again. Once the step is decided, nothing is owed.
        """
        self._unacknowledged.get(rank, {}).pop(step, None)
        self._digests.get(rank, {}).pop(step, None)

    def settle(self, outcome: Outcome) -> None:
        """Takes the round's outcome, and drops the capsules of decided steps."""
        self._outcome = outcome
        for rank, report in self._reports.items():
            self._reports[rank] = report.without_decided(outcome)
            self._drop_unsealed(rank)

    def _effective_report(self, rank: int) -> StepReport:
        report, unacknowledged = self._reports[rank], self._unacknowledged[rank]
        acknowledged = frozenset(step for step in report.sealed if unacknowledged.get(step) == set())
        return replace(report, sealed=acknowledged, pending=report.pending | report.sealed - acknowledged)

    def _drop_unsealed(self, rank: int) -> None:
        """Forgets the steps that are decided, or that the rank has not sealed."""
        for step in self._unacknowledged[rank].keys() - self._reports[rank].sealed:
            self.forget(rank, step)


def capsules_to_drop(kept: Collection[Version], decision: Decision, outcome: Outcome) -> set[Version]:
    """Returns the versions of one rank whose capsules a holder drops.

    Follows invariant 4, and limits undecided versions to UNDECIDED_MAX.

    Args:
        kept: the versions whose capsules the holder has.
        decision: the decision in force.
        outcome: what the holder knows of the round of the decision's epoch.
    """
    newest_whole = Version(decision.epoch, outcome.whole) if outcome.whole >= 0 else None
    pinned = pinned_versions(outcome.pins, decision)
    dropped = set()
    undecided = []
    for version in kept:
        if version in pinned:
            continue
        is_superseded = newest_whole is not None and version.is_older_than(newest_whole)
        if is_superseded or not counts(version, decision):
            dropped.add(version)
        elif version.epoch == decision.epoch:
            if outcome.voids(version.step):
                dropped.add(version)
            else:
                undecided.append(version)
    undecided.sort(key=lambda version: version.step)
    return dropped | set(undecided[:-UNDECIDED_MAX])
