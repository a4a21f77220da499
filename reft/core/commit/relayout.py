"""A new layout in mid-training: no step waits for it, and no version mixes two layouts.

An epoch has one layout. A state that no longer fits that layout needs a new epoch. Two rounds agree
on it, the one of the old epoch and the one of the new epoch. `attempt` counts tries from 1 on.

    old epoch   rank whose state misfits ── attempt n ──► round ── wanted n ──► every rank
                every rank, on hearing n ── attempt n ──► round ── joined n ──► every rank
    threads     joined n ─► hold    each rank begins no more snapshots, and lets the last one end
                         ─► pin     each daemon ends the old epoch's round, and tells what is whole
                         ─► base    the newest version that a rank or a daemon told
                         ─► decide  manifest, new epoch and base: on every daemon
                         ─► slots   each rank by itself, as soon as it can
    new epoch   rank with slots, at step m ─ ready m ─► round ── start S ──► every rank
                S = the largest m + 1
                mark of step s ── S is known, and s ≥ S ──► snapshot        else ──► void(s)

"threads" are reft's own, one a rank. They meet only after every rank has said that its thread
waits. So a rank that evaluates for an hour delays the attempt, and no step of any rank.

Invariants
  1. At any moment a version can be restored that is not older than the newest one that any rank or
     daemon knew to be whole. Ranks and daemons overwrite only what is older than a version that
     they know to be whole. After hold and pin nobody learns of a newer one. So the base covers all
     of them.
  2. No rank writes in the old epoch once a daemon has the decision.
  3. No version mixes two layouts: a version is (epoch, step).
  4. All ranks hear the same S, because each rank's `ready` stays the same until its epoch ends. So
     all ranks compare all their bytes at the same steps.
  5. An attempt ends with the same result on every rank. If it fails before any daemon may have the
     decision, ranks and daemons go on with the old epoch. If it fails later, it is tried again from
     `hold` on.

Each message tells all that its sender knows, so the next one repairs a lost one. A late or repeated
message changes nothing: all numbers only grow. A restarted daemon hears the numbers again with the
next reports. It has forgotten the pin; if it has learnt of a newer whole version, it refuses the
decision, and the attempt is repeated. A kill before `decide` leaves the old epoch. A kill during
`decide` leaves two decisions: the higher one holds if each daemon of its manifest has it or a
higher one, else the lower one (`reft.core.recovery.lineage`). Both have the versions up to the
base, and nothing newer is whole. A kill after `decide` leaves the base, until a version of the new
epoch is whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from reft.core.commit.version import Version

# Steps from one attempt to the next double, up to so many.
DISTANCE_MAX = 1024


@dataclass(frozen=True)
class LayoutReport:
    """What a rank, or all ranks of a subtree, report on layouts.

    Attributes:
        wanted: the newest attempt that some rank waits for; 0: none.
        joined: the newest attempt that all ranks wait for, or have ended; 0: none.
        ready: the newest step at which one of the ranks got its slots of this epoch; -1: some rank
            has none yet, or the epoch began with an attach.
    """

    wanted: int = 0
    joined: int = 0
    ready: int = -1

    def merge(self, other: LayoutReport) -> LayoutReport:
        """Merges another report of the same sender, older or newer."""
        return LayoutReport(
            max(self.wanted, other.wanted), max(self.joined, other.joined), max(self.ready, other.ready)
        )


@dataclass(frozen=True)
class LayoutOutcome:
    """What the coordinator tells all ranks on layouts.

    Attributes:
        wanted: as in the reports.
        joined: as in the reports.
        start: the step from which this epoch's layout holds; -1: not known yet, or the epoch began
            with an attach.
    """

    wanted: int = 0
    joined: int = 0
    start: int = -1

    def after(self, report: LayoutReport) -> LayoutOutcome:
        """Returns the outcome after a report of all ranks. A start that was named stays."""
        start = self.start if self.start >= 0 or report.ready < 0 else report.ready + 1
        return LayoutOutcome(max(self.wanted, report.wanted), max(self.joined, report.joined), start)

    def merge(self, other: LayoutOutcome) -> LayoutOutcome:
        """Merges another outcome of the same epoch, older or newer."""
        return LayoutOutcome(
            max(self.wanted, other.wanted), max(self.joined, other.joined), max(self.start, other.start)
        )


def combine(reports: Collection[LayoutReport], sources: int) -> LayoutReport:
    """Returns the report of a subtree.

    Args:
        reports: the newest report of each rank and child node that was heard.
        sources: how many ranks and child nodes there are.
    """
    wanted = max((report.wanted for report in reports), default=0)
    if len(reports) < sources or not reports:
        return LayoutReport(wanted)
    ready = max(report.ready for report in reports) if all(report.ready >= 0 for report in reports) else -1
    return LayoutReport(wanted, min(report.joined for report in reports), ready)


def attempt_to_report(ended: int, wants: bool, heard: LayoutOutcome) -> int:
    """Returns the attempt that a rank reports as wanted and joined.

    Args:
        ended: how many attempts have ended on this rank, in this epoch.
        wants: whether the rank's own state misfits.
        heard: the outcome as this rank knows it.
    """
    return max(ended + 1 if wants else ended, heard.wanted)


def may_begin(ended: int, heard: LayoutOutcome) -> bool:
    """Decides whether a rank's thread begins the next attempt: all ranks wait for it."""
    return heard.joined > ended


def is_review_due(steps: int, attempts: int) -> bool:
    """Decides whether a rank may ask for a new layout.

    The first attempt follows a difference at once. Later ones keep a distance, which doubles: a
    state that changes at each step must not occupy the threads for ever.

    Args:
        steps: steps since attach, or since the last attempt ended.
        attempts: how many attempts have ended since attach.
    """
    return steps >= min(1 << attempts, DISTANCE_MAX)


def holds_at(step: int, start: int) -> bool:
    """Decides whether the new layout holds at a step. Until then, the step is void."""
    return 0 <= start <= step


def newest(known: Iterable[Version | None]) -> Version | None:
    """Returns the base: the newest of the versions that ranks and daemons know to be whole."""
    return max((version for version in known if version is not None), key=lambda version: version.order, default=None)


def accepts_base(base: Version | None, whole: Version | None) -> bool:
    """Decides whether a daemon takes the decision of an attempt.

    Args:
        base: the base of the decision.
        whole: the newest version that the daemon knows to be whole; it may have freed older ones.
    """
    return whole is None or (base is not None and not base.is_older_than(whole))
