"""A refused attach changes nothing: the daemon undoes its decision."""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc
import pytest

from reft.core.commit.slots import SlotState
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import undo
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.persist.stored_reader import StoredSlotFile
from tests.daemon.jobs.test_leases import decide_request
from tests.support.daemons import until
from tests.support.jobs import Job, StepAnswer, decide_now, refused, write
from tests.support.trainer_forks import Trainer

EMPTY, SEALED = SlotState.EMPTY, SlotState.SEALED


@pytest.fixture
def failed(daemon, trainer) -> Job:
    """A job of two ranks that died at step 2, with step 3 sealed by rank 0 only."""
    job = Job([(daemon, [0, 1])], script="train.py")
    job.decide()
    names = {rank: job.lease(rank, trainer, slots=3) for rank in (0, 1)}
    for rank in (0, 1):
        slots = job.maps(rank, names[rank])
        for step in (1, 2, 3) if rank == 0 else (1, 2):
            write(slots[step - 1], job.version(step))
            job.report(rank, {step: StepAnswer.SEALED})
    until(lambda: job.whole() == 2, what="whole(2)")
    trainer.kill()
    until(lambda: not any(rank.alive for rank in daemon.status("job").ranks), what="the trainers' end")
    return job


@pytest.fixture
def trainer_again() -> Iterator[Trainer]:
    process = Trainer()
    yield process
    process.kill()


def refuse(job: Job, trainer: Trainer, rank: int = 0) -> None:
    """The trainer of a rank says that its attach was refused."""
    request = pb.ReleaseRequest(job=job.name, epoch=job.epoch, rank=rank, refused=True)
    job.call_as(trainer if trainer.process.poll() is None else None, rank, "Release", request)


def other_attach(job: Job) -> Job:
    """Decides an attach of another script that drops step 3; returns it."""
    other = Job([(job.daemons[0], [0])], script="wrong.py")
    other.counter = job.counter
    return other.decide(base=job.version(2), dropped=["rank-0.slot-2"])


def facts(job: Job) -> tuple[object, ...]:
    """Returns what must be the same after a refused attach."""
    status = job.daemons[0].status("job")
    inventory = job.daemons[0].call("Inventory", pb.InventoryRequest(job="job"))
    ranks = [(rank.rank, rank.alive, rank.closed, rank.sealed.step) for rank in status.ranks]
    same = (status.script, status.world, status.epoch, status.whole, ranks, inventory.failed, job.headers())
    return (*same, inventory.restores)


def test_an_attach_that_was_refused_before_it_had_slots_changes_nothing(failed, trainer_again):
    before = facts(failed)
    other = other_attach(failed)
    other.lease(0, trainer_again, slots=0)
    assert facts(failed)[0] == "wrong.py"
    refuse(other, trainer_again)
    assert facts(failed) == before
    failed.daemons[0].kill()
    failed.daemons[0].start()
    assert facts(failed) == before, "the record was saved"


def test_a_decision_that_another_node_refused_is_undone_before_any_rank_is_registered(failed, trainer_again):
    before = facts(failed)
    refuse(other_attach(failed), trainer_again)
    assert facts(failed) == before


def test_the_base_survives_a_refusal_for_lack_of_room(failed, trainer_again):
    other = other_attach(failed)
    other.lease(0, trainer_again, slots=3, data_bytes=1 << 20)
    refuse(other, trainer_again)
    script, world, _, whole, ranks, has_failed, headers, _ = facts(failed)
    assert (script, world, whole, has_failed) == ("train.py", 2, 2, True)
    assert [sealed for *_, sealed in ranks] == [2, 2] and (EMPTY, 0) not in headers.values()


def test_two_refused_attaches_bring_back_the_record_before_both(failed, trainer_again):
    before = facts(failed)
    other = other_attach(failed)
    other.lease(0, trainer_again, slots=0)
    trainer_again.kill()  # in its attach: nobody says that it was refused
    until(lambda: not failed.daemons[0].status("job").ranks[0].alive, what="the trainer's end")
    other.decide(base=failed.version(2))
    refuse(other, trainer_again)
    assert facts(failed) == before


def test_the_last_rank_may_die_after_another_was_refused(failed, trainer_again):
    before = facts(failed)
    other = Job([(failed.daemons[0], [0, 1])], script="wrong.py")
    other.counter = failed.counter
    other.decide(base=failed.version(2))
    for rank in (0, 1):
        other.lease(rank, trainer_again, slots=0)
    refuse(other, trainer_again)
    assert facts(failed)[0] == "wrong.py", "rank 1 still attaches"
    trainer_again.kill()
    until(lambda: facts(failed) == before, what="the record before")


def test_a_decision_under_which_a_rank_has_written_stays(failed, trainer_again):
    other = other_attach(failed)
    slot, *_ = other.slots(0, trainer_again, slots=2)
    write(slot, other.version(3), SlotState.WRITING)
    refuse(other, trainer_again)
    status = failed.daemons[0].status("job")
    assert (status.script, status.epoch) == ("wrong.py", other.epoch)
    inventory = failed.daemons[0].call("Inventory", pb.InventoryRequest(job="job"))
    assert inventory.failed, "the job has not ended"


def test_a_refusal_brings_back_the_attach_before_if_that_has_written(failed, trainer_again):
    other = Job([(failed.daemons[0], [0, 1])], script="wrong.py")
    other.counter = failed.counter
    other.decide(base=failed.version(2), dropped=["rank-0.slot-2"])
    slot, *_ = other.slots(0, trainer_again, slots=2)
    write(slot, other.version(3))
    trainer_again.kill()
    until(lambda: not failed.daemons[0].status("job").ranks[0].alive, what="the trainer's end")
    before = facts(failed)
    assert before[3] == -1, "rank 1 has not written, so nothing of the attach before is whole"
    third = Job([(failed.daemons[0], [0])], script="third.py")
    third.counter = other.counter
    third.decide(base=failed.version(2))
    assert facts(failed)[0] == "third.py"
    refuse(third, trainer_again)
    assert facts(failed) == before and before[0] == "wrong.py"
    assert (SEALED, 3) in failed.headers().values(), "what the attach before has sealed stays"


def test_a_new_job_that_was_refused_leaves_nothing(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer)
    refuse(job, trainer)
    with refused(grpc.StatusCode.NOT_FOUND):
        daemon.status("job")
    assert not (daemon.folder / "job").exists()


def test_a_refused_attach_keeps_no_file_of_a_checkpoint_open(tmp_path):
    """Files that were fetched from an object store lie in this daemon's memory."""
    arena = Arena(tmp_path / "arena", 0)
    job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
    decide_now(job, decide_request(1))
    decide_now(job, decide_request(2))
    arena.held_bytes = 64
    file = StoredSlotFile(
        "stored-0.slot-1", 0, os.memfd_create("fetched"), None, 64, None, memory=arena, fetched_bytes=64
    )
    job.slots.stored[file.name] = file
    undo.undo(job)
    assert (file.descriptor, job.slots.stored, arena.held_bytes) == (-1, {}, 0)


def test_a_refusal_of_an_older_attach_is_late(failed):
    other = other_attach(failed)
    late = pb.ReleaseRequest(job="job", epoch=failed.epoch, rank=0, refused=True)
    with refused(grpc.StatusCode.ABORTED):
        other.call(0, "Release", late)


def test_the_lease_of_another_process_stays(failed, trainer, trainer_again):
    other = other_attach(failed)
    other.lease(0, trainer_again, slots=0)
    refuse(other, trainer)
    status = failed.daemons[0].status("job")
    assert status.script == "wrong.py" and status.ranks[0].alive


def test_restores_are_counted_until_an_attach_is_refused_or_the_job_ends(failed, trainer_again):
    def count() -> int:
        return failed.daemons[0].call("Inventory", pb.InventoryRequest(job="job")).restores.count

    other = other_attach(failed)
    assert count() == 1
    other.decide(base=failed.version(2))
    assert count() == 2
    refuse(other, trainer_again)
    assert count() == 0, "the refused attach restored nothing, and the one before wrote nothing"
    other.decide(base=failed.version(2))
    other.lease(0, trainer_again, slots=0)
    other.close([0])
    assert count() == 0, "all sessions were closed"
