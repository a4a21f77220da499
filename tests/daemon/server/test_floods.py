"""Floods a daemon from its own address, and looks at what its jobs notice of that.

flooder ─► daemon 0 ◄─ rounds of the job "rounds" ─► daemon 1
                   ◄─ daemon 2, which is restarted in the middle of the flood
                   ◄─ a trainer that attaches, and Hello after Hello, at the unix socket
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch

import reft
from reft.core.commit.round import StepAnswer
from reft.wire import local_socket, messages
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import ROOT, DaemonProcess, Site, until
from tests.support.flooder import HTTP2, KINDS
from tests.support.ipv6 import DAEMON_NETWORK, PEER_NETWORK, host_of_ipv6, sockets_of
from tests.support.jobs import Job, Trainer, descriptors_of
from tests.support.rounds import Rounds
from tests.support.saying import report_of

MIB = 1 << 20
RSS_MAX = 50 * MIB
LINES_MAX = 100
HELLO_MAX_S = 0.5
SHORT_S, LONG_S = 2.0, 60.0
REFUSED = re.compile(r"refused at the doors.* by=.*(127\.0\.0\.1|fd00:0:0:3::[0-9a-f]+) \(")


@dataclass
class Flooded:
    """Three daemons with two jobs; the first one is flooded."""

    site: Site
    rounds: Job
    late: Job
    network: str = ""

    @property
    def daemon(self) -> DaemonProcess:
        return self.site.daemons[0]


def started(*flags: str, network: str = "") -> Iterator[Flooded]:
    """Yields the daemons and jobs; in a network of IPv6, if that is named."""
    site, trainer = Site(), Trainer()
    if network:
        flags = (*flags, "--listen", f"[{DAEMON_NETWORK}1]:0", "--insecure")
        site.daemons += (DaemonProcess(*flags, network=network) for _ in range(3))
    daemons = site.daemons or site.add(3, *flags)
    rounds = Job([(daemons[0], [0]), (daemons[1], [1])], name="rounds").decide()
    for rank in (0, 1):
        rounds.lease(rank, trainer, slots=0)
    yield Flooded(site, rounds, Job([(daemons[0], [0]), (daemons[2], [1])], name="late").decide(), network)
    trainer.kill()
    site.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Flooded]:
    yield from started()


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory) -> Iterator[Flooded]:
    if why_not():
        pytest.skip(why_not())
    yield from started(*Certificates(tmp_path_factory.mktemp("certificates")).flags("ours"))


@pytest.fixture(scope="module")
def ipv6() -> Iterator[Flooded]:
    with host_of_ipv6() as network:
        yield from started(network=network)


def attaches(daemon: DaemonProcess, job: str) -> bool:
    """Attaches a trainer of its own, as a user's script does."""
    model = torch.nn.Linear(4, 4)
    with reft.attach(model, torch.optim.SGD(model.parameters(), 0.1), job=job, daemon=daemon.address) as session:
        return session.step == 0


def hears(job: Job, asked: int, node: int) -> bool:
    """Whether one daemon of a job reaches another one."""
    request = pb.SurveyRequest(job=job.name, nodes=[job.manifest.nodes[node]])
    (found,) = job.daemons[asked].call("Survey", request).nodes
    return found.HasField("reply")


def check_flood(flooded: Flooded, kind: str, seconds: float, capsys: pytest.CaptureFixture[str]) -> Rounds:
    daemon, address = flooded.daemon, flooded.rounds.hellos[0].addresses[0]
    assert hears(flooded.late, 1, 0)
    lines, rss = daemon.log.read_text().count("\n"), psutil.Process(daemon.process.pid).memory_info().rss
    inside = ["nsenter", f"--net={flooded.network}"] if flooded.network else []
    command = [*inside, sys.executable, "-m", "tests.support.flooder", kind, address, str(seconds)]
    flooder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    rounds = Rounds(flooded.rounds)
    try:
        assert flooder.stdout.readline()
        late = flooded.late.daemons[1]
        late.kill()
        late.start()
        began = time.monotonic()
        until(lambda: hears(flooded.late, 1, 0), what="a peer that connects again")
        peer_s, began = time.monotonic() - began, time.monotonic()
        assert attaches(daemon, re.sub(r"\W", "-", kind))
        attach_s, rounds.in_time = time.monotonic() - began, flooder.poll() is None
        output, _ = flooder.communicate(timeout=seconds + 120)
    finally:
        rounds.end()
        flooder.kill()
        flooder.wait()
    said = json.loads(output)
    growth = rounds.rss - rss
    text = daemon.log.read_text().splitlines()[lines:]
    with capsys.disabled():
        print(
            f"\n{said}: {rounds.made} rounds, Hello at most {rounds.hello_s:.3f} s, memory +{growth / MIB:.1f} MiB, "
            f"{len(text)} lines, a peer again after {peer_s:.1f} s, attach in {attach_s:.1f} s"
        )
    assert not rounds.errors and rounds.made > seconds, rounds.errors
    assert growth < RSS_MAX
    assert len(text) < LINES_MAX and "Traceback" not in "\n".join(text)
    return rounds


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "a network"])
def test_a_flood_disturbs_no_job(kind, request, capsys):
    flooded = request.getfixturevalue("encrypted" if kind == "handshakes" else "plain")
    check_flood(flooded, kind, SHORT_S, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_flood_disturbs_no_job(kind, request, capsys):
    flooded = request.getfixturevalue({"handshakes": "encrypted", "a network": "ipv6"}.get(kind, "plain"))
    said = len(flooded.daemon.log.read_text())
    rounds = check_flood(flooded, kind, LONG_S, capsys)
    assert rounds.hello_s < HELLO_MAX_S
    assert rounds.in_time, "the peer or the trainer came only after the flood"
    until(lambda: REFUSED.search(flooded.daemon.log.read_text()[said:]), 90, "the line that says who it was")


@pytest.mark.slow
def test_a_flood_of_a_network_of_ipv6_has_the_places_of_one_address(ipv6, capsys):
    """More addresses than there are places push out no caller of another network."""
    host, _, port = ipv6.rounds.hellos[0].addresses[0].rpartition(":")
    with sockets_of(ipv6.network) as new_socket, new_socket() as other:
        other.bind((f"{PEER_NETWORK}1", 0))
        other.connect((host.strip("[]"), int(port)))
        other.sendall(HTTP2)
        other.settimeout(20)
        assert other.recv(1), "gRPC has answered"
        check_flood(ipv6, "a network", 5 * SHORT_S, capsys)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            while other.recv(1 << 16):
                pass


def test_a_daemon_that_restarts_in_a_flood_goes_on_with_its_jobs(site):
    """Those who flood it come back first, and at once."""
    trainer = Trainer()
    daemons = site.add(2)
    job = Job([(daemon, [rank]) for rank, daemon in enumerate(daemons)]).decide()
    for rank in (0, 1):
        job.lease(rank, trainer, slots=0)
    address = job.hellos[0].addresses[0]
    daemons[0].flags = ("--listen", address)
    command = [sys.executable, "-m", "tests.support.flooder", "connections", address, str(SHORT_S)]
    flooder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert flooder.stdout.readline()
        daemons[0].kill()
        daemons[0].start()
        rounds = Rounds(job)
        output, _ = flooder.communicate(timeout=SHORT_S + 120)
        until(lambda: rounds.made or rounds.errors, what="a round")  # the start may take as long as the flood
        rounds.end()
    finally:
        flooder.kill()
        flooder.wait()
        trainer.kill()
    assert json.loads(output)["made"] and rounds.made and not rounds.errors, rounds.errors
    assert "Traceback" not in daemons[0].log.read_text()


def test_a_process_of_the_same_user_that_takes_all_descriptors_stops_no_trainer(daemon):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, slots=0)
    process, free = psutil.Process(daemon.process.pid), 20
    lines = daemon.log.read_text().count("\n")
    with contextlib.ExitStack() as opened:
        trainer = opened.enter_context(socket.socket(socket.AF_UNIX))
        trainer.connect(job.local_socket())
        report_on(trainer, job, 1)
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (descriptors_of(daemon) + free, hard))
        for path in [str(daemon.socket), job.local_socket()] * 2 * free:
            idle = opened.enter_context(socket.socket(socket.AF_UNIX))
            idle.setblocking(False)
            idle.connect(path)
        until(lambda: descriptors_of(daemon) >= process.rlimit(psutil.RLIMIT_NOFILE)[0], what="the shortage")
        for step in range(2, 50):
            report_on(trainer, job, step)
        assert len(daemon.log.read_text().splitlines()) - lines < LINES_MAX
    process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    until(daemon.answers, what="an answer to a new caller")
    assert daemon.status("job").whole == 49 and "Traceback" not in daemon.log.read_text()


def report_on(trainer: socket.socket, job: Job, step: int) -> None:
    """Reports a step on a connection that is open, as a trainer does."""
    steps = messages.report_to(report_of({step: StepAnswer.SEALED}))
    report = pb.ReportRequest(job=job.name, epoch=job.epoch, rank=0, steps=steps, wait_ms=9000)
    trainer.settimeout(20)
    trainer.sendall(local_socket.frame(pb.LocalRequest(report=report, protocol=messages.PROTOCOL)))
    (body,) = local_socket.FrameReader().feed(trainer.recv(local_socket.READ_BYTES))
    assert pb.LocalReply.FromString(body).report.pins.whole == step
