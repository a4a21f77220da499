"""Tests interference by other programs in the file system: removed files, and no free space."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import grpc
import pytest

from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.wire.v1 import daemon_pb2 as pb
from tests.daemon.jobs.test_capsules import all_whole, copies, fetch, held_job, seal
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Code, Job, refused, slot_path, write

LANDED, SEALED = SlotState.LANDED, SlotState.SEALED


def test_files_that_somebody_removes_are_noticed_and_go_on_to_serve(daemon, trainer):
    """Files are removed as by systemd's RemoveIPC.

    A script that clears /dev/shm after a user's job does the same.
    """
    job = Job([(daemon, [0])]).decide()
    slots = job.slots(0, trainer)
    assert daemon.status("job").backing == "tmpfs"
    for name in ("rank-0.slot-1", "record.0", "record.1"):
        (daemon.folder / "job" / name).unlink()
    assert daemon.status("job").backing == "unlinked"
    until(lambda: "somebody has removed slot files" in daemon.log.read_text(), what="the log line")
    write(slots[1], job.version(1), LANDED)
    trainer.kill()
    until(
        lambda: job.headers()["rank-0.slot-1"] == (SEALED, 1),
        what="the seal that the daemon makes for the dead trainer",
    )


@pytest.mark.parametrize("holds", [False, True])
def test_a_removed_folder_does_not_end_the_daemon(daemon, trainer, holds):
    job = Job([(daemon, [0])])
    if holds:
        write(job.decide().slots(0, trainer)[0], job.version(1))
    shutil.rmtree(daemon.folder)
    if holds:
        until(lambda: "somebody has removed slot files" in daemon.log.read_text(), what="the log line")
        trainer.kill()
        job.decide(job.version(1))  # the next attach
        assert job.headers()["rank-0.slot-0"] == (SEALED, 1)
    daemon.process.terminate()
    # no traceback of the daemon's own code
    assert daemon.process.wait(60) == 0 and "reft_daemon/" not in daemon.log.read_text()


def test_a_file_in_place_of_the_folder_ends_neither_the_daemon_nor_a_step(start, trainer):
    daemon = start("--ttl", "2", "--ttl-failed", "2")  # on busy cores a lease comes long after the decision
    job = Job([(daemon, [0])]).decide()
    landed, sealed = job.slots(0, trainer)
    write(landed, job.version(3), LANDED)
    write(sealed, job.version(2))
    shutil.rmtree(daemon.folder)
    daemon.folder.touch()
    try:
        job.report(0, {2: StepAnswer.SEALED})  # the pins can't be recorded, and the report was right
        assert not daemon.call("Status", pb.StatusRequest()).refused.reasons
        for refused_call in (Job([(daemon, [0])], name="other").decide, lambda: job.lease(0, trainer, slots=4)):
            with refused(Code.FAILED_PRECONDITION, "can't be made for job"):
                refused_call()
        trainer.kill()
        until(lambda: landed.reread().state is SEALED, what="the seal that the daemon makes for the dead trainer")
        until(lambda: not daemon.call("Status", pb.StatusRequest()).jobs, what="the end of the job")
        assert daemon.call("Status", pb.StatusRequest()).held_bytes == 0
        assert f"{slot_path(daemon, 'rank-0.slot-0')} can't be removed" in daemon.log.read_text()
        daemon.process.terminate()
        assert daemon.process.wait(60) == 0 and "Traceback" not in daemon.log.read_text()
    finally:
        daemon.folder.unlink()


def test_kept_capsules_survive_the_removal_of_their_files(start, trainer):
    job = held_job([start("--listen", "127.0.0.1:0") for _ in range(2)])
    seal(job, trainer, 1)
    all_whole(job, 1)
    shutil.rmtree(job.daemons[1].folder / "job")
    assert copies(job, 1) == [(0, 1)] and fetch(job, 1, 0, 1) == fetch(job, 0, 0, 1)
    seal(job, trainer, 2)
    all_whole(job, 2)
    assert copies(job, 1) == [(0, 2)] and fetch(job, 1, 0, 2) == fetch(job, 0, 0, 2)


def fill(folder: Path) -> list[Path]:
    """Fills the file system, as files of others in /dev/shm do; returns these files."""
    path = folder / f"theirs-{len(list(folder.glob('theirs-*')))}"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return list(folder.glob("theirs-*"))


def fill_to_the_last(job: Job, daemon: DaemonProcess) -> list[Path]:
    """Fills the file system, and any part of its reserve that the daemon gives back."""
    for _ in range(30):
        theirs = fill(daemon.folder)
        try:
            job.decide(job.version(1, 1))
        except grpc.RpcError as error:
            assert error.code() is Code.RESOURCE_EXHAUSTED and "make room in" in error.details()
            return theirs
    raise AssertionError("there is room without end")


def test_a_full_file_system_keeps_no_job_from_restarting(cramped, trainer):
    job = Job([(cramped, [0])]).decide()
    write(job.slots(0, trainer)[0], job.version(1), LANDED)
    fill(cramped.folder)
    trainer.kill()
    until(lambda: (SEALED, 1) in job.headers().values(), what="the seal")
    job.decide(job.version(1))  # the next attach: its record takes reserved space
    theirs = fill_to_the_last(job, cramped)
    assert not list((cramped.folder / "job").glob("*.new"))
    for path in theirs:
        path.unlink()
    job.decide(job.version(1, 1))
    cramped.kill()
    cramped.start()
    assert cramped.status("job").epoch == job.epoch


def test_a_step_is_sealed_although_the_record_can_not_be_written(cramped, trainer):
    job = Job([(cramped, [0])]).decide()
    write(job.slots(0, trainer)[0], job.version(1), LANDED)
    fill_to_the_last(Job([(cramped, [0])], name="other"), cramped)
    trainer.kill()
    until(lambda: (SEALED, 1) in job.headers().values(), what="the seal")
    before_retry = cramped.log.read_text().rpartition("make room in")[0]
    assert "job=job" in before_retry.splitlines()[-2], "the remedy has a line of its own"
