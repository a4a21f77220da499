"""Tests certificates that are replaced while a job runs: later connections use the new ones."""

from __future__ import annotations

import hashlib
import signal
import ssl

import grpc
import pytest

from reft.wire.certificate_role import REMEDY
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Job

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
RENEWED = "certificates changed: "


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
    cert, key, ca = certificates.files("ours", "nodes")
    sha256 = hashlib.sha256(ssl.PEM_cert_to_DER_cert(cert.read_text())).hexdigest()
    line = f'reft.audit certificates changed: cert={cert} key={key} ca={ca} role="daemon of user alice on node test" '
    (written,) = [each for each in job.daemons[0].log.read_text().splitlines() if RENEWED in each]
    assert f"{line}sha256={sha256} not_after=" in written and written.endswith(' GMT"')
    assert hears(job, 0) and hears(job, 1)  # over the open connections
    job.daemons[1].kill()
    job.daemons[1].start()  # this daemon knows only the new certificates
    until(lambda: hears(job, 0), what="a connection to the daemon with new certificates")
    until(lambda: hears(job, 1), what="a connection from that daemon")


def test_a_daemon_with_certificates_of_another_user_is_named_with_the_remedy(start, certificates):
    users = ("alice", "bob")
    daemons = [start("--listen", "127.0.0.1:0", *certificates.flags("ours", user=user)) for user in users]
    job = Job([(daemon, [rank]) for rank, daemon in enumerate(daemons)]).decide()
    passed_on = pb.CapsuleRequest(job="job", rank=1, node=job.manifest.nodes[1])
    with pytest.raises(grpc.RpcError) as refused:
        daemons[0].call("FetchCapsule", passed_on)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "can't be reached" in refused.value.details() and refused.value.details().endswith(REMEDY)
