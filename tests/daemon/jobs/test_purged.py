"""A job is purged while an attach is under way: the attach is refused, and leaves nothing."""

from __future__ import annotations

import pytest

from reft.wire.v1 import daemon_pb2 as pb
from tests.support.jobs import Code, Job, refused, write


@pytest.fixture
def job(daemon) -> Job:
    """A job that has ended, and whose step 3 is sealed."""
    job = Job([(daemon, [0])]).decide()
    write(job.slots(0)[0], job.version(3))
    return job.close()


def decide_request(job: Job, counts_on_slots: bool) -> pb.DecideRequest:
    base = job.version(3, 1)
    job.counter = 2
    return pb.DecideRequest(manifest=job.manifest, decision=job.decision(base), counts_on_slots=counts_on_slots)


def test_a_decision_that_counts_on_purged_slots_is_refused(daemon, job):
    assert job.headers(), "what the attach plans with"
    daemon.call("Purge", pb.PurgeRequest(job="job"))
    request = decide_request(job, counts_on_slots=True)
    with refused(Code.FAILED_PRECONDITION, "was freed on this node while an attach planned its restore"):
        daemon.call("Decide", request)
    with refused(Code.NOT_FOUND):
        daemon.status("job")
    assert not (daemon.folder / "job").exists()
    request.counts_on_slots = False  # the next attach finds no slot here, and counts on other nodes
    daemon.call("Decide", request)
    assert daemon.status("job").base.step == 3 and job.lease(0)


def test_a_decision_that_counts_on_slots_is_taken_while_they_are_held(daemon, job):
    daemon.call("Decide", decide_request(job, counts_on_slots=True))
    assert daemon.status("job").base.step == 3 and job.headers()


def test_after_a_purge_no_rank_of_the_decision_gets_slots(daemon, job):
    daemon.call("Decide", decide_request(job, counts_on_slots=True))
    daemon.call("Purge", pb.PurgeRequest(job="job"))
    for method, request in (
        ("Lease", job.lease_request(0)),
        ("Secure", pb.SecureRequest(job="job", epoch=job.epoch)),
    ):
        with refused(Code.NOT_FOUND, "holds no job"):
            daemon.call(method, request)
    assert not (daemon.folder / "job").exists()
