"""This node's part in the round: reports of ranks and child nodes, and outcomes.

    rank's report ─► acknowledged capsules ─► Round ── no news ─► RANKS
    child's report ─────────────────────────► Round ─┐
    outcome of the parent ──────────────────► Round ─┤
    mover: guarded, unguarded ──────────────► Round ─┴─ news ─► publish: pins recorded, announced
                                                                ─► slots freed, capsules settled
                                                                ─► OUTCOME

`reft/core/commit/round.py` and `pins.py` decide. The mover reads `job.round.outcome.pins`, and
notes what it has sealed or lacks of these pins. A note on other steps changes nothing. A change of
kind RANKS or OUTCOME is put at the end, when the record is complete: see `changes`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from reft.core.commit.pins import EXCHANGE_SLOTS_MIN, ExchangeFacts, Pins, UnguardedLane
from reft.core.commit.round import Digests, Outcome, Round, StepReport
from reft.core.commit.version import Epoch, Version
from reft.errors import AttachError
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import write_pins
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs.changes import ChangeKind
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.persistence import save, save_or_log
from reft_daemon.jobs.slots import may_be_freed

log = logging.getLogger("reft.daemon")


def start(job: JobRecord) -> None:
    """Starts the round of the decision in force, if there is one."""
    if not job.record.HasField("decision"):
        return
    pins = messages.pins_from(job.record.pins) if job.record.HasField("pins") else Pins()
    job.round = Round(
        job.record.node_index, len(job.record.manifest.nodes), frozenset(job.ranks),
        exchange_facts(job), Outcome(pins, pins.whole),
    )  # fmt: skip
    job.capsule_replication.start_epoch(job.record.holders)
    settle_capsules(job, job.round.outcome)
    # the ranks of these slots train on other nodes now
    job.slots.retire([slot for slot in job.slots.current.values() if slot.rank not in job.round.ranks])


def exchange_facts(job: JobRecord) -> ExchangeFacts:
    """Returns what the round must know of the exchange."""
    slots = job.record.manifest.slots
    lanes = job.guard_lanes if slots >= EXCHANGE_SLOTS_MIN else ()
    guards = any(rank in lane.members for lane in lanes for rank in job.ranks)
    return ExchangeFacts(len(lanes), slots, guards, job.record.decision.HasField("guard"))


def note_guarded(job: JobRecord, attempt: int) -> None:
    """Notes that all parity of a turn on this node is sealed.

    Lanes that were noted as unguarded are the exception. Only the turn under way counts.
    """
    if job.round is not None and job.round.guard.note_guarded(job.round.outcome.pins, attempt):
        publish(job)


def note_unguarded(job: JobRecord, lanes: Sequence[UnguardedLane]) -> None:
    """Notes lanes that lack parity of the turn or of the protected step here."""
    if job.round is not None and job.round.guard.note_unguarded(job.round.outcome.pins, lanes):
        publish(job)


def retry_turn(job: JobRecord, epoch: Epoch, attempt: int) -> None:
    """Lets the coordinator begin another turn of the newest whole step, after `attempt`."""
    if job.round is not None and job.epoch == epoch:
        job.round.guard.permit_retry(job.round.outcome.pins, attempt)
        publish(job)


def pin_persist(job: JobRecord, step: int) -> bool:
    """Pins the step that is written to storage; -1: none. Only the coordinator calls.

    Each call counts `seq` up, also if nothing else changes. Returns False if the pins can't be
    recorded, or a new layout is being decided.
    """
    if job.round is None or job.round.is_pinned:
        return False
    pins = job.round.outcome.pins
    after = pins.with_persist(step)
    if not has_recorded(job, after, pins):
        return False
    job.round.hear_outcome(replace(job.round.outcome, pins=after))
    publish(job)
    return True


def report(job: JobRecord, request: pb.ReportRequest) -> None:
    """Takes a rank's report.

    Raises:
        StaleEpoch: the rank belongs to an older attach.
        AttachError: the rank holds no lease.
        ConfigError: a step is impossible. Then nothing of the report is taken.
    """
    job.check_epoch(request.epoch)
    lease = job.leases.get(request.rank)
    if lease is None or job.round is None:
        raise AttachError(f"rank {request.rank} of job {job.id} holds no lease here.")
    step_report, layout = messages.report_from(request.steps), messages.layout_report_from(request.layout)
    lease.trouble = request.trouble
    job.round.hear_request(request.rank, request.requested_every)
    lease.step = max(lease.step, step_report.until)
    if step_report.sealed:
        job.sealed_s[request.rank] = time.monotonic()
    if request.rank in job.round.ranks and job.round.hear_layout(request.rank, layout):
        publish(job)
    _hear_rank(job, request.rank, step_report, messages.digests_from(request.steps))


def report_sealed_slots(job: JobRecord, rank: int) -> None:
    """Reports the steps that a rank's slots hold SEALED: no living trainer reports them."""
    digests_by_step = job.capsule_replication.cell_digests(job.slots.of_rank(rank), job.epoch)
    _hear_rank(job, rank, StepReport(sealed=frozenset(digests_by_step)), digests_by_step)


def hear_node(job: JobRecord, request: pb.GatherRequest) -> Outcome:
    """Takes a child's report in the round. It returns the outcome so far.

    Raises:
        AttachError: the job has no round here.
        ConfigError: a step is impossible. Then nothing of the report is taken.
    """
    if job.round is None:
        raise AttachError(f"job {job.id} has no round here.")
    node_report, digests = messages.report_from(request.steps), messages.digests_from(request.steps)
    layout = messages.layout_report_from(request.layout)
    is_news = job.round.hear_node(
        request.node_index, node_report, digests, request.mismatched, request.requested_every,
        messages.guard_report_from(request.guard),
    )  # fmt: skip
    has_layout_news = job.round.hear_child_layout(request.node_index, layout)
    if is_news or has_layout_news:
        publish(job)
    return job.round.outcome


def pin(job: JobRecord, request: pb.PinRequest) -> Version | None:
    """Ends the epoch's round on this node; returns the newest whole version.

    A new layout is being decided. With `undo` the round goes on: the new layout was given up.

    Raises:
        StaleEpoch: the epoch is not the one in force.
        AttachError: the job has no round here.
    """
    epoch = messages.epoch_from(request.epoch)
    if messages.decision_from(job.record.decision).supersedes(epoch):
        return None  # an earlier try has reached this daemon: its base stays
    job.check_epoch(request.epoch)
    if job.round is None:
        raise AttachError(f"job {job.id} has no round here.")
    job.round.is_pinned = not request.undo
    whole = job.round.outcome.whole
    return Version(epoch, whole) if whole >= 0 else None


def hear_outcome(job: JobRecord, outcome: Outcome) -> None:
    """Takes the outcome that the parent sent in the round."""
    if job.round is not None and job.round.hear_outcome(outcome):
        publish(job)


def _hear_rank(job: JobRecord, rank: int, step_report: StepReport, digests: Digests) -> None:
    """Takes the report of a rank here.

    A sealed step counts once the holders have the rank's capsule.
    """
    if job.round is None or rank not in job.round.ranks:
        return
    acks = job.capsule_replication.capsule_acks
    counted_report = acks.hear_rank(rank, step_report, digests)
    if job.round.hear_rank(rank, counted_report, acks.digests_of(rank)):
        publish(job)
    else:
        job.changes.put(job.id, ChangeKind.RANKS)  # the holders may lack the rank's capsule


def publish(job: JobRecord) -> None:
    """Announces what this node decides, does what the outcome allows here, and puts the change."""
    if job.round is None:
        return
    job.round.guard.now_s = time.monotonic()
    if has_recorded(job, job.round.next_outcome().pins, job.round.outcome.pins):
        job.round.announce()
    outcome = job.round.outcome
    if outcome.whole >= 0:
        free_retired(job, Version(job.epoch, outcome.whole))
        job.slots.close_stored()
    settle_capsules(job, outcome)
    job.degraded.note_whole(outcome.whole)
    is_first = not job.record.had_whole or job.record.HasField("before") or bool(job.record.accepted_tokens)
    if outcome.whole >= 0 and is_first:
        job.record.had_whole = True
        job.record.ClearField("before")
        job.record.ClearField("accepted_tokens")  # all nodes of the epoch have its token
        save_or_log(job)
    job.changes.put(job.id, ChangeKind.OUTCOME)


def has_recorded(job: JobRecord, pins: Pins, before: Pins) -> bool:
    """Writes new pins of the coordinator beside the record; False if that fails.

    Then nothing is announced. The next news of the round try again. With the first pins of an epoch
    the record is written, too: from then on a restarted daemon knows that pins are there.
    """
    if pins == before:
        return True
    has_earlier = job.record.HasField("pins")
    job.record.pins.CopyFrom(messages.pins_to(pins))
    try:
        write_pins(job.arena, job.record)
        if not has_earlier:
            save(job)
    except AttachError as error:
        job.record.pins.CopyFrom(messages.pins_to(before))
        if not has_earlier:
            job.record.ClearField("pins")
        log.error("job=%s no newer step becomes whole: the pins can't be recorded: %s", job.id, error)
        return False
    return True


def settle_capsules(job: JobRecord, outcome: Outcome) -> None:
    """Drops the capsules that no recovery can need, as far as this node knows."""
    decision = messages.decision_from(job.record.decision)
    job.capsule_replication.settle(decision, outcome, job.are_all_closed, not job.may_be_refused)


def free_retired(job: JobRecord, whole: Version) -> None:
    """Frees retired slots that are older than a whole version and not pinned."""
    if job.are_all_closed:
        return
    for name, slot in list(job.slots.retired.items()):
        if not job.may_be_written(slot) and may_be_freed(header_of(job.id, slot), whole, job.pinned):
            job.arena.free(job.slots.retired.pop(name))
