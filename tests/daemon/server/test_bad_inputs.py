"""Tests that the daemon refuses invalid requests with a fitting status, and goes on."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2

from reft.core.commit.pins import Pins
from reft.core.commit.round import Outcome, StepAnswer
from reft.errors import AttachError
from reft.wire import local_socket, messages, rpc
from reft.wire.slot_format import Geometry, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import CHUNK, Code, Job, descriptors_of, epoch_of, refused, tcp_call, write
from tests.support.proving import ProvingCaller
from tests.support.saying import report_of

MIB = 1 << 20
BAD_NAMES = [
    "../../etc", "a/b", ".", "..", "", "a" * 65, "a\0b", "a\nb", "jоb", "-rf", ".hidden", "a b", "lock/..", "job/",
]  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """One daemon for all bad inputs. At the end it must still be the same process."""
    process = DaemonProcess("--listen", "127.0.0.1:0")
    pid = process.process.pid
    yield process
    alive = process.answers() and process.process.pid == pid and process.process.poll() is None
    log = process.log.read_text()
    process.close()
    assert alive and "Traceback" not in log, log


@pytest.fixture
def job(shared) -> Iterator[Job]:
    """A job with two ranks on the shared daemon. This process holds the lease of rank 0."""
    made = Job([(shared, [0, 1])]).decide()
    made.lease(0)
    yield made
    for rank in (0, 1):
        shared.call("Release", pb.ReleaseRequest(job="job", epoch=made.epoch, rank=rank))
    shared.call("Purge", pb.PurgeRequest(job="job"))


def listing(daemon: DaemonProcess) -> list[str]:
    return sorted(str(path) for path in daemon.folder.parent.glob(f"{daemon.folder.name}/**/*"))


@pytest.mark.parametrize("protocol", [0, messages.OLDEST - 1, messages.PROTOCOL + 1, (1 << 32) - 1])
def test_another_protocol_is_refused_with_both_numbers(shared, protocol):
    with refused(Code.FAILED_PRECONDITION, f"protocol {protocol}, this daemon"):
        shared.call("Hello", pb.HelloRequest(protocol=protocol))


def test_a_newer_program_that_still_speaks_our_protocol_is_admitted(shared):
    reply = shared.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL + 2, oldest=messages.PROTOCOL))
    assert (reply.protocol, reply.oldest) == (messages.PROTOCOL, messages.OLDEST)


def protocol_metadata(newest: int, oldest: int) -> tuple[tuple[str, str], ...]:
    return ((rpc.PROTOCOL_KEY, str(newest)), (rpc.OLDEST_KEY, str(oldest)))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ((), f"protocol {rpc.SILENT}, this daemon"),
        (protocol_metadata(messages.OLDEST - 1, 1), f"protocol {messages.OLDEST - 1} (and older ones from 1 on)"),
        (protocol_metadata(99, messages.PROTOCOL + 1), f"protocol 99 (and older ones from {messages.PROTOCOL + 1} on)"),
        (((rpc.PROTOCOL_KEY, "eight"),), "protocol 0, this daemon"),
    ],
)
def test_a_call_of_another_daemons_protocol_is_refused_before_it_is_read(shared, job, metadata, said):
    """Bytes that are no message, so an answer to these would be another error."""
    with grpc.insecure_channel(job.hellos[0].addresses[0], options=rpc.OPTIONS) as channel:
        with refused(Code.FAILED_PRECONDITION, said):
            channel.unary_unary("/reft.v1.Peer/Gather")(b"\xff", timeout=10, metadata=metadata)
        with refused(Code.FAILED_PRECONDITION, said):
            list(channel.unary_stream("/reft.v1.Daemon/Read")(b"\xff", timeout=10, metadata=metadata))


@pytest.mark.parametrize("method", ["AgentBeat", "Signals"])
def test_an_agent_of_another_protocol_is_refused_before_it_is_read(shared, method):
    """It said Hello to an earlier daemon. Signals of this one must not restart its workers."""
    with rpc.channel(shared.address) as channel, refused(Code.FAILED_PRECONDITION, "protocol 99"):
        metadata = protocol_metadata(99, messages.PROTOCOL + 1)
        channel.unary_unary(f"/reft.v1.Daemon/{method}")(b"\xff", timeout=10, metadata=metadata)


@pytest.mark.parametrize("newest", [messages.PROTOCOL, messages.PROTOCOL + 5])
def test_a_range_that_begins_before_proofs_needs_a_proof(shared, job, newest):
    """Protocols up to 10 sent the token itself. Nobody can ask for that by a wide range."""
    request = pb.StatusRequest(job="job")
    with grpc.insecure_channel(job.hellos[0].addresses[0], options=rpc.OPTIONS) as channel:
        for metadata in ((), (("reft-job", "job"), ("reft-token-bin", job.manifest.token))):
            with refused(Code.UNAUTHENTICATED):
                pb_grpc.DaemonStub(channel).Status(
                    request, timeout=10, metadata=(*protocol_metadata(newest, 1), *metadata)
                )


def test_replies_to_daemons_say_the_protocol(shared, job):
    with grpc.insecure_channel(job.hellos[0].addresses[0], options=rpc.OPTIONS) as channel:
        caller = ProvingCaller(channel, job.manifest.token)
        caller.protocol = protocol_metadata(99, messages.OLDEST)
        caller.call("Status", pb.StatusRequest(job="job"))
        assert set(rpc.PROTOCOL_METADATA) <= set(caller.answered)
        (name, *_) = job.lease(0)
        write(job.maps(0, [name])[0], job.version(1))
        request = pb.ReadRequest(job="job", slot=name, version=messages.version_to(job.version(1)), size=8)
        assert caller.call("Read", request)
        assert set(rpc.PROTOCOL_METADATA) <= set(caller.answered)


def test_a_report_of_another_protocol_is_refused_and_changes_no_step(shared, job):
    """A daemon may be upgraded while trainers run that said Hello to the earlier daemon.

    `status` says why their snapshots do not become whole.
    """
    said = messages.report_to(report_of({1: StepAnswer.SEALED}))
    report = pb.ReportRequest(job="job", epoch=job.epoch, rank=0, steps=said)
    for protocol in (messages.PROTOCOL + 1, messages.OLDEST - 1):
        with refused(Code.FAILED_PRECONDITION, f"protocol {protocol}, this daemon"):
            job.send_report(0, report, protocol=protocol)
        rank = shared.status("job").ranks[0]
        assert rank.step == -1 and f"the trainer speaks protocol {protocol}, this daemon" in rank.trouble
    job.send_report(0, report)
    assert not shared.status("job").ranks[0].trouble


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_job_name_creates_nothing(shared, name):
    before = listing(shared)
    good = Job([(shared, [0])], name="x")
    good.counter = 1
    good.manifest.job = name
    with refused(Code.INVALID_ARGUMENT, "not allowed"):
        shared.call("Decide", pb.DecideRequest(manifest=good.manifest, decision=good.decision()))
    for method, request in (
        ("Lease", good.lease_request()), ("Purge", pb.PurgeRequest(job=name)), ("Release", pb.ReleaseRequest(job=name)),
    ):  # fmt: skip
        with refused(Code.INVALID_ARGUMENT, "not allowed"):
            shared.call(method, request)
    with refused(Code.INVALID_ARGUMENT, "not allowed"):
        good.send_report(0, pb.ReportRequest(job=name))
    assert not shared.call("Inventory", pb.InventoryRequest(job=name, end_orphans=True)).slots
    with refused(Code.NOT_FOUND):
        list(shared_read(shared, pb.ReadRequest(job=name, slot="../lock", size=100)))
    assert listing(shared) == before


def shared_read(daemon: DaemonProcess, request: pb.ReadRequest) -> list[pb.Chunk]:
    with rpc.channel(daemon.address) as channel:
        return list(pb_grpc.DaemonStub(channel).Read(request, timeout=10))


@pytest.mark.parametrize(
    "changes",
    [
        {"world": (1 << 32) - 1},
        {"world": 3},
        {"world": 1},
        {"token": b"short"},
        {"nodes": [pb.Node(name="n", ranks=[1])]},
        {"nodes": [pb.Node(name="n", ranks=[0, 0])], "world": 2},
    ],
)
def test_an_invalid_manifest_is_refused(shared, changes):
    bad = Job([(shared, [0, 1])], name="impossible")
    bad.counter = 1
    if "nodes" in changes:
        bad.manifest.ClearField("nodes")
    bad.manifest.MergeFrom(pb.Manifest(**changes))
    with refused(Code.INVALID_ARGUMENT, "manifest of job impossible"):
        shared.call("Decide", pb.DecideRequest(manifest=bad.manifest, decision=bad.decision()))


def test_an_invalid_decision_is_refused(shared):
    bad = Job([(shared, [0])], name="impossible")
    bad.counter = 1
    with refused(Code.INVALID_ARGUMENT, "no node 1"):
        shared.call("Decide", pb.DecideRequest(manifest=bad.manifest, decision=bad.decision(), node_index=1))
    for ident in (b"", b"short", bytes(17)):
        decision = pb.Decision(epoch=pb.Epoch(counter=1, ident=ident))
        with refused(Code.INVALID_ARGUMENT, "16 bytes"):
            shared.call("Decide", pb.DecideRequest(manifest=bad.manifest, decision=decision))
    knows = [pb.Epoch(counter=1, ident=bytes(16)) for _ in range(65)]
    for known, text in ((knows, "65 attaches; the limit is 64"), ([pb.Epoch(counter=1)], "16 bytes")):
        decision = pb.Decision(epoch=pb.Epoch(counter=2, ident=bytes(16)), known=known)
        with refused(Code.INVALID_ARGUMENT, text):
            shared.call("Decide", pb.DecideRequest(manifest=bad.manifest, decision=decision))
    epoch, far = pb.Epoch(counter=1, ident=bytes(16)), pb.Version(epoch=pb.Epoch(ident=bytes(16)), step=1 << 63)
    for decision, text in (
        (pb.Decision(epoch=epoch, base=pb.Version(step=1)), "16 bytes"),
        (pb.Decision(epoch=epoch, base=far), "steps end at"),
        (pb.Decision(epoch=epoch, guard=far), "steps end at"),
    ):
        with refused(Code.INVALID_ARGUMENT, text):
            shared.call("Decide", pb.DecideRequest(manifest=bad.manifest, decision=decision))
        with refused(Code.INVALID_ARGUMENT, text):
            shared.call("StoreDecision", pb.StoreDecisionRequest(job="impossible", decision=decision))
    with refused(Code.NOT_FOUND):
        shared.status("impossible")


@pytest.mark.parametrize(
    "changes",
    [{"pins": pb.Pins(seq=1, **{name: 1 << 63})} for name in ("whole", "turn", "protected", "kept", "persist")]
    + [{"open": [1 << 63]}, {"interval_start": 1 << 63}, {"layout": pb.LayoutOutcome(start=1 << 63)}],
)  # fmt: skip
def test_an_outcome_beyond_the_last_step_changes_nothing(shared, job, changes):
    """Such a step in a round once made every later answer about the job an error."""
    outcome = pb.Outcome(job="job", epoch=job.epoch, **changes)
    address, token = job.hellos[0].addresses[0], job.manifest.token
    for method, request in (
        ("Announce", outcome),
        ("Keep", pb.KeepRequest(job="job", epoch=job.epoch, outcome=outcome)),
    ):
        with refused(Code.INVALID_ARGUMENT, "steps end at"):
            tcp_call(address, method, request, token, pb_grpc.PeerStub)
    assert shared.status("job").whole == -1


@pytest.mark.parametrize(
    ("lineage", "name"),
    [
        ("../../etc", "e1-00000000-s1"),
        ("0" * 16, "../x"),
        ("a\0b", "e1-00000000-s1"),
        ("", "e1-00000000-s1"),
        ("0" * 16, "/"),
    ],
)
def test_names_that_would_lead_out_of_storage_are_refused(shared, lineage, name):
    with refused(Code.INVALID_ARGUMENT, "can't be on storage"):
        shared.call("OpenStored", pb.OpenStoredRequest(job="job", lineage=lineage, name=name, ranks=[0]))
    with refused(Code.INVALID_ARGUMENT, "can't be on storage"):
        shared.call("Stored", pb.StoredRequest(job="job", lineage=lineage, name=name))
    with refused(Code.INVALID_ARGUMENT, "not allowed"):
        shared.call("Stored", pb.StoredRequest(job="../x"))


def test_another_job_of_the_name_takes_no_held_job_over(shared, job):
    thief = Job([(shared, [0, 1])], job_mark=b"t" * 16)
    thief.counter = 7
    with refused(Code.INVALID_ARGUMENT, "another job of the name"):
        shared.call("Decide", pb.DecideRequest(manifest=thief.manifest, decision=thief.decision()))
    assert shared.status("job").epoch.counter == 1


@pytest.mark.parametrize("rank", [2, 77, (1 << 32) - 1])
def test_a_rank_of_another_node_is_refused(shared, job, rank):
    with refused(Code.FAILED_PRECONDITION, f"rank {rank}"):
        job.lease(rank)
    with refused(Code.FAILED_PRECONDITION, f"rank {rank}"):
        job.report(rank, {1: StepAnswer.SEALED})


@pytest.mark.parametrize("nbytes", [1 << 40, 10 * psutil.virtual_memory().total, 1 << 63, (1 << 64) - 1])
def test_too_large_slots_are_refused_before_memory_is_touched(shared, job, nbytes):
    process = psutil.Process(shared.process.pid)
    before, held = process.memory_info().rss, shared.call("Status", pb.StatusRequest()).held_bytes
    for _ in range(5):
        with refused(Code.RESOURCE_EXHAUSTED, "Fix: "):
            job.lease(1, data_bytes=nbytes)
    assert process.memory_info().rss - before < 16 * MIB
    assert shared.call("Status", pb.StatusRequest()).held_bytes == held
    assert not list((shared.folder / "job").glob("rank-1*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 33}, {"slots": (1 << 32) - 1}, {"table_bytes": 1 << 63}, {"table_bytes": 65 * MIB}, {"chunk_bytes": 0},
        {"chunk_bytes": 1}, {"chunk_bytes": 5000},
    ],
)  # fmt: skip
def test_invalid_sizes_are_refused(shared, job, changes):
    with refused(Code.INVALID_ARGUMENT):
        job.lease(1, **changes)
    assert not list((shared.folder / "job").glob("rank-1*"))


def test_a_report_without_a_lease_is_refused(shared, job):
    with refused(Code.FAILED_PRECONDITION, "holds no lease"):
        job.report(1, {1: StepAnswer.SEALED})


def test_reports_of_decided_steps_change_nothing(shared, job):
    job.lease(1)
    assert not job.report(0, {3: StepAnswer.SEALED}).pins.HasField("whole")
    assert job.report(1, {3: StepAnswer.SEALED}).pins.whole == 3
    assert job.report(0, {3: StepAnswer.SEALED}).pins.whole == 3  # sealed twice
    # another answer for a decided step changes nothing
    assert job.report(0, {3: StepAnswer.VOID, 2: StepAnswer.VOID}).pins.whole == 3
    assert messages.outcome_from(job.report(0, {2: StepAnswer.VOID})) == Outcome(Pins(whole=3), 3)


def test_steps_at_the_end_of_the_range(shared, job):
    job.lease(1)
    answers = {messages.STEP_MAX: StepAnswer.SEALED}
    job.report(0, answers)
    assert job.report(1, answers).pins.whole == messages.STEP_MAX
    for step in (messages.STEP_MAX + 1, (1 << 64) - 1):
        with refused(Code.INVALID_ARGUMENT, "steps end at"):
            job.report(0, {step: StepAnswer.SEALED})


def test_a_report_with_an_impossible_layout_changes_nothing(shared, job):
    job.lease(1)
    job.report(1, {3: StepAnswer.SEALED})
    for ready in (messages.STEP_MAX, (1 << 64) - 1):
        request = pb.ReportRequest(
            job="job", epoch=job.epoch, rank=0, layout=pb.LayoutReport(ready=ready),
            steps=messages.report_to(report_of({3: StepAnswer.SEALED})),
        )  # fmt: skip
        with refused(Code.INVALID_ARGUMENT, "no layout can begin"):
            job.send_report(0, request)
    assert not job.report(0, {}).pins.HasField("whole")


def test_an_unknown_job_is_not_found(shared):
    for method, request in (
        ("Lease", pb.LeaseRequest(job="none")), ("Release", pb.ReleaseRequest(job="none")),
        ("Purge", pb.PurgeRequest(job="none")), ("Status", pb.StatusRequest(job="none")),
    ):  # fmt: skip
        with refused(Code.NOT_FOUND):
            shared.call(method, request)
    with refused(Code.NOT_FOUND):
        Job([(shared, [0])]).send_report(0, pb.ReportRequest(job="none"))


def test_an_older_epoch_is_stale_everywhere(shared, job):
    job.close().decide()
    orphan, old = epoch_of(1), messages.epoch_to(epoch_of(1))
    with refused(Code.ABORTED, "job job was started again (epoch 2)"):
        job.send_report(0, pb.ReportRequest(job="job", epoch=old))
    with refused(Code.ABORTED):
        shared.call("Release", pb.ReleaseRequest(job="job", epoch=old))
    with refused(Code.ABORTED):
        job.lease(0, epoch=old)
    with refused(Code.ABORTED):
        decision = pb.Decision(epoch=messages.epoch_to(orphan))
        shared.call("Decide", pb.DecideRequest(manifest=job.manifest, decision=decision))
    with refused(Code.ABORTED):  # the same counter, another attach
        other = pb.Decision(epoch=pb.Epoch(counter=2, ident=b"x" * 16))
        shared.call("Decide", pb.DecideRequest(manifest=job.manifest, decision=other))
    with pytest.raises(AttachError, match="was started again"):
        request = pb.SlotsRequest(job="job", epoch=old, slots=["rank-0.slot-0"])
        local_socket.ask_slots(job.local_socket(), request, [], 5)
    assert shared.status("job").epoch.counter == 2


def test_over_tcp_only_the_jobs_own_token_admits(shared, job):
    other = Job([(shared, [0])], name="other", token=b"o" * 32).decide()
    address = job.hellos[0].addresses[0]
    calls = [
        ("Status", pb.StatusRequest(job="job"), None),
        ("Inventory", pb.InventoryRequest(job="job"), None),
        ("Gather", pb.GatherRequest(job="job", epoch=job.epoch, node_index=1), pb_grpc.PeerStub),
        ("Announce", pb.Outcome(job="job", epoch=job.epoch, pins=pb.Pins(whole=99)), pb_grpc.PeerStub),
    ]
    for method, request, service in calls:
        for token in (None, b"x", b"x" * 32, other.manifest.token):
            with refused(Code.UNAUTHENTICATED, "token"):
                tcp_call(address, method, request, token, service)
    decide = pb.DecideRequest(manifest=job.manifest, decision=job.decision())
    for method, request in (("Purge", pb.PurgeRequest(job="job")), ("Decide", decide)):
        with refused(Code.UNIMPLEMENTED):
            tcp_call(address, method, request, job.manifest.token)
    with refused(Code.UNAUTHENTICATED):
        tcp_call(address, "Status", pb.StatusRequest(), job.manifest.token)  # all jobs
    with refused(Code.UNAUTHENTICATED):
        tcp_call(address, "Status", pb.StatusRequest(job="none"), job.manifest.token)
    assert tcp_call(address, "Status", pb.StatusRequest(job="job"), job.manifest.token).jobs[0].whole == -1
    local = shared.call("Inventory", pb.InventoryRequest(job="job"))
    assert [held.job for held in local.others] == ["other"]
    assert not tcp_call(address, "Inventory", pb.InventoryRequest(job="job"), job.manifest.token).others
    shared.call("Purge", pb.PurgeRequest(job="other"))


def test_a_message_above_the_limit(shared):
    with refused(Code.RESOURCE_EXHAUSTED):
        with rpc.channel(shared.address) as channel:
            pb_grpc.DaemonStub(channel).Inventory(pb.InventoryRequest(launch="x" * (rpc.MESSAGE_MAX + 1)), timeout=10)
    with refused(Code.INVALID_ARGUMENT):
        big = pb.Manifest(job="big", world=1, token=bytes(32), script="x" * (16 * MIB), nodes=[pb.Node(ranks=[0])])
        shared.call("Decide", pb.DecideRequest(manifest=big, decision=pb.Decision(epoch=pb.Epoch(ident=bytes(16)))))


class NoMessage:
    """Bytes that can't be parsed, in the place of a request."""

    def ListFields(self) -> list[object]:
        return []

    def SerializeToString(self) -> bytes:
        return b"\xff"


def test_bytes_that_are_no_message_are_refused(shared, job):
    """At the unix socket by the parser; over TCP not without a proof, which is judged first."""
    for address in (shared.address, job.hellos[0].addresses[0]):
        with grpc.insecure_channel(address, options=rpc.OPTIONS) as channel:
            code = Code.INVALID_ARGUMENT if address == shared.address else Code.UNAUTHENTICATED
            with refused(code, "can't be read" if address == shared.address else "needs a proof"):
                channel.unary_unary("/reft.v1.Peer/Beat")(b"\xff", timeout=10, metadata=rpc.PROTOCOL_METADATA)
            with refused(code, "can't be read" if address == shared.address else "needs a proof"):
                list(channel.unary_stream("/reft.v1.Daemon/Read")(b"\xff", timeout=10, metadata=rpc.PROTOCOL_METADATA))
            with refused(Code.UNIMPLEMENTED):
                channel.unary_unary("/reft.v1.Daemon/None")(b"", timeout=10)
            with refused(Code.UNIMPLEMENTED):
                list(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=10))
            reply = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
            assert reply == health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()
    for method, service in (("Beat", pb_grpc.PeerStub), ("Read", None)):
        with refused(Code.INVALID_ARGUMENT, "can't be read"):
            tcp_call(address, method, NoMessage(), job.manifest.token, service, job="job")


def test_a_read_names_a_slot_and_a_version(shared, job):
    (name, *_) = job.lease(0)
    with refused(Code.NOT_FOUND):
        shared_read(shared, pb.ReadRequest(job="job", slot="rank-0.slot-99", size=1))
    with refused(Code.FAILED_PRECONDITION):
        shared_read(shared, pb.ReadRequest(job="job", slot=name, size=1))


def test_a_thousand_idle_connections(shared, job):
    """gRPC's connections stay open.

    Those of the local socket are served in turn, and dropped at their deadline.
    """
    idle = []
    try:
        for path in [str(shared.socket)] * 900 + [job.local_socket()] * 60:
            idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            idle[-1].connect(path)
        assert shared.answers()
        assert len(job.maps(0, job.lease(0))) == 2
    finally:
        for connection in idle:
            connection.close()


# The local socket


def talk(path: str, data: bytes, descriptors: tuple[int, ...] = (), shut: bool = True) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(path)
        socket.send_fds(connection, [data], list(descriptors))
        if shut:
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(local_socket.READ_BYTES)


def framed(**request: object) -> bytes:
    return local_socket.frame(pb.LocalRequest(protocol=messages.PROTOCOL, **request))


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"\1", "ended early"),
        (struct.pack("<I", 100) + b"abc", "ended early"),
        (struct.pack("<I", 1 << 31), f"the limit is {16 * MIB}"),
        (struct.pack("<I", 3) + b"\xff\xff\xff", "parsing"),
        (framed(), "no request"),
        (framed(slots=pb.SlotsRequest(job="x" * 5000)), "the limit is 4096"),
        (framed(slots=pb.SlotsRequest(job="../x")), "not allowed"),
        (framed(slots=pb.SlotsRequest(job="none")), "holds no job"),
    ],
)
def test_a_bad_request(shared, job, data, answer):
    before = descriptors_of(shared)
    (body,) = local_socket.FrameReader().feed(talk(job.local_socket(), data))
    reply = pb.LocalReply.FromString(body)
    assert reply.status and answer in reply.error and reply.protocol == messages.PROTOCOL
    until(lambda: descriptors_of(shared) <= before, what="the connection's end")


@pytest.mark.parametrize(
    ("rank", "slots"),
    [(0, []), (0, ["rank-0.slot-9"]), (1, ["rank-0.slot-0"]), (0, ["../../lock"]), (0, ["rank-0.slot-0"] * 33)],
)
def test_slots_of_other_ranks_are_not_given(shared, job, rank, slots):
    request = pb.SlotsRequest(job="job", epoch=job.epoch, rank=rank, slots=slots)
    with pytest.raises(AttachError, match="can't have slots"):
        local_socket.ask_slots(job.local_socket(), request, [], 5)


def foreign(kind: str, folder: str) -> int:
    if kind == "pipe":
        return os.pipe()[0]
    if kind == "device":
        return os.open("/dev/zero", os.O_RDWR)
    if kind == "file":
        return os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT)
    descriptor = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    if kind == "unsealed":  # a valid slot that its trainer could cut under the daemon
        geometry = Geometry(0, CHUNK, CHUNK)
        slot = np.zeros(geometry.file_bytes, np.uint8)
        SlotMap.create(slot, geometry, "job", 0)
        os.write(descriptor, slot.tobytes())
    elif kind != "empty":
        os.ftruncate(descriptor, 1 << 40 if kind == "huge" else 2 * MIB)
    if kind != "unsealed":
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


@pytest.mark.parametrize("kind", ["pipe", "device", "file", "unsealed", "empty", "zeros", "huge"])
def test_a_foreign_descriptor_is_refused_and_closed(shared, job, tmp_path, kind):
    before, held = descriptors_of(shared), shared.call("Status", pb.StatusRequest()).held_bytes
    descriptor = foreign(kind, str(tmp_path))
    request = pb.SlotsRequest(job="job", epoch=job.epoch, returned=["rank-0.slot-7"])
    with pytest.raises(AttachError, match=r"not a memfd|the file ends after|not a slot"):
        local_socket.ask_slots(job.local_socket(), request, [descriptor], 5)
    os.close(descriptor)
    until(lambda: descriptors_of(shared) <= before, what="the foreign descriptor's end")
    assert "rank-0.slot-7" not in job.headers()
    assert shared.call("Status", pb.StatusRequest()).held_bytes == held


def test_more_descriptors_than_names_and_very_many(shared, job):
    before = descriptors_of(shared)
    request = pb.SlotsRequest(job="job", epoch=job.epoch, returned=["rank-0.slot-7"])
    with pytest.raises(AttachError, match="2 descriptors arrived for 1 slots"):
        local_socket.ask_slots(job.local_socket(), request, [0, 0], 5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(job.local_socket())
        # the rest of the request is never sent
        connection.send(struct.pack("<I", local_socket.REQUEST_MAX))
        for _ in range(2):
            socket.send_fds(connection, [b"\0"], [0] * local_socket.DESCRIPTORS_MAX)
        assert b"more than 32" in connection.recv(100)
    until(lambda: descriptors_of(shared) <= before, what="their end")


def test_a_silent_caller_delays_no_other_caller(shared, job):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(job.local_socket())
        silent.send(b"\5\0")
        assert len(job.maps(0, job.lease(0))) == 2


def test_slots_may_be_requested_twice(shared, job):
    names = job.lease(0)
    assert [len(job.maps(0, names)) for _ in range(2)] == [2, 2]
    assert job.lease(0) == names and job.lease(0, data_bytes=CHUNK) == names
