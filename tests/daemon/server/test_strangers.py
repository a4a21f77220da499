"""Attacks real daemons over TCP: strangers' jobs and tokens, captured calls, rogue servers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import grpc
import pytest

from reft.cli.demo.cluster import free_port
from reft.wire import messages, rpc
from reft.wire.proof import CERTIFIED
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemons import DaemonProcess
from tests.support.jobs import CHUNK, Code, Job, Trainer, layout_of, refused, tcp_call
from tests.support.manifests import described
from tests.support.proving import ProvingCaller, ProvingServer, rogue

LISTEN = ("--listen", "127.0.0.1:0")
STRANGERS_TOKEN = b"s" * 32


@pytest.fixture
def victim() -> Iterator[Trainer]:
    trainer = Trainer()
    try:
        yield trainer
        assert trainer.process.poll() is None, "the victim lives"
    finally:
        trainer.kill()


def address_of(daemon) -> str:
    (address,) = daemon.call("Hello", messages.hello()).addresses
    return address


def test_a_stranger_makes_no_job_and_kills_nobody(start, victim):
    """A job, a keeper and a token of his own: with them he once had any process killed."""
    daemon = start(*LISTEN)
    address = address_of(daemon)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        keeper = pb.Node(name="keeper", id="k", addresses=[f"127.0.0.1:{listener.getsockname()[1]}"], ranks=[1])
        rebuild = rebuild_at(daemon, keeper)
        fence = pb.InventoryRequest(job="his", launch="mine", end_orphans=True)
        lease = pb.LeaseRequest(job="his", epoch=rebuild.decision.epoch)
        errors = {}
        for token in (None, bytes(32), STRANGERS_TOKEN, CERTIFIED):
            for method, request in (("Rebuild", rebuild), ("Inventory", fence), ("Lease", lease)):
                with pytest.raises(grpc.RpcError) as error:
                    tcp_call(address, method, request, token)
                errors[method, token] = error.value
        with pytest.raises(BlockingIOError):  # the keeper is asked before a rebuild can fail
            listener.accept()
    for (method, token), error in errors.items():
        assert error.code() is (Code.UNIMPLEMENTED if method == "Lease" else Code.UNAUTHENTICATED)
        remedy = f"run reft-cli recover {'his' if token else 'JOB'} on this node"
        assert (remedy in error.details()) is (method == "Rebuild")
    status = daemon.call("Status", pb.StatusRequest())
    assert not status.jobs and not status.held_bytes


def rebuild_at(daemon: DaemonProcess, keeper: pb.Node) -> pb.RebuildRequest:
    """Returns a request for which the daemon asks the keeper for a capsule."""
    here = pb.Node(name="here", id=daemon.call("Hello", messages.hello()).node_id, ranks=[0])
    leaves = layout_of(4096).leaves
    manifest = pb.Manifest(
        job="his", token=STRANGERS_TOKEN, world=2, nodes=[here, keeper], launch="his", chunk_bytes=CHUNK, protect="auto",
        tolerate=1, **described(leaves, leaves),
    )  # fmt: skip
    epoch = pb.Epoch(counter=1, ident=bytes(16))
    return pb.RebuildRequest(
        manifest=manifest, decision=pb.Decision(epoch=epoch), version=pb.Version(epoch=epoch, step=1),
        nodes=[keeper], slots=[pb.SlotSource(rank=1, node=0, slot="rank-1.slot-0")], lost=[pb.LostRank(rank=0, keeper=0)],
    )  # fmt: skip


def test_the_token_of_one_job_does_nothing_to_another(start, victim):
    daemon = start(*LISTEN)
    job = Job([(daemon, [0])], token=b"a" * 32).decide()
    his = Job([(daemon, [0])], name="his", token=STRANGERS_TOKEN).decide()
    job.lease(0, victim)
    address = address_of(daemon)
    fence = pb.InventoryRequest(job="job", launch="launch", end_orphans=True)
    with refused(Code.UNAUTHENTICATED):
        tcp_call(address, "Inventory", fence, STRANGERS_TOKEN)
    with refused(Code.PERMISSION_DENIED, "the request is about job 'job'"):
        tcp_call(address, "Inventory", fence, STRANGERS_TOKEN, job="his")
    with refused(Code.UNAUTHENTICATED):
        tcp_call(address, "Keep", pb.KeepRequest(job="job", epoch=job.epoch), STRANGERS_TOKEN, pb_grpc.PeerStub)
    assert tcp_call(address, "Inventory", pb.InventoryRequest(job="his"), STRANGERS_TOKEN).manifest == his.manifest
    assert daemon.status("job").ranks[0].alive


def test_the_token_of_one_job_takes_no_memory_from_another(start):
    """Memory is asked for at the unix socket alone. There it once cost an ended job its slots."""
    daemon = start(*LISTEN, "--memory", "5MiB")
    ended = Job([(daemon, [0])], name="ended")
    ended.manifest.named = False
    ended.decide().lease(0)
    ended.close()
    his = Job([(daemon, [0])], name="his", token=STRANGERS_TOKEN).decide()
    for token in (STRANGERS_TOKEN, ended.manifest.token):
        with refused(Code.UNIMPLEMENTED):
            tcp_call(address_of(daemon), "Lease", his.lease_request(0, slots=3), token)
    assert len(ended.headers()) == 2
    assert his.lease(0, slots=3) and "ended" not in {
        each.job for each in daemon.call("Status", pb.StatusRequest()).jobs
    }, "at the unix socket it is the same user, whose job has ended"


def replay(channel: grpc.Channel, method: str, data: bytes, metadata: object) -> object:
    return channel.unary_unary(method)(data, timeout=10, metadata=metadata)


def test_a_captured_call_is_worth_nothing(start):
    daemon, other = start(*LISTEN), start(*LISTEN)
    token = b"a" * 32
    job = Job([(daemon, [0]), (other, [1])], token=token).decide()
    address = address_of(daemon)
    with grpc.insecure_channel(address, options=rpc.OPTIONS) as channel:
        caller = ProvingCaller(channel, token)
        caller.call("Inventory", pb.InventoryRequest(job="job"))
        captured = caller.calls[-1]
        assert token not in captured[1] and all(
            token not in value for _, value in captured[2] if isinstance(value, bytes)
        )
        with refused(Code.UNAUTHENTICATED, "made before"):
            replay(channel, *captured)
        with refused(Code.UNAUTHENTICATED):
            replay(channel, "/reft.v1.Daemon/Status", *captured[1:])
    with grpc.insecure_channel(address_of(other), options=rpc.OPTIONS) as channel, refused(Code.UNAUTHENTICATED):
        replay(channel, *captured)
    daemon.flags = ("--listen", address)
    daemon.kill()
    daemon.start()
    with grpc.insecure_channel(address, options=rpc.OPTIONS) as channel:
        with refused(Code.UNAUTHENTICATED):
            replay(channel, *captured)
        assert ProvingCaller(channel, token).call("Inventory", pb.InventoryRequest(job="job")).manifest == job.manifest


def test_a_proof_is_of_one_request(start):
    """Somebody between two daemons keeps the proof, and passes on another request."""
    daemon = start(*LISTEN)
    token = b"a" * 32
    Job([(daemon, [0])], token=token).decide()
    with grpc.insecure_channel(address_of(daemon), options=rpc.OPTIONS) as channel:
        caller = ProvingCaller(channel, token)
        caller.call("Inventory", pb.InventoryRequest(job="job"))

        def pass_on_another(call, reply_type):
            fence = pb.InventoryRequest(job="job", end_orphans=True).SerializeToString()
            return replay(channel, call.method, fence, caller.calls[-1][2])

        caller._ask = pass_on_another
        with refused(Code.UNAUTHENTICATED, "not the one"):
            caller.call("Inventory", pb.InventoryRequest(job="job"))


@pytest.mark.parametrize("status", [Code.OK, Code.NOT_FOUND, Code.DATA_LOSS], ids=lambda status: status.name)
def test_a_rogue_on_a_dead_daemons_port_is_silent(start, status):
    token = b"a" * 32
    daemons = [start(*LISTEN) for _ in range(3)]
    job = Job([(daemon, [rank]) for rank, daemon in enumerate(daemons)], token=token).decide()
    daemons[1].kill()
    address = job.hellos[1].addresses[0]
    rival = pb.InventoryReply(manifest=job.manifest, node="n1", node_id=job.hellos[1].node_id, had_whole=True)
    server = ProvingServer(job.hellos[1].node_id, None, status, rival)
    with rogue(server, address):
        survey = pb.SurveyRequest(job="job", nodes=job.manifest.nodes[1:], launch="launch")
        silent, answered = daemons[0].call("Survey", survey, timeout=30).nodes
        assert not silent.HasField("reply") and "its answer has no proof" in silent.trouble
        assert answered.reply.node_id == job.hellos[2].node_id and answered.reply.manifest == pb.Manifest()
        with refused(Code.FAILED_PRECONDITION, "can't be reached"):
            daemons[0].call("FetchCapsule", pb.CapsuleRequest(job="job", rank=1, node=job.manifest.nodes[1]))
        (status_here,) = daemons[0].call("Status", pb.StatusRequest(job="job", deep=True)).jobs
        assert "n1" in status_here.silent_nodes
    received = repr(server.received)
    assert server.received and repr(token)[2:-1] not in received and token.hex() not in received
    log = daemons[0].log.read_text()
    assert log.count("counts as silent") <= 2, "once for each kind of channel"
    assert repr(token)[2:-1] not in log and token.hex() not in log


def test_names_of_strangers_forge_no_line_of_the_log(start):
    daemon = start(*LISTEN)
    Job([(daemon, [0])]).decide()
    address, forged = f"127.0.0.1:{free_port()}", "n\n2026-01-01 ERROR reft forged\r\x1b[2J\u202e"
    with rogue(ProvingServer("id", None, Code.NOT_FOUND), address):
        node = pb.Node(name=forged, id="id", addresses=[address])
        (silent,) = daemon.call("Survey", pb.SurveyRequest(job="job", nodes=[node])).nodes
    assert not silent.HasField("reply")
    log = daemon.log.read_text()
    (line,) = [each for each in log.splitlines() if "counts as silent" in each]
    assert r"node=n\n2026-01-01 ERROR reft forged\r\x1b[2J\u202e at" in line
    assert not any(each.startswith("2026-01-01") for each in log.splitlines()) and "\x1b" not in log
