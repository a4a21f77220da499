"""Re-attach: a new layout in mid-training, made beside training.

    each mark        own state misfits, or another rank wants an attempt ─► thread `reft-layout`
    thread           all ranks' threads wait (the round tells)
                     ─► introduce, describe; which leaves differ, by digests of snapshots
                     ─► hold, pin ─► base ─► plan, decide, secure ─► slots ─► new snapshotter
    a later mark     the new snapshotter takes the place of the old one
    marks until S    void: the round names S once all ranks have slots

`reft.core.commit.relayout` has the protocol: what happens to lost and late messages, and at a kill.
A re-attach loads nothing, because the trainers have newer state than the slots. No tensor is read:
training writes them meanwhile. At a mark the training thread looks at variables of its own process.

The state misfits in two cases:
  * Leaves exist that attach could not predict: the optimizer refuses to step on `meta`, or the
    state appears late. Such leaves are unreplicated.
  * Replicas of a cell are mismatched. Then the snapshots compare each leaf (`CopiedEvent`), and
    after the re-attach every rank keeps its own copy of the mismatched leaves.

Invariants
  1. The base of the new epoch is the newest version that any rank or daemon knows to be whole. The
     base stays until a newer version is whole. Newer sealed versions are given up: the round may
     have refused them because of mismatched replicas.
  2. If an attempt fails before `decide`, snapshots of the old epoch go on, and a later mark tries
     again. From `decide` on the old epoch may be over, so the threads try again until the new one
     holds. Training goes on in all cases.
  3. If a rank is missing in an exchange, the rank group is of no more use, and reviews end until
     the job restarts. From `decide` on no snapshot is taken until then, either. `session.stats()`
     and one line of the log say so. A rank that is only late is not missing: no exchange begins
     before all threads wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from reft.client.attach.arguments import AttachContext
from reft.client.attach.begin import make_snapshotter
from reft.client.attach.copy_choice import choose
from reft.client.attach.introduce import Introduction, LocalState, describe, introduce_state
from reft.client.attach.inventory import Erasure, take_inventory
from reft.client.attach.plan import AttachPlan, decide, make_plan, manifest_of_base, recover
from reft.client.attach.records import lease_records_alone
from reft.client.attach.restore import leases_of, secure
from reft.client.link.exchange import Record, gather
from reft.client.link.rank_group import RanksMissing
from reft.client.link.slots import MappedSlot, SlotLeases
from reft.client.snapshot.replica_check import LeafDigests, mismatched_names
from reft.client.snapshot.snapshotter import Snapshotter
from reft.console import say
from reft.core.commit.relayout import attempt_to_report, is_review_due, may_begin
from reft.core.commit.version import Version
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.errors import AttachError, DaemonUnavailable, NoRoom, ReftError, message, remedy
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import layouts_of
from reft.wire.v1 import daemon_pb2 as pb

log = logging.getLogger("reft")
HOLD_S = 30.0  # the longest wait until the last snapshot of the old epoch has ended
COMMON_STEP_S = 30.0  # the longest wait until all ranks have compared the leaves of one step
POLL_S = 0.02
AGAIN_S = 0.2  # reports are repeated so often while ranks wait for one another
PAUSE_MAX_S = 60.0  # between two tries to store the decision, or to end the pin
END_S = 10.0  # the longest wait for the thread at the end of the session
NAMES_SHOWN = 3
NOTHING = (-1, -1)  # sorts before the order of any version


@dataclass(frozen=True)
class StepDigestReport:
    """What a rank has compared.

    Attributes:
        differs: whether the round has told this rank that replicas differ.
        steps: step → one digest of all leaf digests.
    """

    differs: bool
    steps: dict[int, str]


@dataclass(frozen=True)
class EndReport:
    """What a rank knows once its snapshots have ended.

    Attributes:
        whole: order of the newest version that the rank, or its daemon, knows to be whole; NOTHING
            if none is.
    """

    whole: tuple[int, ...]


class PlacementReviews:
    """The placement reviews of one session.

    Args:
        context: of the attach that made the session; its rank group stays open until `end`.
        mismatched: names of the leaves of which each rank keeps its own copy now.
        start: the first step of the session.

    Attributes:
        is_over: whether reviews have ended, because the rank group is of no more use.
    """

    def __init__(self, context: AttachContext, mismatched: Sequence[str], start: int) -> None:
        self.context = context
        self.mismatched = mismatched
        self._step = self._last_step = start  # of the newest mark; when the last attempt ended
        self._attempts = 0  # since attach
        self._ended = 0  # attempts that failed in this epoch
        self.is_over = False
        self._thread: threading.Thread | None = None
        self._ready: Snapshotter | None = None  # the snapshotter of the new layout
        self._is_replaced, self._is_closing = threading.Event(), threading.Event()

    def at(self, step: int, snapshots: Snapshotter) -> Snapshotter:
        """Returns the snapshotter from this mark on: the same, or that of a new layout.

        Waits for nothing.
        """
        self._step = step
        if self._ready is not None:
            snapshots, self._ready = self._ready, None
            self._is_replaced.set()
        if self.is_over or (self._thread is not None and self._thread.is_alive()):
            return snapshots
        wants = snapshots.misfits() and is_review_due(step - self._last_step, self._attempts)
        attempt = attempt_to_report(self._ended, wants, snapshots.reporter.layout)
        if attempt > self._ended:
            snapshots.reporter.layout_report = replace(snapshots.reporter.layout_report, wanted=attempt, joined=attempt)
            self._is_replaced.clear()
            self._thread = threading.Thread(target=self._try, args=(snapshots,), name="reft-layout", daemon=True)
            self._thread.start()
        return snapshots

    def end(self, snapshots: Snapshotter) -> Snapshotter:
        """Ends the reviews; returns the snapshotter of the newest layout.

        An attempt that has begun is finished first, so that no other rank misses this one.
        """
        self._is_closing.set()
        self._is_replaced.set()
        if self._thread is not None:
            self._thread.join(END_S)
        if self._thread is None or not self._thread.is_alive():
            # The user's program may have ended torch.distributed already.
            with contextlib.suppress(RuntimeError, ValueError):
                self.context.rank_group.close()
        newest, self._ready = self._ready or snapshots, None
        return newest

    def _try(self, snapshots: Snapshotter) -> None:
        """Makes one attempt, in its own thread."""
        reporter, repeated_s = snapshots.reporter, 0.0
        while not may_begin(self._ended, reporter.layout):
            if self._is_closing.wait(POLL_S):
                return
            if time.monotonic() - repeated_s > AGAIN_S:
                reporter.send()
                repeated_s = time.monotonic()
        try:
            new_snapshots, manifest = reattach(self.context, self.mismatched, snapshots, self._is_closing)
        except Exception as error:
            # No error of reft may stop training.
            self.is_over = not isinstance(error, ReftError) or isinstance(error, RanksMissing)
            self._note_failure(error, snapshots)
            self._attempts, self._ended, self._last_step = self._attempts + 1, self._ended + 1, self._step
            return
        before, self.mismatched = self.mismatched, tuple(manifest.mismatched)
        self._attempts, self._ended, self._last_step = self._attempts + 1, 0, self._step
        if self.context.rank == 0:
            say(f"step {self._step}: the placement was made anew; {_reason(before, self.mismatched)}")
        self._ready = new_snapshots
        self._is_replaced.wait()
        snapshots.retire()

    def _note_failure(self, error: Exception, snapshots: Snapshotter) -> None:
        if not self.is_over:
            text = f"the placement was not made anew: {message(error)} Training goes on.{remedy(error)}"
            log.warning("rank %d: %s", self.context.rank, text)
            return
        held = (
            "no snapshot is taken"
            if snapshots.is_held
            else "state that attach could not predict stays unreplicated, and while replicas differ no step becomes whole"
        )
        log.error(
            "rank %d: reft no longer reviews its placement: %s Training goes on. Until the job restarts, %s."
            "\nFix: restart the job",
            self.context.rank,
            message(error),
            held,
        )


def reattach(
    context: AttachContext, known_mismatched: Sequence[str], snapshots: Snapshotter, is_closing: threading.Event
) -> tuple[Snapshotter, pb.Manifest]:
    """Attaches anew beside training; returns the new snapshotter and the new manifest.

    The threads of all ranks call it together. The session's copy engine and its history stay in
    use.

    Args:
        context: of the attach that made the session.
        known_mismatched: names of leaves that were mismatched before.
        snapshots: the snapshotter of the old layout. It is held when this function returns.
        is_closing: set when the session ends.

    Raises:
        ReftError: the attempt failed; snapshots go on, unless a decision may have been stored.
    """
    context = replace(context, failpoints=Failpoints(context.settings.failpoints))
    introduction = introduce_state(context, lambda: state_of(snapshots), None)
    description = describe(context, introduction)
    now = find_mismatched(context, snapshots, layouts_of(description.manifest)[0].names, is_closing)

    def plan_layout() -> AttachPlan:
        survey = take_inventory(context, introduction, ends_orphans=False)
        # The versions that are given up were never whole.
        recovery = recover(introduction.job.id, survey, given_up(survey, whole), not survey.inventory.had_whole)
        mismatched = all_mismatched(now, known_mismatched, manifest_of_base(survey, recovery))
        chosen = choose(context, introduction, description, survey, mismatched)
        return make_plan(chosen, survey, recovery, mismatched, introduction.ranks.secrets.ident(0))

    try:
        whole = hold(context, introduction, snapshots)
        plan = plan_layout()
    except BaseException:
        resume(introduction, snapshots, is_closing)
        raise
    plan = carry_out(context, introduction, plan, plan_layout, is_closing)
    leases = leases_of(context, introduction, plan)
    slots = lease_alone(introduction, plan, leases)
    records = lease_records_alone(context, introduction, plan, leases)
    kept = snapshots.engine, snapshots.history, None, snapshots.planner.built
    return make_snapshotter(context, introduction, plan, leases, slots, *kept, records), plan.manifest


def state_of(snapshots: Snapshotter) -> LocalState:
    """Returns the state of this rank by its last snapshot.

    Raises:
        AttachError: there was none.
    """
    planner = snapshots.planner
    if planner.latest is None:
        raise AttachError("this rank has taken no snapshot yet.")
    index = planner.latest.tensor_index
    return LocalState(planner.tracked, snapshots.host, index, planner.expected_leaves(index))


def find_mismatched(
    context: AttachContext, snapshots: Snapshotter, names: Collection[str], is_closing: threading.Event
) -> list[str]:
    """Returns the leaves whose replicas differ. The threads of all ranks call it together.

    They are compared by the digests of a step that all ranks have compared whole.

    Args:
        context: what every step needs.
        snapshots: the snapshotter of the old layout.
        names: all leaves of all layouts, also those that do not exist yet.
        is_closing: set when the session ends.

    Raises:
        ReftError: there is no such step.
    """
    for _ in range(int(COMMON_STEP_S / AGAIN_S)):
        own = dict(snapshots.thread.leaf_digests.copy())
        report = StepDigestReport(
            bool(snapshots.reporter.mismatched), {step: digest_of_leaves(own[step]) for step in own}
        )
        reports = gather(context.rank_group, partial(_itself, report), StepDigestReport)
        if not any(report.differs for report in reports):
            return []
        step = common_step([report.steps for report in reports])
        if step is not None:
            kinds = [report.steps[step] for report in reports]
            is_first = kinds.index(kinds[context.rank]) == context.rank
            digests = LeafDigests(dict(own[step]) if is_first else {})
            answers = gather(context.rank_group, partial(_itself, digests), LeafDigests)
            return mismatched_names([answer.digests for answer in answers], names)
        is_closing.wait(AGAIN_S)
    raise AttachError(f"within {COMMON_STEP_S:.0f} s there was no step of which all ranks compared their leaves.")


def _itself(record: Record) -> Record:
    return record


def common_step(steps_by_rank: Sequence[dict[int, str]]) -> int | None:
    """Returns the newest step that all ranks have compared; None if there is none."""
    return max(set.intersection(*(set(steps) for steps in steps_by_rank)), default=None)


def digest_of_leaves(digests: Mapping[str, str]) -> str:
    """Returns one digest of the digests of all leaves."""
    return xxhash.xxh3_64_hexdigest("\n".join(f"{name} {digest}" for name, digest in sorted(digests.items())).encode())


def hold(context: AttachContext, introduction: Introduction, snapshots: Snapshotter) -> tuple[int, ...]:
    """Ends the snapshots of the old epoch and its round, and returns what must stay.

    The threads of all ranks call it together. Each rank answers after its own snapshots have ended.
    Otherwise the rank could hear of a newer whole version later, and overwrite older ones.

    Returns:
        The order of the newest version that any rank or daemon knows to be whole; or NOTHING.

    Raises:
        ReftError: the snapshots of a rank do not end, or a daemon does not answer.
    """

    def end() -> EndReport:
        snapshots.hold(HOLD_S)
        known = [snapshots.round.whole, pin(introduction, snapshots) if introduction.is_leader else None]
        return EndReport(max((version.order for version in known if version is not None), default=NOTHING))

    return max(report.whole for report in gather(context.rank_group, end, EndReport, extra_s=HOLD_S))


def pin(introduction: Introduction, snapshots: Snapshotter) -> Version | None:
    """Ends the old epoch's round on this node; returns the newest whole version.

    Raises:
        ReftError: the daemon does not answer.
    """
    epoch = snapshots.facts.epoch
    request = pb.PinRequest(job=introduction.job.id, epoch=messages.epoch_to(epoch))
    reply: pb.PinReply = introduction.daemon.call("Pin", request)
    if not reply.HasField("whole") or snapshots.round.is_discarded(reply.whole):
        return None
    return Version(epoch, reply.whole)


def carry_out(
    context: AttachContext,
    introduction: Introduction,
    plan: AttachPlan | None,
    plan_again: Callable[[], AttachPlan],
    is_closing: threading.Event,
) -> AttachPlan:
    """Stores the decision and secures its base; tries again until all daemons have both.

    The threads of all ranks call it together.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        plan: the plan of the first try.
        plan_again: makes the plan of a later try. A daemon that is down now fails it, too.
        is_closing: set when the session ends.

    Returns:
        The plan that holds.

    Raises:
        ReftError: a rank is missing, or the session ends.
    """
    pause_s = 1.0
    while True:
        try:
            plan = plan or plan_again()
            decide(context, introduction, plan, trains=True)
            secure(context, introduction, plan)
            return plan
        except RanksMissing:
            raise
        except ReftError as error:
            log.error(
                "rank %d takes no snapshots until its daemons have the new layout: %s%s",
                context.rank,
                message(error),
                remedy(error),
            )
            if is_closing.wait(pause_s):
                raise
            plan, pause_s = None, min(2 * pause_s, PAUSE_MAX_S)


def resume(introduction: Introduction, snapshots: Snapshotter, is_closing: threading.Event) -> None:
    """Lets the old epoch go on: nothing was decided.

    The daemon is told until it answers. A daemon that has the pin and not its end would let nothing
    become whole, and no later attempt begin, until the job restarts.

    Args:
        introduction: the ranks and nodes that take part.
        snapshots: the snapshotter of the old layout.
        is_closing: set when the session ends.
    """
    snapshots.resume()
    request = pb.PinRequest(job=introduction.job.id, epoch=messages.epoch_to(snapshots.facts.epoch), undo=True)
    pause_s, is_unheard = 1.0, introduction.is_leader
    while is_unheard:
        try:
            introduction.daemon.call("Pin", request)
            is_unheard = False
        except ReftError as error:
            # A daemon with too many calls says that it has no room. Other errors are answers.
            is_unheard = isinstance(error, (DaemonUnavailable, NoRoom))
            log.warning("the daemon can't be told that the old layout goes on: %s", message(error))
        if is_unheard and is_closing.wait(pause_s):
            return
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def lease_alone(introduction: Introduction, plan: AttachPlan, leases: SlotLeases) -> list[MappedSlot]:
    """Returns the slots for the next snapshots; none if there is no room now.

    A snapshotter without slots leases them when the next snapshot is due.
    """
    try:
        data_bytes = plan.placement.rank_placement(introduction.rank).unplanned_offset
        return leases.lease(data_bytes, len(introduction.state.table))
    except Exception as error:  # this process may lack room for a file, a mapping or a thread, too
        log.warning("rank %d gets no slots for the new layout: %s%s", introduction.rank, message(error), remedy(error))
        return []


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


def _reason(before: Sequence[str], after: Sequence[str]) -> str:
    names = set(after) - set(before)
    if not names:
        return "it covers leaves that attach could not predict."
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"ranks differ in {', '.join(sorted(names)[:NAMES_SHOWN])}{rest}: each rank keeps its own copy."
