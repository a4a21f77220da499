"""Re-attach: if the state no longer fits the placement, all ranks attach again during training.

A re-attach loads nothing, because the trainers have newer state than the slots.

    mark of step 2, 4, 8, … after attach     every rank reviews at the same steps, without a message
        each rank: do my leaves and their bytes fit the placement?
            ─► exchange ─┬─► all fit: go on
                         └─► one does not fit: all ranks re-attach at this mark:
                                old snapshots end ─► released ─► introduce … decide ─► lease
                                ─► snapshots of a new epoch, from this step on

The state does not fit in two cases:
  * Leaves exist that attach could not predict: the optimizer refuses to step on `meta`, or the
    state appears late. Such leaves are unreplicated.
  * Replicas of a cell are mismatched. Attach then compares each leaf, and every rank keeps its own
    copy of the mismatched leaves.

Invariants
  1. The base of the new epoch is the newest version that any rank or daemon knows to be whole. The
     base stays until a newer version is whole. Each daemon is asked after all its trainers have
     closed their sessions, too. From then on a daemon frees nothing, so it still holds the version
     that it named. Newer sealed versions are given up: the round may have refused them because of
     mismatched replicas.
  2. If a rank misses a review, the reviews end. If a re-attach fails, the snapshots of this run
     end. In both cases training goes on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reft.client.attach.run import Attachment
from reft.client.snapshot.engine import CopyEngine
from reft.client.snapshot.snapshotter import Snapshotter
from reft.client.snapshot.task import SnapshotHistory
from reft.console import say
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.errors import ReftError, message, remedy
from reft.wire.v1 import daemon_pb2 as pb

log = logging.getLogger("reft")
DEADLINE_S = 30.0  # the longest wait until all ranks reach the mark of one step
NAMES_SHOWN = 3
NOTHING = (-1, -1)  # sorts before the order of any version


@dataclass
class PlacementReviews:
    """The placement reviews of one session.

    Args:
        attachment: the attachment that made the session; its rank group stays open until `close`.
        start: the first step of the session.
    """

    attachment: Attachment
    start: int

    def at(self, step: int, snapshots: Snapshotter) -> Snapshotter | None:
        """Returns the snapshotter from this mark on: the same, a new one, or None after a failure.

        All ranks call this method at each mark, after the window is closed.
        """
        if not is_due(step - self.start) or self.attachment.rank_group.group is None:
            return snapshots
        rank_group = self.attachment.rank_group
        try:
            reviews = rank_group.gather_or_raise(lambda: {"misfits": snapshots.misfits()}, deadline_s=DEADLINE_S)
        except ReftError as error:
            log.warning(
                "reft no longer reviews its placement: %s Training and snapshots go on.%s",
                message(error),
                remedy(error),
            )
            rank_group.close()
            return snapshots
        if not any(rank["misfits"] for rank in reviews):
            return snapshots
        try:
            return self._reattached(step, snapshots)
        except Exception as error:
            # No error of reft may stop training.
            log.error(
                "reft takes no more snapshots in this run: re-attach failed: %s Training goes on.%s",
                message(error),
                remedy(error),
            )
            self.close()
            return None

    def _reattached(self, step: int, snapshots: Snapshotter) -> Snapshotter:
        before = self.attachment
        # Each rank answers after its own snapshots have ended. Otherwise the rank could hear of a
        # newer whole version later, and overwrite older ones.
        answers = before.rank_group.gather_or_raise(
            lambda: {"whole": _end_snapshots(step, snapshots)}, extra_s=DEADLINE_S
        )
        reattach = Reattach(before.settings, before.launch, before.rank_group, before.request)
        reattach.step, reattach.known_mismatched = step, tuple(before.manifest.mismatched)
        reattach.whole = max(tuple(rank["whole"]) for rank in answers)
        reattach.copy_engine, reattach.history = snapshots.engine, snapshots.history
        reattach.run()
        self.attachment = reattach
        if reattach.rank_group.rank == 0:
            say(f"step {step}: the placement was made anew; {_reason(before, reattach)}")
        return reattach.snapshots

    def close(self) -> None:
        """Closes the rank group."""
        # The user's program may have ended torch.distributed already.
        with contextlib.suppress(RuntimeError, ValueError):
            self.attachment.rank_group.close()


class Reattach(Attachment):
    """An attach during training: the ranks have newer state than the slots.

    Attributes:
        step: the completed step.
        whole: epoch counter and step of the newest version that any rank knows to be whole; NOTHING
            if there is none.
        known_mismatched: names of leaves that were mismatched before.
        copy_engine: the session's copy engine; stays in use.
        history: the session's tasks; stay in use.
        snapshots: the new snapshotter, after `run`.
    """

    step: int
    whole: tuple[int, ...]
    known_mismatched: Sequence[str]
    copy_engine: CopyEngine
    history: SnapshotHistory
    snapshots: Snapshotter

    def _mismatched(self, mismatched_now: Sequence[str], base: pb.Manifest | None) -> list[str]:
        return sorted({*mismatched_now, *self.known_mismatched, *(base.mismatched if base else ())})

    def _find(self, inventories: Sequence[Mapping[str, Any]]) -> None:
        super()._find(inventories)
        if self.whole == NOTHING and self.job_survey.inventory.had_whole:
            return  # no rank had yet heard of the very first whole version
        copies: list[HeldSlot | HeldCapsule] = [*self.job_survey.held, *self.job_survey.copies]
        self.erased = {
            (each.node, each.slot, each.version)
            for each in copies
            if each.version is not None and each.version.order > self.whole
        }

    def _may_start_fresh(self) -> bool:
        return not self.job_survey.inventory.had_whole  # the erased versions were never whole

    def _prefault(self) -> None:
        """Does nothing, because nothing is restored."""

    def _restore(self) -> list[int]:
        self.rank_group.gather_or_raise(self._register)
        return []

    def _copy_engine(self) -> CopyEngine:
        return self.copy_engine

    def _begin(self) -> None:  # type: ignore[override]
        self.snapshots = self._snapshots(self.history, self.step)


def is_due(steps: int) -> bool:
    """Decides whether a review is due `steps` steps after attach: at 2, 4, 8, …"""
    return steps >= 2 and steps & (steps - 1) == 0


def _end_snapshots(step: int, snapshots: Snapshotter) -> list[int]:
    """Ends the snapshots, and returns the order of the newest whole version.

    That is the newest version that this rank or its daemon knows to be whole.

    Raises:
        ReftError: the snapshots do not end, or the daemon does not answer.
    """
    if not snapshots.retire(DEADLINE_S):
        raise ReftError(f"the snapshot before step {step} did not end within {DEADLINE_S:.0f} s.")
    daemon_whole = snapshots.slots.daemon_whole()
    if daemon_whole is not None and snapshots.round.is_discarded(daemon_whole.step):
        daemon_whole = None
    return list(
        max((each.order for each in (snapshots.round.whole, daemon_whole) if each is not None), default=NOTHING)
    )


def _reason(before: Attachment, after: Attachment) -> str:
    names = set(after.manifest.mismatched) - set(before.manifest.mismatched)
    if not names:
        return "it covers leaves that attach could not predict."
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"ranks differ in {', '.join(sorted(names)[:NAMES_SHOWN])}{rest}: each rank keeps its own copy."
