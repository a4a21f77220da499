"""A lease is for the process that calls, and a daemon signals nobody else."""

from __future__ import annotations

import os

import pytest

from reft.errors import AttachError
from reft.wire.process import stat_of
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs.leases import caller_process
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Code, Job, refused
from tests.support.trainer_forks import Trainer


def fence(daemon: DaemonProcess, job: str, launch: str = "launch") -> pb.InventoryReply:
    """Begins an attach: ends the trainers that an earlier attach of this launch has left."""
    request = pb.InventoryRequest(job=job, launch=launch, pids=[os.getpid()], end_orphans=True)
    return daemon.call("Inventory", request)


def test_a_lease_is_for_the_caller_whatever_the_request_says(daemon, trainer):
    """Up to protocol 10 the request named a process, which the next attach killed."""
    victim = Trainer()
    try:
        job = Job([(daemon, [0])]).decide()
        request = job.lease_request(0)
        # the former fields pid, pid_start and parent
        forged = pb.LeaseRequest.FromString(
            request.SerializeToString() + bytes([4 << 3]) + varint(victim.pid) + bytes([5 << 3])
            + varint(stat_of(victim.pid).start) + bytes([6 << 3]) + varint(1)
        )  # fmt: skip
        trainer.call(daemon.address, "Lease", forged)
        assert daemon.status("job").ranks[0].pid == trainer.pid
        fence(daemon, "job")
        assert trainer.process.wait(60) == -9 and victim.process.poll() is None
    finally:
        victim.kill()


def varint(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def test_a_process_trains_one_job(daemon, trainer):
    """Else an attach of one job would end the trainer of another."""
    first, second = (Job([(daemon, [0])], name).decide() for name in ("first", "second"))
    first.lease(0, trainer)
    with refused(Code.FAILED_PRECONDITION, f"process {trainer.pid} trains job first, and asks for slots of job second"):
        second.lease(0, trainer)
    fence(daemon, "second")
    assert trainer.process.poll() is None and daemon.status("first").ranks[0].alive
    first.close([0])
    assert second.lease(0, trainer), "it trains no other job any more"


def test_a_fence_of_another_job_or_launch_ends_nobody(daemon, trainer):
    first, second = (Job([(daemon, [0])], name).decide() for name in ("first", "second"))
    first.lease(0, trainer)
    fence(daemon, "second")
    with refused(Code.ALREADY_EXISTS, "which lives"):
        fence(daemon, "first", "another launch")
    assert trainer.process.poll() is None
    assert second.lease(0)


def test_a_refused_attach_of_another_process_ends_no_lease(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer)
    daemon.call("Release", pb.ReleaseRequest(job="job", epoch=job.epoch, rank=0, refused=True))
    assert daemon.status("job").ranks[0].alive
    trainer.call(daemon.address, "Release", pb.ReleaseRequest(job="job", epoch=job.epoch, rank=0, refused=True))
    until(lambda: not daemon.call("Status", pb.StatusRequest()).jobs, what="the end of the job, which was new")


def test_the_caller_is_not_a_later_process_with_its_pid():
    own = caller_process(os.getpid())
    assert own.process.pid == os.getpid() and own.parent == os.getppid()
    assert caller_process(os.getpid(), own.process.start) == own
    with pytest.raises(AttachError, match="the caller has ended, or lives in a pid namespace"):
        caller_process(os.getpid(), own.process.start + 1)
    with pytest.raises(AttachError, match="the caller has ended"):
        caller_process(0)
