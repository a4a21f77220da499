"""Tests how one method at one door reads a request: its size, its deadline, its limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import grpc
import pytest

from reft.errors import NoRoom, ReftError
from reft.wire import rpc
from reft.wire.certificate_role import Role
from reft.wire.proof import CERTIFIED, Challenges, UnprovedCall, prove_call
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.child.refusals import RefusalCounts
from reft_daemon.server import grpc_server
from reft_daemon.server.callers import Caller, Callers, Door
from reft_daemon.server.doors import ROWS, MethodRow, Proof
from reft_daemon.server.judge import (
    BYTES_MAX,
    AdmittedCall,
    ByteLimit,
    CallRefused,
    Judge,
    MethodHandler,
    descriptor_of,
    is_fellow_daemon,
    status_of,
)
from tests.support.flooder import HTTP2
from tests.support.jobs import Code

METHOD = "reft.v1.Peer/Beat"
ROW = MethodRow(METHOD, Door.LOCAL, Proof.SOCKET, 100, 10.0, 2)
TOKEN, LAUNCH_TOKEN = b"j" * 32, b"l" * 32
OLD_TOKEN, KEYED_TOKEN = b"o" * 32, b"k" * 32
NAMES = {"id-0": "n0", "id-1": "n1"}


def registry() -> SimpleNamespace:
    """Returns what a judge asks of a registry; job "job" is held, "job" and "new" are watched."""
    record = pb.JobRecord(manifest=pb.Manifest(job="job", token=TOKEN), accepted_tokens=[OLD_TOKEN])
    monitors = SimpleNamespace(
        tokens=lambda job: [LAUNCH_TOKEN] if job in ("job", "new") else [],
        tokens_of_agent=lambda job: [LAUNCH_TOKEN, KEYED_TOKEN] if job in ("job", "new") else [],
        node_name=lambda _, node: NAMES.get(node, ""),
    )
    return SimpleNamespace(
        jobs={"job": SimpleNamespace(record=record)},
        heartbeat_service=SimpleNamespace(monitors=monitors),
        arena=SimpleNamespace(node_id="id-0"),
    )


async def echo(request: pb.BeatRequest, _: AdmittedCall) -> pb.BeatReply:
    return pb.BeatReply(reports=request.reports)


class OneCaller(Callers):
    """Says that all connections of a door are one caller's."""

    def __init__(self, door: Door, role: Role | None = None) -> None:
        super().__init__(RefusalCounts())
        self.caller, self.proved = Caller(door, role=role), []

    def of(self, peer: str) -> Caller:
        return self.caller

    def note_proved(self, name: str) -> None:
        self.proved.append(name)


@asynccontextmanager
async def serving(
    tmp_path, row: MethodRow, method: Callable[..., object] = echo
) -> AsyncIterator[grpc.aio.StreamUnaryMultiCallable]:
    """Yields the method on the client's side, as a stream of raw requests."""
    handler = MethodHandler(Judge(Door.LOCAL, registry(), OneCaller(Door.LOCAL)), row, descriptor_of(METHOD), method)
    server = grpc_server.server(Door.LOCAL)
    service, name = METHOD.split("/")
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler.for_grpc()})])
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address, options=rpc.OPTIONS) as channel:
        yield channel.stream_unary(f"/{METHOD}")
    await server.stop(None)


@contextmanager
def ends_with(code: grpc.StatusCode, text: str):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        yield
    assert error.value.code() is code and text in error.value.details(), error.value


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what gRPC has logged about the calls."""
    return [each.getMessage() for each in caplog.records if each.name.startswith("grpc")]


async def requests(*messages: bytes, then: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    """Yields messages. With `then`, the client's side stays open until it is set."""
    for message in messages:
        yield message
    if then is not None:
        await then.wait()


def beat(nbytes: int = 0) -> bytes:
    return pb.BeatRequest(job="j" * nbytes).SerializeToString()


async def test_a_request_of_the_largest_size_is_answered(tmp_path):
    async with serving(tmp_path, ROW) as call:
        assert len(beat(98)) == 100
        assert await call(requests(beat(98))) == b""
        with ends_with(Code.RESOURCE_EXHAUSTED, "the request has 101 bytes; the limit of reft.v1.Peer/Beat is 100"):
            await call(requests(beat(99)))


@pytest.mark.parametrize(
    ("messages", "text"),
    [((), "no request"), ((b"", b""), "more than one"), ((b"\xff",), "can't be read")],
)
async def test_a_call_has_one_request_that_can_be_read(tmp_path, messages, text, caplog):
    async with serving(tmp_path, ROW) as call:
        with ends_with(Code.INVALID_ARGUMENT, text):
            await call(requests(*messages))
    assert complaints(caplog) == []


@pytest.mark.parametrize("messages", [(), (b"",)])
async def test_a_half_open_call_ends_at_its_deadline(tmp_path, messages, caplog):
    """A caller that sends nothing, or that does not end its side of the stream."""
    async with serving(tmp_path, replace(ROW, read_s=0.05, calls_max=1)) as call:
        never = asyncio.Event()
        with ends_with(Code.DEADLINE_EXCEEDED, "no request arrived within 0.05 s"):
            await call(requests(*messages, then=never))
        assert await call(requests(b"")) == b""  # the place is free again
    assert complaints(caplog) == []


async def test_a_caller_that_goes_away_leaves_no_call_behind(tmp_path, caplog):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(request: pb.BeatRequest, call: AdmittedCall) -> pb.BeatReply:
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return await echo(request, call)

    async with serving(tmp_path, replace(ROW, calls_max=1), slow) as call:
        gone = call(requests(b""))
        await begun.wait()
        with ends_with(Code.RESOURCE_EXHAUSTED, "1 calls of reft.v1.Peer/Beat are under way"):
            await call(requests(b""))
        gone.cancel()
        await ended.wait()
        assert await call(requests(b"")) == b""
    assert complaints(caplog) == []


async def test_large_requests_are_worked_on_in_turn_and_a_slow_one_delays_none(tmp_path):
    """A caller that does not end its side of the stream holds no room."""
    under_way, begun, may_end, never = [], asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(request: pb.BeatRequest, _: AdmittedCall) -> pb.BeatReply:
        under_way.append(request)
        begun.set()
        await may_end.wait()
        return pb.BeatReply()

    large = beat(BYTES_MAX // 2)
    async with serving(tmp_path, replace(ROW, request_max=BYTES_MAX, read_s=1000.0, calls_max=9), slow) as call:
        half_open = call(requests(large, then=never))
        first = call(requests(large))
        await begun.wait()
        others = [asyncio.ensure_future(answer_of(call(requests(large)))) for _ in range(2)]
        done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        assert [each.result() for each in done] == [Code.RESOURCE_EXHAUSTED] and len(under_way) == 1
        may_end.set()
        assert [await answer_of(first), *(await asyncio.gather(*waiting))] == [Code.OK, Code.OK]
        half_open.cancel()


async def answer_of(call: grpc.aio.StreamUnaryCall) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


async def test_a_connection_has_so_many_calls_at_a_time(tmp_path):
    """Further ones wait at the caller, and cost this side nothing."""
    begun, most, all_begun = 0, 128, asyncio.Event()

    async def slow(*_: object) -> None:
        nonlocal begun
        begun += 1
        if begun == most:
            all_begun.set()
        await asyncio.Event().wait()

    async with serving(tmp_path, replace(ROW, calls_max=1 << 20), slow) as call:
        calls = [call(requests(b"")) for _ in range(most)]
        await all_begun.wait()
        with ends_with(Code.DEADLINE_EXCEEDED, ""):
            await call(requests(b"\xff"), timeout=0.5)  # would be refused at once
        for each in calls:
            each.cancel()


async def test_a_caller_that_pings_all_the_time_is_sent_away():
    server = grpc_server.server(Door.REMOTE)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HTTP2 + (b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)) * 20)
    with contextlib.suppress(ConnectionResetError):  # the server does not read all of them
        assert b"too_many_pings" in await reader.read()
    writer.close()
    await server.stop(None)


async def test_a_compressed_request_is_refused(tmp_path):
    """A small one could fill the memory once it is decompressed."""
    async with serving(tmp_path, ROW) as call:
        with ends_with(Code.UNIMPLEMENTED, "gzip"):
            await call(requests(beat(98)), compression=grpc.Compression.Gzip)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CallRefused(Code.NOT_FOUND, "why"), Code.NOT_FOUND),
        (NoRoom("why"), Code.RESOURCE_EXHAUSTED),
        (OSError("why"), Code.INTERNAL),
    ],
)
async def test_errors_become_statuses(tmp_path, error, code, caplog):
    async def fails(*_: object) -> None:
        raise error

    async with serving(tmp_path, ROW, fails) as call:
        with ends_with(code, "why"):
            await call(requests(b""))
    assert complaints(caplog) == []


async def test_replies_and_refusals_say_the_protocol(tmp_path):
    async with serving(tmp_path, ROW) as call:
        for messages in ((b"",), (b"\xff",)):
            made = call(requests(*messages))
            assert set(rpc.PROTOCOL_METADATA) <= set(await made.trailing_metadata())


# What is judged without a server


class FakeContext:
    def __init__(self, peer: str = "", *metadata: tuple[str, str | bytes]) -> None:
        self._peer, self._metadata = peer, (*rpc.PROTOCOL_METADATA, *metadata)

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata


def admit(proof: Proof, job: str, token: bytes, role: Role | None = None, own: Role | None = None) -> str:
    """Returns the job whose token was proved. Only then the connection counts as proved."""
    row, challenges = replace(ROW, door=Door.REMOTE, proof=proof), Challenges("id-0")
    callers = OneCaller(Door.REMOTE, role)
    call, _ = prove_call(token, "id-0", f"/{METHOD}", job, challenges.present, pb.BeatRequest(job=job))
    judge = Judge(Door.REMOTE, registry(), callers, challenges, own)
    try:
        proved = judge.admit(row, FakeContext("peer", *call.metadata()))[1]
    except ReftError:
        assert not callers.proved
        raise
    assert callers.proved == (["peer"] if proved else [])
    return proved.job if proved is not None else ""


@pytest.mark.parametrize(
    ("proof", "job", "token", "is_admitted"),
    [
        (Proof.JOB, "job", TOKEN, True),
        (Proof.JOB, "job", LAUNCH_TOKEN, False),
        (Proof.JOB, "new", TOKEN, False),
        (Proof.JOB, "", TOKEN, False),
        (Proof.JOB, "", b"", False),
        (Proof.LAUNCH, "job", LAUNCH_TOKEN, True),
        (Proof.LAUNCH, "job", TOKEN, False),
        (Proof.LAUNCH, "new", LAUNCH_TOKEN, True),
        (Proof.LAUNCH, "none", b"", False),
        (Proof.REBUILD, "job", TOKEN, True),
        (Proof.REBUILD, "job", LAUNCH_TOKEN, False),
        (Proof.REBUILD, "new", LAUNCH_TOKEN, True),
        (Proof.REBUILD, "job", KEYED_TOKEN, False),
        (Proof.LAUNCH, "new", KEYED_TOKEN, False),
        (Proof.REBUILD, "new", TOKEN, False),
        (Proof.REBUILD, "new", KEYED_TOKEN, True),
        (Proof.REBUILD, "job", OLD_TOKEN, False),
        (Proof.EPOCH, "job", OLD_TOKEN, False),
        (Proof.EPOCH, "job", TOKEN, True),
        (Proof.EPOCH, "new", TOKEN, False),
        (Proof.EPOCH, "new", LAUNCH_TOKEN, False),
        (Proof.JOB, "job", OLD_TOKEN, True),
        (Proof.LAUNCH, "job", OLD_TOKEN, False),
        (Proof.REBUILD, "none", TOKEN, False),
        (Proof.REBUILD, "none", b"", False),
    ],
)
def test_which_token_admits(proof, job, token, is_admitted):
    if is_admitted:
        assert admit(proof, job, token) == job
        return
    with pytest.raises(UnprovedCall, match="this call needs") as error:
        admit(proof, job, token)
    assert status_of(error.value)[0] is Code.UNAUTHENTICATED
    assert ("reft-cli recover" in str(error.value)) == (proof is Proof.REBUILD)


@pytest.mark.parametrize("proof", [Proof.JOB, Proof.LAUNCH, Proof.REBUILD])
def test_agents_and_persons_make_only_the_calls_of_agents(proof):
    """They have the right proof, and a certificate of the right user."""
    for role in (Role("me", agent="n1"), Role("me")):
        with pytest.raises(CallRefused, match=f"of the {role}; {METHOD} takes that of a daemon") as error:
            admit(proof, "job", TOKEN, role)
        assert error.value.status is Code.PERMISSION_DENIED


def test_only_heartbeats_come_from_agents():
    assert [row.method for row in ROWS if row.from_agents] == ["reft.v1.Daemon/AgentBeat"]


def test_a_call_without_a_proof_is_admitted_nowhere():
    for proof in (Proof.JOB, Proof.LAUNCH, Proof.REBUILD):
        row = replace(ROW, door=Door.REMOTE, proof=proof)
        with pytest.raises(UnprovedCall):
            Judge(Door.REMOTE, registry(), OneCaller(Door.REMOTE), Challenges("id-0")).admit(
                row, FakeContext("", ("reft-job", "job"))
            )
        with pytest.raises(CallRefused):  # a door at which nothing can be proved
            Judge(Door.REMOTE, registry(), OneCaller(Door.REMOTE)).admit(row, FakeContext("", ("reft-job", "job")))
    assert admit(Proof.NONE, "job", TOKEN) == admit(Proof.SOCKET, "job", TOKEN) == ""


@pytest.mark.parametrize(
    ("role", "own", "is_fellow"),
    [
        (Role("u", "n2"), Role("u", "n1"), True),
        (Role("u"), Role("u", "n1"), False),  # a person or an agent
        (Role("other", "n2"), Role("u", "n1"), False),
        (None, Role("u", "n1"), False),
        (Role("u", "n2"), None, False),
        (None, None, False),
    ],
)
def test_a_certificate_stands_for_a_job_that_is_not_held(role, own, is_fellow):
    """It must be of another daemon of the same user; for a job that is held it counts nothing."""
    assert is_fellow_daemon(role, own) is is_fellow
    if is_fellow:
        assert admit(Proof.REBUILD, "none", CERTIFIED, role, own) == "none"
    else:
        with pytest.raises(ReftError):
            admit(Proof.REBUILD, "none", CERTIFIED, role, own)
    for proof, job in ((Proof.REBUILD, "job"), (Proof.JOB, "job"), (Proof.JOB, "none"), (Proof.LAUNCH, "new")):
        with pytest.raises(ReftError):
            admit(proof, job, CERTIFIED, role, own)


def test_a_connection_that_nobody_accepted_is_refused():
    callers = Callers(RefusalCounts())
    callers.add("unix:known", Caller(Door.LOCAL, pid=7))
    callers.add("unix:other-door", Caller(Door.REMOTE))
    judge = Judge(Door.LOCAL, registry(), callers)
    assert judge.admit(ROW, FakeContext("unix:known")) == (Caller(Door.LOCAL, pid=7), None)
    for peer in ("unix:stranger", "unix:other-door"):
        with pytest.raises(CallRefused, match="does not know the connection") as error:
            judge.admit(ROW, FakeContext(peer))
        assert error.value.status is Code.UNAUTHENTICATED


REMOTE = replace(
    ROW, door=Door.REMOTE, proof=Proof.LAUNCH, unset=("round",), speaker="source", lists=MappingProxyType({"reports": 1})
)  # fmt: skip
FAR = Caller(Door.REMOTE)


def check(request: pb.BeatRequest, caller: Caller = FAR, row: MethodRow = REMOTE) -> None:
    call, _ = prove_call(TOKEN, "id-0", f"/{METHOD}", "job", b"", request)
    judge = Judge(Door.REMOTE, registry(), OneCaller(Door.REMOTE))
    judge.check(row, request, caller, None if row.proof is Proof.SOCKET else call)


def test_a_request_is_about_the_job_of_the_proof():
    check(pb.BeatRequest(job="job", source="id-1"))
    for request in (pb.BeatRequest(job="other", source="id-1"), pb.BeatRequest(source="id-1")):
        with pytest.raises(CallRefused, match="the proof about job job") as error:
            check(request)
        assert error.value.status is Code.PERMISSION_DENIED
    decide = replace(REMOTE, proof=Proof.JOB, unset=(), speaker="", lists=MappingProxyType({"manifest.nodes": 1}))
    check(pb.DecideRequest(manifest=pb.Manifest(job="job")), row=decide)
    with pytest.raises(CallRefused, match="the proof about job job"):
        check(pb.DecideRequest(manifest=pb.Manifest(job="other")), row=decide)
    with pytest.raises(CallRefused, match=r"2 entries in manifest\.nodes; the limit is 1"):
        check(pb.DecideRequest(manifest=pb.Manifest(job="job", nodes=[pb.Node(), pb.Node()])), row=decide)


def test_over_tcp_only_host_and_port_are_an_address():
    decide = replace(REMOTE, proof=Proof.JOB, unset=(), speaker="", lists=MappingProxyType({}))
    here, far = pb.Node(addresses=["h:1", "unix:/tmp/s"]), pb.Node(addresses=["h:1", "h:2"])
    check(pb.RebuildRequest(manifest=pb.Manifest(job="job", nodes=[far]), nodes=[far]), row=decide)
    for field in ("manifest", "base_manifest", "guard_manifest"):
        request = pb.RebuildRequest(manifest=pb.Manifest(job="job"))
        getattr(request, field).nodes.append(here)
        with pytest.raises(CallRefused, match="the address unix:/tmp/s came over TCP") as error:
            check(request, row=decide)
        assert error.value.status is Code.INVALID_ARGUMENT
    with pytest.raises(CallRefused, match="came over TCP"):
        check(pb.RebuildRequest(manifest=pb.Manifest(job="job"), nodes=[far, here]), row=decide)
    check(pb.DecideRequest(manifest=pb.Manifest(job="job", nodes=[here])), Caller(Door.LOCAL), ROW)


def test_what_only_local_callers_may_ask():
    with pytest.raises(CallRefused, match="may set round") as error:
        check(pb.BeatRequest(job="job", source="id-1", round=1))
    assert error.value.status is Code.PERMISSION_DENIED
    with pytest.raises(CallRefused, match="2 entries in reports; the limit is 1") as error:
        check(pb.BeatRequest(job="job", source="id-1", reports=[pb.NodeReport()] * 2))
    assert error.value.status is Code.INVALID_ARGUMENT
    check(pb.BeatRequest(job="any", source="id-0", round=1), Caller(Door.LOCAL), ROW)


@pytest.mark.parametrize(
    ("role", "source", "text"),
    [
        (None, "id-0", "may speak for this node"),
        (Role("me", "n1"), "id-0", "may speak for this node"),
        (Role("me", "n0"), "id-1", "of the daemon of user me on node n0, and the call speaks for node 'n1'"),
        (Role("me", agent="n0"), "id-1", "of the agent of user me on node n0, and the call speaks for node 'n1'"),
        (Role("me"), "id-1", "of the user me, and the call speaks for node 'n1'"),
        (Role("me", "n1"), "id-2", "speaks for node 'id-2'"),
        (Role("me"), "id-2", "speaks for node 'id-2'"),
        (Role("me", "n1"), "id-1", ""),
        (Role("me", agent="n1"), "id-1", ""),
        (None, "id-1", ""),
    ],
)
def test_in_whose_name_a_call_may_speak(role, source, text):
    request, caller = pb.BeatRequest(job="job", source=source), Caller(Door.REMOTE, role=role)
    if not text:
        check(request, caller)
        return
    with pytest.raises(CallRefused, match=text) as error:
        check(request, caller)
    assert error.value.status is Code.PERMISSION_DENIED


# Bytes


async def holding(limit: ByteLimit, nbytes: int, until: asyncio.Event, held: list[int]) -> None:
    async with limit.reserved(nbytes):
        held.append(nbytes)
        await until.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_wait_for_bytes_in_their_order():
    limit, held, ends = ByteLimit(10), [], [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.ensure_future(holding(limit, *each, held)) for each in zip((6, 5, 4), ends, strict=False)]
    await settle()
    assert held == [6]  # the third would fit, but waits behind the second
    ends[0].set()
    await settle()
    assert held == [6, 5, 4]
    tasks.append(asyncio.ensure_future(holding(limit, 10, ends[3], held)))
    ends[1].set()
    await settle()
    assert held == [6, 5, 4]
    ends[2].set()
    await settle()
    assert held == [6, 5, 4, 10]
    ends[3].set()
    await asyncio.gather(*tasks)


async def test_so_many_bytes_may_wait_as_may_be_held():
    limit, held, end = ByteLimit(10), [], asyncio.Event()
    tasks = [asyncio.ensure_future(holding(limit, n, end, held)) for n in (10, 4, 6, 0, 1)]
    await settle()
    assert held == [10]
    with pytest.raises(CallRefused, match="wait already"):
        await tasks[4]
    end.set()
    await asyncio.gather(*tasks[:4])
    async with limit.reserved(10):
        assert held == [10, 4, 6, 0]


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_call_that_gives_up_waiting_loses_no_bytes(is_granted):
    limit, held, end = ByteLimit(10), [], asyncio.Event()
    first = asyncio.ensure_future(holding(limit, 10, end, held))
    await settle()
    waiting = [asyncio.ensure_future(holding(limit, n, end, held)) for n in (7, 3)]
    await settle()
    if is_granted:  # the bytes come in the same round of the loop in which the call ends
        first.cancel()
        await asyncio.sleep(0)
    waiting[0].cancel()
    await settle()
    first.cancel()
    await settle()
    assert held == [10, 3] and not waiting[1].done()
    end.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert limit._free == 10
