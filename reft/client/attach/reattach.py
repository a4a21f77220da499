"""Reattach: when the state no longer fits its placement, all ranks attach anew in mid-run, without loading.

    mark of step 2, 4, 8, … after attach     the same steps on every rank, because their numbers alone say so
        each rank: do my leaves and their bytes fit the placement? ─► exchange ─┬─► all do: go on
                                                                                └─► one does not: all, at this mark:
              old snapshots end ─► released ─► introduce … decide ─► lease ─► snapshots of a new epoch, from this step on

It does not fit if leaves exist that attach could not foresee (an optimizer that refuses to step on `meta`, state that comes
late): nobody else keeps them. Or if ranks were found to hold different bytes in a cell: attach compares each leaf on its own,
and those that differ are kept by every rank for itself.

Invariants
  1. The newest version that any rank or daemon was told to be whole is the base of the new epoch: it stays until a newer
     one is whole. A daemon all of whose trainers have closed their sessions lets go of nothing any more, and is asked after that:
     whatever it hears later, it still holds what it then knew. What all ranks sealed after the base may be what the round
     refused because replicas differ, so that is given up.
  2. A rank that does not come ends the reviews, a renewal that fails ends the snapshots of this run; training goes on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reft.client.attach.run import Attachment
from reft.client.snapshot.engine import CopyEngine
from reft.client.snapshot.snapshotter import SnapshotCounts, Snapshotter
from reft.console import say
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.errors import ReftError
from reft.wire.v1 import daemon_pb2 as pb

log = logging.getLogger("reft")
DEADLINE_S = 30.0  # for ranks to come to the mark of one step
NAMES_SHOWN = 3
NOTHING = (-1, -1)  # comes before the order of any version


@dataclass
class PlacementReviews:
    """The reviews of one session.

    Args:
        attachment: that made the session; its exchange is kept until `close`.
        start: the step at which it began.
    """

    attachment: Attachment
    start: int

    def at(self, step: int, snapshots: Snapshotter) -> Snapshotter | None:
        """What takes snapshots from this mark on: the same, new ones, or none if they could not be made.

        All ranks call it at each mark, after the window is closed.
        """
        if not is_due(step - self.start) or self.attachment.rank_group.group is None:
            return snapshots
        rank_group = self.attachment.rank_group
        try:
            found = rank_group.gather_or_raise(lambda: {"misfits": misfits(snapshots)}, deadline_s=DEADLINE_S)
        except ReftError as error:
            log.warning("reft no longer reviews its placement: %s Training and snapshots go on.", error)
            rank_group.close()
            return snapshots
        if not any(rank["misfits"] for rank in found):
            return snapshots
        try:
            return self._renewed(step, snapshots)
        except Exception as error:
            # A protector must not be the killer: whatever went wrong, training goes on.
            log.error("reft takes no more snapshots in this run: attaching anew failed: %s Training goes on.", error)
            self.close()
            return None

    def _renewed(self, step: int, snapshots: Snapshotter) -> Snapshotter:
        before = self.attachment
        # Asked once no rank can hear of a newer one any more: a rank that hears of one writes over older ones.
        known = before.rank_group.gather_or_raise(lambda: {"whole": _retired(step, snapshots)}, extra_s=DEADLINE_S)
        renewal = Reattach(before.settings, before.launch, before.rank_group, before.request)
        renewal.step, renewal.known_unequal = step, tuple(before.manifest.mismatched)
        renewal.whole = max(tuple(rank["whole"]) for rank in known)
        renewal.copy_engine, renewal.counts = snapshots.copy_engine, snapshots.counts
        renewal.run()
        self.attachment = renewal
        if renewal.rank_group.rank == 0:
            say(f"step {step}: the placement was made anew; {_said(before, renewal)}")
        return renewal.snapshots

    def close(self) -> None:
        """Gives the exchange back."""
        with contextlib.suppress(RuntimeError, ValueError):  # the user's program ended torch.distributed before
            self.attachment.rank_group.close()


class Reattach(Attachment):
    """An attach of ranks that train: what they have is newer than what is held.

    Attributes:
        step: that was completed.
        whole: epoch counter and step of the newest version that any rank was told to be whole; NOTHING: none was told of one.
        known_unequal: names of leaves that were unequal before.
        copy_engine: the engine, which goes on.
        counts: the session's counts, which go on.
        snapshots: what was made.
    """

    step: int
    whole: tuple[int, ...]
    known_unequal: Sequence[str]
    copy_engine: CopyEngine
    counts: SnapshotCounts
    snapshots: Snapshotter

    def _mismatched(self, found: Sequence[str], base: pb.Manifest | None) -> list[str]:
        return sorted({*found, *self.known_unequal, *(base.mismatched if base else ())})

    def _find(self, inventories: Sequence[Mapping[str, Any]]) -> None:
        super()._find(inventories)
        if self.whole == NOTHING and self.job_survey.inventory.had_whole:
            return  # the news of the very first whole version had not come yet
        found: list[HeldSlot | HeldCapsule] = [*self.job_survey.held, *self.job_survey.copies]
        self.erased = {
            (each.node, each.slot, each.version)
            for each in found
            if each.version is not None and each.version.order > self.whole
        }

    def _may_begin_anew(self) -> bool:
        return not self.job_survey.inventory.had_whole  # what is given up here was never whole

    def _make_room(self) -> None:
        """Nothing is restored."""

    def _restore(self) -> list[int]:
        self.rank_group.gather_or_raise(self._register)
        return []

    def _copy_engine(self) -> CopyEngine:
        return self.copy_engine

    def _begin(self) -> None:  # type: ignore[override]
        self.snapshots = self._snapshots(self.counts, self.step)


def is_due(steps: int) -> bool:
    """Whether a review is due so many steps after attach: at powers of two from 2 on."""
    return steps >= 2 and steps & (steps - 1) == 0


def misfits(snapshots: Snapshotter) -> bool:
    """Whether this rank's state does not fit its placement, as far as the last snapshot showed."""
    return bool(snapshots.unforeseen or snapshots.reporter.mismatched)


def _retired(step: int, snapshots: Snapshotter) -> list[int]:
    """Ends the snapshots; the order of the newest version that this rank, or its daemon, was told to be whole.

    Raises:
        ReftError: they do not end, or the daemon does not answer.
    """
    if not snapshots.retire(DEADLINE_S):
        raise ReftError(f"the snapshot before step {step} did not end within {DEADLINE_S:.0f} s.")
    told = snapshots.leases.whole()
    if told is not None and snapshots.leaves_out(told.step):
        told = None
    return list(max((each.order for each in (snapshots.whole, told) if each is not None), default=NOTHING))


def _said(before: Attachment, after: Attachment) -> str:
    names = set(after.manifest.mismatched) - set(before.manifest.mismatched)
    if not names:
        return "it covers leaves that attach could not foresee."
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"ranks differ in {', '.join(sorted(names)[:NAMES_SHOWN])}{rest}: each keeps its own."
