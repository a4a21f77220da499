"""Fuzzes all doors of a daemon, and looks at what its other job notices of that.

fuzzer ─► daemon 0 ◄─ rounds of the job "rounds" ─► daemon 1
    bytes: TCP, unix socket, local socket, the mover's port; with TLS before and after a handshake
    messages like real ones, with the right proof: each method at each door, about the job "fuzzed";
    first with each number at its limit
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import grpc
import psutil
import pytest

from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import ROOT, DaemonProcess, Site, until
from tests.support.fuzzer import Target
from tests.support.jobs import Job, Trainer, descriptors_of, tcp_call
from tests.support.rounds import Rounds

MIB = 1 << 20
RSS_MAX = 50 * MIB
LINES_MAX = 100
LAUNCH_TOKEN = b"l" * 32
MEMORY = "16MiB"  # the most that leases of the fuzzer can take


@pytest.fixture(params=["plain", "TLS"])
def certificates(request, tmp_path_factory) -> Certificates | None:
    if request.param == "plain":
        return None
    if why_not():
        pytest.skip(why_not())
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def nodes(site: Site, tmp_path, certificates) -> Iterator[tuple[Job, Job, Trainer]]:
    """Two daemons with two jobs: one makes rounds, and the other one, with a trainer, is fuzzed."""
    flags = certificates.flags("ours") if certificates else ()
    daemons = site.add(2, "--memory", MEMORY, "--persist", str(tmp_path), *flags)
    trainer, victim = Trainer(), Trainer()
    rounds, fuzzed = (Job([(daemons[0], [0]), (daemons[1], [1])], name=name).decide() for name in ("rounds", "fuzzed"))
    for rank in (0, 1):
        rounds.lease(rank, trainer, slots=0)
    fuzzed.lease(0, victim)
    for daemon, node in zip(daemons, fuzzed.manifest.nodes, strict=True):
        beat = pb.AgentBeatRequest(
            job="fuzzed", node_id=node.id, launch="launch", round=1, pid=victim.pid, nodes=fuzzed.manifest.nodes,
            token=LAUNCH_TOKEN,
        )  # fmt: skip
        daemon.call("AgentBeat", beat)
    daemons[0].call("Stored", pb.StoredRequest(job="fuzzed"))  # starts the persister
    yield rounds, fuzzed, victim
    trainer.kill()
    victim.kill()


def target_of(job: Job, certificates: Certificates | None) -> Target:
    # As the second node has them: the first one is fuzzed.
    files = certificates.files("ours", "nodes", job.manifest.nodes[1].name) if certificates else ()
    bulk = tcp_call(
        job.hellos[0].addresses[0], "OpenBulk", pb.OpenBulkRequest(job=job.name, epoch=job.epoch), job.manifest.token,
        pb_grpc.PeerStub, tls=Tls(*files) if files else None,
    )  # fmt: skip
    return Target(
        job.daemons[0].address, job.hellos[0].addresses[0], job.local_socket(), bulk.port, job.hellos[0].node_id,
        job.manifest.SerializeToString().hex(), LAUNCH_TOKEN.hex(), tuple(map(str, files)),
    )  # fmt: skip


def has_purged(daemon: DaemonProcess) -> bool:
    """Purges what the fuzzer may have made; returns whether all of that is gone."""
    others = [each.job for each in daemon.call("Status", pb.StatusRequest()).jobs if each.job != "rounds"]
    for job in others:
        with contextlib.suppress(grpc.RpcError):  # the end of its trainer is not seen yet
            daemon.call("Purge", pb.PurgeRequest(job=job))
    return not others


def check_fuzz(
    rounds_job: Job, fuzzed: Job, victim: Trainer, certificates: Certificates | None, seed: int, seconds: float,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    daemon = fuzzed.daemons[0]
    target = target_of(fuzzed, certificates)
    lines, rss = daemon.log.read_text().count("\n"), psutil.Process(daemon.process.pid).memory_info().rss
    command = [sys.executable, "-m", "tests.support.fuzzer", str(seed), str(seconds)]
    rounds = Rounds(rounds_job)
    descriptors = descriptors_of(daemon)
    fuzzer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = fuzzer.communicate(target.to_json(), timeout=seconds + 120)
    finally:
        fuzzer.kill()
        fuzzer.wait()
        rounds.end()
    done = json.loads(output.splitlines()[-1])
    growth, text = rounds.rss - rss, daemon.log.read_text().splitlines()[lines:]
    with capsys.disabled():
        print(f"\n{done}: {rounds.made} rounds, memory +{growth / MIB:.1f} MiB, {len(text)} lines")
    assert not rounds.errors and rounds.made > seconds, rounds.errors
    assert not done["unknown"] and "Traceback" not in "\n".join(text), "\n".join([*done["unknown"], *text[:200]])
    assert growth < RSS_MAX
    assert len(text) < LINES_MAX, "\n".join(text[:200])
    victim.kill()
    until(lambda: has_purged(daemon), what="the end of the fuzzed jobs")
    until(lambda: descriptors_of(daemon) <= descriptors, 90, "the end of what the fuzzer had opened")


def test_no_bytes_and_no_message_disturb_another_job(nodes, certificates, capsys):
    check_fuzz(*nodes, certificates, 1, 5.0, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_long_fuzz_disturbs_no_other_job(nodes, certificates, seed, capsys):
    check_fuzz(*nodes, certificates, seed, 60.0, capsys)
