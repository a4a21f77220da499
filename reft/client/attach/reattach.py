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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reft.client.attach import stage_names
from reft.client.attach.arguments import AttachContext
from reft.client.attach.begin import make_snapshotter
from reft.client.attach.introduce import compare, describe, introduce
from reft.client.attach.inventory import Erasure, take_inventory
from reft.client.attach.plan import decide, make_plan, manifest_of_base, recover
from reft.client.attach.restore import lease, leases_of, registration
from reft.client.link.exchange import gather
from reft.client.snapshot.snapshotter import Snapshotter
from reft.console import say
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.errors import ReftError, message, remedy
from reft.failpoints import Failpoints
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb

log = logging.getLogger("reft")
DEADLINE_S = 30.0  # the longest wait until all ranks reach the mark of one step
NAMES_SHOWN = 3
NOTHING = (-1, -1)  # sorts before the order of any version


@dataclass(frozen=True)
class PlacementReport:
    """What a rank finds at a review: whether its state misfits the placement."""

    misfits: bool


@dataclass(frozen=True)
class EndReport:
    """What a rank knows once its snapshots have ended.

    Attributes:
        whole: order of the newest version that the rank knows to be whole; NOTHING if none is.
    """

    whole: tuple[int, ...]


@dataclass
class PlacementReviews:
    """The placement reviews of one session.

    Args:
        context: of the attach that made the session; its rank group stays open until `close`.
        mismatched: names of the leaves of which each rank keeps its own copy now.
        start: the first step of the session.
    """

    context: AttachContext
    mismatched: Sequence[str]
    start: int

    def at(self, step: int, snapshots: Snapshotter) -> Snapshotter | None:
        """Returns the snapshotter from this mark on: the same, a new one, or None after a failure.

        All ranks call this method at each mark, after the window is closed.
        """
        rank_group = self.context.rank_group
        if not is_due(step - self.start) or rank_group.group is None:
            return snapshots
        try:
            reports = gather(
                rank_group, lambda: PlacementReport(snapshots.misfits()), PlacementReport, deadline_s=DEADLINE_S
            )
        except ReftError as error:
            log.warning(
                "reft no longer reviews its placement: %s Training and snapshots go on.%s",
                message(error),
                remedy(error),
            )
            rank_group.close()
            return snapshots
        if not any(report.misfits for report in reports):
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
        before = self.mismatched
        new_snapshots, manifest = reattach(self.context, step, before, snapshots)
        self.mismatched = tuple(manifest.mismatched)
        if self.context.rank == 0:
            say(f"step {step}: the placement was made anew; {_reason(before, self.mismatched)}")
        return new_snapshots

    def close(self) -> None:
        """Closes the rank group."""
        # The user's program may have ended torch.distributed already.
        with contextlib.suppress(RuntimeError, ValueError):
            self.context.rank_group.close()


def reattach(
    context: AttachContext, step: int, known_mismatched: Sequence[str], snapshots: Snapshotter
) -> tuple[Snapshotter, pb.Manifest]:
    """Attaches anew during training; returns the new snapshotter and the new manifest.

    The session's copy engine and its history stay in use.

    Args:
        context: of the attach that made the session.
        step: the completed step.
        known_mismatched: names of leaves that were mismatched before.
        snapshots: the snapshotter that ends.

    Raises:
        ReftError: re-attach failed on some rank; this rank is no longer registered.
    """
    # Each rank answers after its own snapshots have ended. Otherwise the rank could hear of a
    # newer whole version later, and overwrite older ones.
    ends = gather(context.rank_group, lambda: EndReport(_end_snapshots(step, snapshots)), EndReport, extra_s=DEADLINE_S)
    context = replace(context, failpoints=Failpoints(context.settings.failpoints))
    tracked = stage_names.named(context.rank_group, context.request.tracked)
    introduction = introduce(context, tracked, None)
    description = describe(context, introduction)
    survey = take_inventory(context, introduction)
    erased = given_up(survey, max(report.whole for report in ends))
    # The versions that are given up were never whole.
    recovery = recover(introduction.job.id, survey, erased, not survey.inventory.had_whole)
    now = compare(context, introduction, description)
    mismatched = all_mismatched(now, known_mismatched, manifest_of_base(survey, recovery))
    plan = make_plan(description, survey, recovery, mismatched, introduction.ranks.secrets.ident(0))
    decide(context, introduction, plan)
    with registration(context.rank_group, leases_of(context, introduction, plan)) as leases:
        slots = lease(context, introduction, plan, leases)
        new_snapshots = make_snapshotter(
            context,
            introduction,
            plan,
            leases,
            slots,
            snapshots.engine,
            snapshots.history,
            step,
            snapshots.planner.built,
        )
    return new_snapshots, plan.manifest


def given_up(survey: JobSurvey, whole: tuple[int, ...]) -> frozenset[Erasure]:
    """Returns the slots and capsules of versions that nobody knew to be whole.

    Args:
        survey: what all daemons hold of the job.
        whole: order of the newest version that any rank or daemon knows to be whole; NOTHING if
            there is none.
    """
    if whole == NOTHING and survey.inventory.had_whole:
        return frozenset()  # no rank had yet heard of the very first whole version
    copies: list[HeldSlot | HeldCapsule] = [*survey.held, *survey.copies]
    return frozenset(
        (each.node, each.slot, each.version)
        for each in copies
        if each.version is not None and each.version.order > whole
    )


def all_mismatched(now: Sequence[str], known: Sequence[str], base: pb.Manifest | None) -> list[str]:
    """Returns the leaves that are mismatched now, were mismatched before, or are in the base.

    Args:
        now: names of leaves that are mismatched now.
        known: names of leaves that were mismatched before.
        base: manifest of the base; None for a fresh start.
    """
    return sorted({*now, *known, *(base.mismatched if base else ())})


def is_due(steps: int) -> bool:
    """Decides whether a review is due `steps` steps after attach: at 2, 4, 8, …"""
    return steps >= 2 and steps & (steps - 1) == 0


def _end_snapshots(step: int, snapshots: Snapshotter) -> tuple[int, ...]:
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
    return max((each.order for each in (snapshots.round.whole, daemon_whole) if each is not None), default=NOTHING)


def _reason(before: Sequence[str], after: Sequence[str]) -> str:
    names = set(after) - set(before)
    if not names:
        return "it covers leaves that attach could not predict."
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"ranks differ in {', '.join(sorted(names)[:NAMES_SHOWN])}{rest}: each rank keeps its own copy."
