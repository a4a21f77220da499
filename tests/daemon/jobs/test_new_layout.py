"""Tests the decision of a new layout in mid-training: the pin, the trainers that stay, the base."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.pins import Pins
from reft.core.commit.round import Outcome, StepAnswer
from reft.core.commit.version import Version
from reft.errors import AlreadyAttached, AttachError, StaleEpoch
from reft.wire import messages
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import rounds
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.epochs import check_kept, leases_to_keep
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease
from tests.daemon.jobs.test_leases import decide_request
from tests.support.jobs import Code, Job, decide_now, epoch_of, refused, tcp_call, write

ALIVE = object()  # stands for the watch of a living process


def lease_of(pid: int, watch: object = ALIVE) -> Lease:
    return Lease(Process(pid, 10 * pid), 1, watch, given_slots={"slot"})  # type: ignore[arg-type]


def pin_request(counter: int, undo: bool = False) -> pb.PinRequest:
    return pb.PinRequest(job="job", epoch=messages.epoch_to(epoch_of(counter)), undo=undo)


@pytest.fixture
def job() -> Iterator[JobRecord]:
    """A job of one rank, in epoch 1."""
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        arena = Arena(Path(path), 64 << 20)
        record = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
        decide_now(record, decide_request(1))
        yield record
        arena.close()


def relayout(base: int | None, *pids: int, counter: int = 2) -> pb.DecideRequest:
    """Returns the decision of trainers with these pids; `base` is a step of epoch 1."""
    request = decide_request(counter)
    request.trainers.extend(pids)
    if base is not None:
        request.decision.base.CopyFrom(messages.version_to(Version(epoch_of(1), base)))
    return request


def make_whole(job: JobRecord, step: int) -> None:
    rounds.hear_outcome(job, Outcome(Pins(whole=step), step))


# The pin


def test_a_pinned_node_says_what_is_whole_and_learns_nothing_until_the_pin_is_undone(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    slots = job.slots(0, trainer)
    assert not daemon.call("Pin", pin_request(1)).HasField("whole"), "nothing is whole yet"
    write(slots[0], job.version(1))
    job.report(0, {1: StepAnswer.SEALED})
    assert job.whole() == -1
    assert not daemon.call("Pin", pin_request(1, undo=True)).HasField("whole")
    job.report(0, {1: StepAnswer.SEALED})
    assert job.whole() == 1
    assert daemon.call("Pin", pin_request(1)).whole == 1
    assert daemon.call("Pin", pin_request(1)).whole == 1, "a repeated pin changes nothing"
    write(slots[1], job.version(2))
    job.report(0, {2: StepAnswer.SEALED})
    assert job.whole() == 1


def test_only_the_epoch_in_force_is_pinned(job):
    make_whole(job, 3)
    with pytest.raises(StaleEpoch):
        rounds.pin(job, pin_request(2))
    assert not job.round.is_pinned
    assert rounds.pin(job, pin_request(1)) == Version(epoch_of(1), 3)
    assert job.round.is_pinned


def test_a_pin_of_the_epoch_that_an_earlier_try_has_ended_changes_nothing(job):
    make_whole(job, 3)
    request = relayout(3)
    request.decision.known.append(messages.epoch_to(epoch_of(1)))
    decide_now(job, request)
    make_whole(job, 5)
    assert rounds.pin(job, pin_request(1)) is None, "the base of the decision in force stays"
    assert not job.round.is_pinned, "epoch 2 goes on"
    assert rounds.pin(job, pin_request(2)) == Version(epoch_of(2), 5)


def test_a_job_without_a_round_has_nothing_to_pin(job):
    record = JobRecord(job.arena, pb.JobRecord(manifest=job.record.manifest), ChangeQueue())
    request = pb.PinRequest(job="job", epoch=messages.epoch_to(record.epoch))
    with pytest.raises(AttachError, match="no round"):
        rounds.pin(record, request)


def test_a_pin_needs_the_job_and_the_unix_socket(site):
    (daemon,) = site.add(1)
    with refused(Code.NOT_FOUND):
        daemon.call("Pin", pin_request(1))
    job = Job([(daemon, [0])]).decide()
    with refused(Code.UNIMPLEMENTED):
        tcp_call(job.hellos[0].addresses[0], "Pin", pin_request(1), job.manifest.token)
    with refused(Code.ABORTED):
        daemon.call("Pin", pin_request(2))
    daemon.call("Pin", pin_request(1))


def test_the_next_epoch_is_not_pinned(job):
    rounds.pin(job, pin_request(1))
    decide_now(job, relayout(None))
    assert not job.round.is_pinned
    make_whole(job, 9)
    assert job.known_whole == 9


# The trainers


@pytest.mark.parametrize(
    ("leases", "pids", "kept"),
    [
        ({0: lease_of(7), 1: lease_of(8)}, [7, 8], [0, 1]),
        ({0: lease_of(7), 1: lease_of(8)}, [8], [1]),
        ({0: lease_of(7, watch=None), 1: lease_of(8)}, [7, 8], [1]),
        ({0: lease_of(7)}, [], []),
        ({}, [7], []),
    ],
)
def test_living_trainers_that_decide_for_themselves_stay(leases, pids, kept):
    result = leases_to_keep(leases, pids)
    assert sorted(result) == kept and all(result[rank] is leases[rank] for rank in kept)


def test_a_trainer_that_stays_may_not_write_the_slots_that_it_had(job):
    job.leases = {0: lease_of(7)}
    decide_now(job, relayout(None, 7))
    assert job.epoch == epoch_of(2) and job.leases[0].process.pid == 7 and not job.leases[0].given_slots


def test_a_living_trainer_that_does_not_decide_refuses_the_decision(job):
    job.leases = {0: lease_of(7), 1: lease_of(8)}
    before = job.record.SerializeToString()
    with pytest.raises(AlreadyAttached, match="process 8"):
        decide_now(job, relayout(None, 7))
    assert job.record.SerializeToString() == before and set(job.leases) == {0, 1}
    assert job.leases[0].given_slots == {"slot"}


def test_an_ended_trainer_does_not_stay(job):
    job.leases = {0: lease_of(7, watch=None)}
    decide_now(job, relayout(None, 7))
    assert not job.leases


def test_a_new_layout_restores_nothing(job):
    job.record.restores.CopyFrom(pb.RestoreCount(step=3, count=2))
    job.leases = {0: lease_of(7)}
    make_whole(job, 3)
    decide_now(job, relayout(3, 7))
    assert job.record.restores == pb.RestoreCount(step=3, count=2), "a restore would count"


# The base


@pytest.mark.parametrize(
    ("whole", "base", "is_taken"),
    [
        (None, None, True),
        (None, Version(epoch_of(1), 2), True),
        (3, Version(epoch_of(1), 3), True),
        (3, Version(epoch_of(1), 4), True),
        (3, Version(epoch_of(1), 2), False),
        (3, None, False),
        (0, None, False),
    ],
)
def test_a_base_may_not_be_older_than_what_is_whole_here(job, whole, base, is_taken):
    if whole is not None:
        make_whole(job, whole)
    if is_taken:
        check_kept(job, Decision(epoch_of(2), base))
        return
    with pytest.raises(AttachError, match=rf"the base of the new layout is .*, but step {whole} .* is whole"):
        check_kept(job, Decision(epoch_of(2), base))


@pytest.mark.parametrize(("guard", "is_taken"), [(None, True), (3, True), (4, True), (2, False)])
def test_a_guard_may_not_be_older_than_what_is_protected_here(job, guard, is_taken):
    rounds.hear_outcome(job, Outcome(Pins(2, whole=5, protected=3), 5))
    base = Version(epoch_of(1), 5)
    decision = Decision(epoch_of(2), base, guard=None if guard is None else Version(epoch_of(1), guard))
    if is_taken:
        check_kept(job, decision)
        return
    with pytest.raises(AttachError, match=r"the guard of the new layout is step 2 .* step 3 .* was protected"):
        check_kept(job, decision)


def test_without_a_round_every_base_is_taken(job):
    job.round = None
    check_kept(job, Decision(epoch_of(2), None))


def test_the_base_of_trainers_that_stay_is_checked_and_that_of_an_attach_is_not(job):
    make_whole(job, 3)
    job.leases = {0: lease_of(7)}
    before = job.record.SerializeToString()
    with pytest.raises(AttachError, match="but step 3"):
        decide_now(job, relayout(2, 7))
    assert job.record.SerializeToString() == before and job.leases[0].given_slots == {"slot"}
    job.leases = {}
    decide_now(job, relayout(2))  # an attach judges by the slots that all nodes hold
    assert job.epoch == epoch_of(2)
