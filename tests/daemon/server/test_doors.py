"""Each call with each proof at each door of real daemons; nothing is served that has no row."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message_factory import GetMessageClass

from reft.wire import rpc
from reft.wire.proof import Metadata, prove_call
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.server.callers import UNCOUNTED, Door
from reft_daemon.server.doors import ROWS, MethodRow, Proof
from reft_daemon.server.judge import descriptor_of
from tests.support.certificates import NODE, Certificates, why_not
from tests.support.daemons import ROOT, DaemonProcess, until
from tests.support.jobs import Code, Job, refused, tcp_call
from tests.support.proving import ProvingCaller

PAGE = ROOT / "daemon/SECURITY.md"
HEALTH = "grpc.health.v1.Health/Check"
METHODS = [
    f"{service.full_name}/{method.name}"
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
] + [HEALTH]
TOKENS = {"job": b"j" * 32, "other": b"o" * 32}
LAUNCH_TOKEN = b"l" * 32
REFUSED = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED, Code.UNIMPLEMENTED)
MIB = 1 << 20


def row_of(method: str, door: Door) -> MethodRow | None:
    rows = [row for row in ROWS if (row.method, row.door) == (method, door)]
    assert len(rows) <= 1, f"{method} has two rows at one door"
    return rows[0] if rows else None


def test_each_method_has_a_row_and_each_row_a_method():
    assert {row.method for row in ROWS} == set(METHODS)
    for row in ROWS:
        fields = descriptor_of(row.method).input_type.fields_by_name
        assert {*row.unset, *filter(None, [row.speaker])} <= set(fields), row
        for path in row.lists:
            message = descriptor_of(row.method).input_type
            *parts, name = path.split(".")
            for part in parts:
                message = message.fields_by_name[part].message_type
            assert message.fields_by_name[name].is_repeated, f"{row.method}: {path}"
        assert (row.request_max == 0) == (row.proof is Proof.NONE)
        assert row.door is Door.LOCAL or row.proof is not Proof.SOCKET


# Each call, with each proof, at each door


@dataclass
class Node:
    """A daemon that holds the jobs "job" and "other", and whose agents watch "job"."""

    daemon: DaemonProcess
    job: Job
    local: grpc.Channel
    remote: grpc.Channel
    caller: ProvingCaller

    def answer(self, channel: grpc.Channel, method: str, request: Any, metadata: Any) -> grpc.StatusCode:
        kind = channel.unary_stream if descriptor_of(method).server_streaming else channel.unary_unary
        call = kind(f"/{method}", request_serializer=type(request).SerializeToString)
        try:
            reply = call(request, timeout=20, metadata=metadata)
            if descriptor_of(method).server_streaming:
                list(reply)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return error.code()
        return Code.OK


def started(*flags: str, tls: Tls | None = None) -> Node:
    daemon = DaemonProcess("--listen", "127.0.0.1:0", *flags)
    job = Job([(daemon, [0])], token=TOKENS["job"]).decide()
    Job([(daemon, [0])], name="other", token=TOKENS["other"]).decide()
    job.lease(0)  # so nobody can purge the job
    node = job.manifest.nodes[0]
    far = pb.Node(name=NODE, id="f" * 16, addresses=["127.0.0.1:1"])
    beat = pb.AgentBeatRequest(
        job="job", node_id=node.id, launch="launch", round=1, pid=1, nodes=[node, far], token=LAUNCH_TOKEN
    )
    daemon.call("AgentBeat", beat)
    remote = rpc.channel(node.addresses[0], tls)
    caller = ProvingCaller(remote, TOKENS["job"])
    caller.call("Status", pb.StatusRequest(job="job"))  # tells the challenge
    return Node(daemon, job, rpc.channel(daemon.address), remote, caller)


def closed(node: Node) -> None:
    node.local.close()
    node.remote.close()
    log = node.daemon.log.read_text()
    alive = node.daemon.answers()
    node.daemon.close()
    assert alive and "Traceback" not in log, log


@pytest.fixture(scope="module")
def plain() -> Iterator[Node]:
    node = started()
    yield node
    closed(node)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory) -> Iterator[Node]:
    if why_not():
        pytest.skip(why_not())
    certificates = Certificates(tmp_path_factory.mktemp("certificates"))
    far = certificates.flags("ours", node=NODE)  # speaks for that node only
    node = started(*certificates.flags("ours"), tls=Tls(*map(Path, far[1::2])))
    yield node
    closed(node)


def request_about(method: str, job: str) -> Any:
    """Returns a request that only the rules of the doors may refuse for its job, or its sender."""
    request = GetMessageClass(descriptor_of(method).input_type)()
    fields = request.DESCRIPTOR.fields_by_name
    if "job" in fields:
        request.job = job
    elif "manifest" in fields:
        request.manifest.job = job
    if method.endswith("AgentBeat"):
        request.node_id = "f" * 16
    if method.endswith("/Beat"):
        request.source = "f" * 16
    return request


def right_token(row: MethodRow) -> bytes:
    return LAUNCH_TOKEN if row.proof is Proof.LAUNCH else TOKENS["job"]


PROOFS = ("none", "wrong", "other job's", "other job's, named", "other kind", "right")


def metadata_of(node: Node, proof: str, row: MethodRow | None, method: str, request: Any) -> Metadata:
    right = right_token(row) if row is not None else TOKENS["job"]
    if proof == "none":
        return rpc.PROTOCOL_METADATA
    kinds = {
        "wrong": b"w" * 32, "other job's": TOKENS["other"], "other job's, named": TOKENS["other"], "right": right,
        "other kind": TOKENS["job"] if right == LAUNCH_TOKEN else LAUNCH_TOKEN,
    }  # fmt: skip
    # "named": the metadata tell the truth, the request is about another job
    job = "other" if proof == "other job's, named" else "job"
    ident, challenge = node.job.manifest.nodes[0].id, node.caller.challenge
    call, data = prove_call(kinds[proof], ident, f"/{method}", job, challenge, request)
    assert data == request.SerializeToString()
    return (*call.metadata(), *rpc.PROTOCOL_METADATA)


def check_remote(node: Node, method: str, proof: str) -> None:
    row = row_of(method, Door.REMOTE)
    request = request_about(method, "job")
    code = node.answer(node.remote, method, request, metadata_of(node, proof, row, method, request))
    if row is None:
        assert code is Code.UNIMPLEMENTED
    elif row.proof is Proof.NONE:
        assert code is Code.OK
    elif proof == "right":
        assert code not in REFUSED
    elif proof == "other job's, named":
        # without agents, the token of a job's beats is that of its manifest
        assert code is Code.PERMISSION_DENIED
    else:
        assert code is Code.UNAUTHENTICATED


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("method", METHODS)
def test_each_call_over_tcp(plain, method, proof):
    check_remote(plain, method, proof)


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("method", METHODS)
def test_each_call_over_tls(encrypted, method, proof):
    check_remote(encrypted, method, proof)


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("method", METHODS)
def test_each_call_at_the_unix_socket(plain, method, proof):
    """The socket itself is the proof."""
    row = row_of(method, Door.LOCAL)
    assert row is not None
    request = request_about(method, "job")
    if method.endswith("/Hello"):
        request.protocol = 1  # refused, so that the idle time is not restarted
    if method.endswith("/Purge"):
        request.memory_only = True
    metadata = metadata_of(plain, proof, row, method, request)
    assert plain.answer(plain.local, method, request, metadata) not in REFUSED


def test_over_tcp_hello_says_no_more_than_protocol_and_node(plain):
    stub = plain.remote.unary_unary("/reft.v1.Daemon/Hello", response_deserializer=pb.HelloReply.FromString)
    reply = stub(pb.HelloRequest(job="job", agent_pid=1).SerializeToString(), timeout=20)
    assert {each.name for each, _ in reply.ListFields()} == {"protocol", "oldest", "node_id"}
    assert 1 not in plain.daemon.call("Status", pb.StatusRequest()).agents


def test_nobody_goes_back_over_tcp_but_by_the_word_of_a_person(plain):
    """What an attach decides is served at the unix socket alone."""
    request = pb.DecideRequest(manifest=plain.job.manifest, decision=plain.job.decision())
    with pytest.raises(grpc.RpcError, match="may only go back"):
        plain.caller.call("GoBack", request, pb_grpc.PeerStub)


def test_large_messages_without_a_proof_take_no_memory(plain):
    """Measured before: 32 x 10 MB made 33 MiB of resident memory 511 MiB."""
    process, data = psutil.Process(plain.daemon.process.pid), b"\n" * (10 * MIB)
    for method in ("reft.v1.Peer/Keep", "reft.v1.Daemon/Hello", "reft.v1.Daemon/Decide", HEALTH):
        before = process.memory_info().rss
        call = plain.remote.unary_unary(f"/{method}")
        calls = [call.future(data, timeout=60, metadata=rpc.PROTOCOL_METADATA) for _ in range(32)]
        codes = {each.code() for each in calls}
        assert codes in ({Code.UNAUTHENTICATED}, {Code.UNIMPLEMENTED}, {Code.OK}), codes
        assert process.memory_info().rss - before < 50 * MIB, method


def test_calls_without_a_proof_are_never_half_open(plain):
    """Their requests never come, and each call ends at once: their number counts for nobody."""
    over, calls = threading.Event(), []
    for method, count in (
        ("reft.v1.Peer/Keep", 5),
        ("reft.v1.Daemon/Hello", 80),
        ("reft.v1.Daemon/Lease", 5),
        (HEALTH, 5),
    ):
        call = plain.remote.stream_unary(f"/{method}")
        calls += [call.future(silence(over), timeout=60, metadata=rpc.PROTOCOL_METADATA) for _ in range(count)]
    assert plain.caller.call("Status", pb.StatusRequest(job="job")).jobs
    assert {each.code() for each in calls} == {Code.UNAUTHENTICATED, Code.OK, Code.UNIMPLEMENTED}
    over.set()


def silence(over: threading.Event) -> Iterator[bytes]:
    """Yields nothing, and keeps the caller's side of a call open."""
    over.wait()
    yield from ()


def test_calls_over_tcp_are_not_passed_on(start):
    job = Job([(start("--listen", "127.0.0.1:0"), [rank]) for rank in range(2)]).decide()
    for method, request in (("PersistJob", pb.PersistJobRequest(job="job")), ("Hold", pb.HoldRequest(job="job"))):
        with refused(Code.PERMISSION_DENIED, "not passed on"):
            tcp_call(job.hellos[1].addresses[0], method, request, job.manifest.token)


def test_who_calls_without_a_proof_is_named_in_the_log(plain):
    request = pb.StatusRequest(job="job")
    for _ in range(UNCOUNTED + 1):
        assert (
            plain.answer(plain.remote, "reft.v1.Daemon/Status", request, rpc.PROTOCOL_METADATA) is Code.UNAUTHENTICATED
        )
    line = re.compile(r'because their calls had no valid proof.* by=".*127\.0\.0\.1 \(')
    until(lambda: line.search(plain.daemon.log.read_text()), what="the line")


# The page, and what listens


def test_the_page_shows_the_rows():
    shown = re.findall(r"^\| `([\w.]+/\w+)` \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    assert [(method, *cells) for method, *cells in shown] == [
        (method, cell(row_of(method, Door.LOCAL)), cell(row_of(method, Door.REMOTE))) for method in METHODS
    ]


def cell(row: MethodRow | None) -> str:
    """Returns how the page shows a row."""
    if row is None:
        return "no"
    if row.proof is Proof.NONE:
        return "without a proof, unread"
    proof = "yes" if row.proof is Proof.SOCKET else row.proof.name.lower()
    size = f"{row.request_max >> 20} MiB" if row.request_max >= MIB else f"{row.request_max >> 10} KiB"
    without = f", without {' '.join(row.unset)}" if row.unset else ""
    return f"{proof}, {size}, {row.read_s:g} s{without}"


@pytest.mark.parametrize(
    "words",
    [
        "against root, against physical access",
        "Without TLS everybody who can listen on the network reads the state",
        "Nobody can be kept from filling a network link",
        "the job's token by gloo, in plain text",
        "That store has no proof at all",
    ],
)
def test_the_page_says_what_is_not_protected(words):
    assert words in " ".join(PAGE.read_text().split())


def listeners(daemon: DaemonProcess) -> set[str]:
    """Returns a name for each socket at which the daemon or a child of it listens."""
    names = set()
    process = psutil.Process(daemon.process.pid)
    for each in (process, *process.children(recursive=True)):
        inodes = {link.readlink().name for link in Path(f"/proc/{each.pid}/fd").iterdir() if link.is_symlink()}
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, _, _, inode, *path = line.split()
            if int(flags, 16) & 0x10000 and f"socket:[{inode}]" in inodes:
                names.add(path[0].removeprefix(str(daemon.socket.parent)) if path else "unnamed")
        for connection in each.net_connections("inet"):
            if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                names.add(f"{connection.type.name} of {'the daemon' if each.pid == process.pid else each.name()}")
    return names


def test_what_listens_stands_on_the_page(plain):
    assert listeners(plain.daemon) == {"/d.sock", "/d.sock.in", "/d.sock.ln", "SOCK_STREAM of the daemon"}
    assert re.findall(r"^\| `(--\w+|PATH[.\w]*)` \|", PAGE.read_text(), re.MULTILINE) == [
        "PATH", "--listen", "PATH.in", "PATH.ln", "--bulk",
    ]  # fmt: skip
