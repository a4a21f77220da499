"""Tests certificates that are replaced while a job runs: later connections use the new ones."""

from __future__ import annotations

import signal

import pytest

from reft.wire.v1 import daemon_pb2 as pb
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Job

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
RENEWED = "serve from now on"


def hears(job: Job, asked: int) -> bool:
    """Whether the daemon of node `asked` reaches the other daemon."""
    request = pb.SurveyRequest(job="job", nodes=[job.manifest.nodes[1 - asked]])
    (found,) = job.daemons[asked].call("Survey", request).nodes
    return found.HasField("reply")


@pytest.fixture
def certificates(tmp_path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def job(start, certificates) -> Job:
    flags = certificates.flags("ours")
    job = Job([(start("--listen", "127.0.0.1:0", *flags), [rank]) for rank in range(2)])
    return job.decide()


def renew(daemon: DaemonProcess) -> None:
    times = daemon.log.read_text().count(RENEWED)
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: daemon.log.read_text().count(RENEWED) > times, what="new certificates")


def test_daemons_connect_again_with_new_certificates(job, certificates):
    assert hears(job, 0) and hears(job, 1)
    certificates.replace("ours", "new")
    renew(job.daemons[0])
    assert hears(job, 0) and hears(job, 1)  # over the open connections
    job.daemons[1].kill()
    job.daemons[1].start()  # this daemon knows only the new certificates
    until(lambda: hears(job, 0), what="a connection to the daemon with new certificates")
    until(lambda: hears(job, 1), what="a connection from that daemon")
