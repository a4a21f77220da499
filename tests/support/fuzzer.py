"""Sends a daemon bytes and messages that no program of reft sends, at a bounded rate.

    python -m tests.support.fuzzer SEED SECONDS < TARGET as JSON

It prints a line when it begins, and at the end one JSON object with what it did. It ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import ssl
import sys
import time
import zlib
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from reft.wire import local_socket, messages, proof, rpc
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.mover import range_protocol
from reft_daemon.server.callers import Door
from reft_daemon.server.doors import ROWS, MethodRow, Proof
from reft_daemon.server.judge import descriptor_of
from tests.support.flooder import CONNECTIONS_S, HALF_A_HANDSHAKE, HTTP2, NO_HANDSHAKE, TICK_S

CALLS_S: Final = 300  # each is made, proved and checked by one core, beside the daemon
AT_ONCE: Final = 32
CALL_S: Final = 2.0
ENTRIES_MAX: Final = 3000
# What no job, node, slot or address may be called. No name here is that of a job that is held.
NAMES: Final = (
    "", ".", "..", "../../etc", "a/b", "a" * 65, "a\0b", "a\nb", "jоb", "-rf", "\x1b[31m", "none", "/etc/passwd",
    "127.0.0.1:1", "127.0.0.1:99999", "unix:/tmp", "[::1", ":", "rank-0.slot-0", "rank--1.slot-0", "x" * 5000,
)  # fmt: skip
# Methods that end what the test needs, or a process, as any caller at the unix socket may ask.
LEFT_OUT: Final = ("Daemon/Purge",)
FENCES: Final = ("end_orphans", "agent_pid")  # these fields name processes to end, or to wait for
INTEGERS: Final = (0, 1, 2, 77, 4095, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1)
HUGE: Final = (*INTEGERS, 1 << 63, (1 << 64) - 1)
NEGATIVE: Final = (-1, -2, -(1 << 31))
DOUBLES: Final = (0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
BOMB: Final = zlib.compress(bytes(64 << 20))  # 64 KiB that become 64 MiB
UNPACKED: Final = ("packed_tables",)  # which the daemon may unpack to more than the test allows it
# The round comes first: what a report leaves behind is met by all later messages of the job. Beats
# come last: those after a beat of the last round are stale.
FIRST: Final = ("Peer/Gather", "Peer/Announce", "Peer/Keep")
LAST: Final = ("Daemon/AgentBeat", "Peer/Beat")
DEPTH_MAX: Final = 4  # of a field in a request whose limits are tried
# An HTTP/2 frame that opens a stream with a block of headers that can't be decoded.
BAD_HEADERS: Final = b"\x00\x00\x08\x01\x04\x00\x00\x00\x01" + b"\xff" * 8
LONG_FRAME: Final = b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"
GROUPS: Final = bytes([0xE3, 0x3E]) * 50_000  # groups in groups: deeper than any parser goes


@dataclass(frozen=True)
class Target:
    """A daemon, and a job on it that may come to harm.

    Attributes:
        unix: address of its unix socket.
        tcp: where other nodes call.
        local: path of its local socket.
        mover: port of its mover.
        node_id: of its arena.
        manifest: of the job, in hex; its token is the right one.
        launch_token: of the job's agents, in hex.
        certificates: files of the fuzzer's certificate, key and authorities; empty: without TLS.
    """

    unix: str
    tcp: str
    local: str
    mover: int
    node_id: str
    manifest: str
    launch_token: str
    certificates: tuple[str, ...] = ()

    def tls(self) -> Tls | None:
        return Tls(*map(Path, self.certificates)) if self.certificates else None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Mutator:
    """Makes messages that differ from real ones in a few places.

    Args:
        rng: what it draws from.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def mutate(self, message: Message) -> None:
        """Changes one to three fields of a message."""
        for _ in range(self._rng.randint(1, 3)):
            self._mutate_once(message)

    def _mutate_once(self, message: Message) -> None:
        fields = [each for each in message.DESCRIPTOR.fields if each.name not in FENCES]
        if not fields:
            return
        field = self._rng.choice(fields)
        if field.is_repeated:
            self._mutate_list(getattr(message, field.name), field)
        elif field.message_type is None:
            setattr(message, field.name, self._value(field))
        elif self._rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            child = getattr(message, field.name)
            child.SetInParent()
            self._mutate_once(child)

    def _mutate_list(self, entries: Any, field: FieldDescriptor) -> None:
        choice = self._rng.random()
        if entries and choice < 0.2:
            del entries[self._rng.randrange(len(entries)) :]
        elif entries and choice < 0.4:
            entries.extend([entries[-1]] * self._rng.choice((1, 2, ENTRIES_MAX)))
        elif field.message_type is not None:
            self._mutate_once(self._rng.choice(entries) if entries and choice < 0.8 else entries.add())
        elif entries and choice < 0.7:
            entries[self._rng.randrange(len(entries))] = self._value(field)
        else:
            entries.append(self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING and field.type == FieldDescriptor.TYPE_BYTES:
            sizes = (0, 1, 15, 16, 17, 32, 1000)
            return (
                BOMB
                if self._rng.random() < 0.1 and field.name not in UNPACKED
                else self._rng.randbytes(self._rng.choice(sizes))
            )
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return self._rng.choice(NAMES)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self._rng.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self._rng.choice(DOUBLES)
        signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_ENUM)
        small = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_ENUM)
        most = (1 << (32 if small else 64) - signed) - 1
        return self._rng.choice([each for each in (*HUGE, *(NEGATIVE if signed else ())) if each <= most])

    def mangle(self, data: bytes) -> bytes:
        """Returns bytes with some of them cut off, changed, or added."""
        choice = self._rng.random()
        if choice < 0.3:
            return data[: self._rng.randrange(len(data) + 1)]
        if choice < 0.4:
            return data + GROUPS
        if choice < 0.6:
            return data + self._rng.randbytes(self._rng.randint(1, 200))
        changed = bytearray(data or b"\0")
        for _ in range(self._rng.randint(1, 8)):
            changed[self._rng.randrange(len(changed))] = self._rng.randrange(256)
        return bytes(changed)


@dataclass(frozen=True)
class FieldLimit:
    """A number at the end of what a field can carry, or of what reft takes.

    Attributes:
        path: fields from the request on.
        value: the number.
    """

    path: tuple[FieldDescriptor, ...]
    value: float

    def put(self, message: Any) -> None:
        """Sets the field: in the first of repeated messages, and as the only repeated number."""
        *outer, field = self.path
        for each in outer:
            child = getattr(message, each.name)
            if each.is_repeated:
                child = child[0] if child else child.add()
            else:
                child.SetInParent()
            message = child
        if field.is_repeated:
            message.ClearField(field.name)
            getattr(message, field.name).append(self.value)
        else:
            setattr(message, field.name, self.value)


def limits_of(fields: Sequence[FieldDescriptor], outer: tuple[FieldDescriptor, ...] = ()) -> Iterator[FieldLimit]:
    """Yields the limits of all numbers of a request, one at a time.

    An earlier manifest is no other message than the manifest.
    """
    for field in fields:
        path = (*outer, field)
        if field.message_type is not None:
            if len(path) < DEPTH_MAX and field.name not in ("base_manifest", "guard_manifest"):
                yield from limits_of(field.message_type.fields, path)
        elif field.name not in FENCES:
            yield from (FieldLimit(path, value) for value in _limits(field.cpp_type))


def _limits(kind: int) -> Sequence[float]:
    step_max = messages.STEP_MAX
    return {
        FieldDescriptor.CPPTYPE_UINT64: ((1 << 64) - 1, step_max, step_max - 1),
        FieldDescriptor.CPPTYPE_INT64: ((1 << 63) - 1, -(1 << 63)),
        FieldDescriptor.CPPTYPE_UINT32: ((1 << 32) - 1, 0),
        FieldDescriptor.CPPTYPE_INT32: ((1 << 31) - 1, -(1 << 31)),
        FieldDescriptor.CPPTYPE_ENUM: ((1 << 31) - 1,),
        FieldDescriptor.CPPTYPE_DOUBLE: (float("inf"), float("nan"), -1.0),
    }.get(kind, ())


class Bytes:
    """A request that is only bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def ListFields(self) -> list[object]:
        return []

    def SerializeToString(self) -> bytes:
        return self._data


class MessageFuzz:
    """Calls each method at each door with requests like real ones.

    The first calls have one number at its limit, each number of each request once. Then fields are
    changed by chance.

    Args:
        target: who is called.
        rng: what it draws from.
    """

    def __init__(self, target: Target, rng: random.Random) -> None:
        self._target, self._rng, self._mutator = target, rng, Mutator(rng)
        self._manifest = pb.Manifest.FromString(bytes.fromhex(target.manifest))
        self._epoch = pb.Epoch(counter=1, ident=bytes([1]) * 16)
        self._channels = {
            Door.LOCAL: rpc.peer_channel(target.unix, None), Door.REMOTE: rpc.peer_channel(target.tcp, target.tls())
        }  # fmt: skip
        self._challenge = b""
        self._rows = [
            row for row in ROWS if row.proof is not Proof.NONE and not row.method.endswith((*LEFT_OUT, "Health/Check"))
        ]
        self._limits = self._all_limits()
        self._tasks: set[asyncio.Task[None]] = set()
        self.rate, self.made, self.codes = CALLS_S, 0, Counter[str]()
        self.unknown: list[str] = []  # calls that failed with a status that no rule allows

    def start_one(self) -> None:
        if len(self._tasks) < AT_ONCE:
            task = asyncio.ensure_future(self._next())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self.made += 1

    def _next(self) -> Coroutine[Any, Any, None]:
        """Returns the next call."""
        if self._limits:
            row, limit = self._limits.pop(0)
            return self._report(limit) if row is None else self._call(row, limit)
        return self._report() if self._rng.random() < 0.1 else self._call(self._rng.choice(self._rows))

    def _all_limits(self) -> list[tuple[MethodRow | None, FieldLimit]]:
        """Returns the limits of all requests at the unix socket, and of reports (no row)."""
        limits: list[tuple[MethodRow | None, FieldLimit]] = [
            (None, limit) for limit in limits_of(pb.ReportRequest.DESCRIPTOR.fields)
        ]
        for row in self._rows:
            if row.door is Door.LOCAL:
                limits += [(row, limit) for limit in limits_of(descriptor_of(row.method).input_type.fields)]
        self._rng.shuffle(limits)

        def place(each: tuple[MethodRow | None, FieldLimit]) -> tuple[int, bool]:
            row, limit = each
            turn = 0 if row is None or row.method.endswith(FIRST) else 2 if row.method.endswith(LAST) else 1
            # of what only grows or is named once, a number that is taken would hide a larger one
            return turn, limit.value <= messages.STEP_MAX

        return sorted(limits, key=place)

    def _request(self, row: MethodRow) -> Message:
        """Returns a request as a program of reft would send it."""
        request: Any = GetMessageClass(descriptor_of(row.method).input_type)()
        names = request.DESCRIPTOR.fields_by_name
        if "manifest" in names:
            request.manifest.CopyFrom(self._manifest)
        if "decision" in names:
            request.decision.epoch.CopyFrom(self._epoch)
        self._fill(request, () if row.door is Door.LOCAL else row.unset)
        if row.speaker and row.door is Door.REMOTE:
            setattr(request, row.speaker, self._manifest.nodes[1].id)
        return request

    def _fill(self, message: Message, unset: Sequence[str] = ()) -> None:
        """Sets those fields that the facts fit into."""
        for name, value in self._facts().items():
            with contextlib.suppress(ValueError, TypeError):  # another type has a field of this name
                if name not in unset:
                    message.MergeFrom(type(message)(**{name: value}))

    def _facts(self) -> dict[str, Any]:
        node, far = self._manifest.nodes[0], self._manifest.nodes[1]
        step = self._rng.choice((0, 1, 2, 3))
        steps = pb.StepReport(until=step, sealed=[pb.SealedStep(step=step)], pending=[step + 1])
        return {
            "job": self._manifest.job, "epoch": self._epoch, "protocol": messages.PROTOCOL, "launch": "launch",
            "version": pb.Version(epoch=self._epoch, step=step), "steps": steps, "node_index": 1, "round": 1,
            "source": far.id, "target": node.id, "node_id": node.id, "slot": "rank-0.slot-0", "size": 4096,
            "chunk_bytes": 4096, "data_bytes": 8192, "table_bytes": 4096, "slots": 2, "cpus": [0], "until": step,
            "pins": pb.Pins(seq=1, whole=step), "name": "step-1", "seconds": 1.0,
            "capsules": [pb.CapsuleRecord(rank=1, version=pb.Version(epoch=self._epoch, step=step), digests=bytes(16))],
            "lost": [pb.LostRank(rank=1)], "reports": [pb.NodeReport(node_id=far.id, signal=1)],
            "last_heard": [pb.LastHeard(node_id=node.id)], "lineage": "0" * 16, "phase": 0, "wait_ms": 50,
            "guard": pb.GuardReport(lanes=[pb.UnguardedLane(step=step)]), "layout": pb.LayoutReport(wanted=0),
        }  # fmt: skip

    async def _call(self, row: MethodRow, limit: FieldLimit | None = None) -> None:
        """Makes one call, with one number at its limit or with some fields changed."""
        request: Any = self._request(row)
        before = request.SerializeToString()
        if limit is None:
            self._mutator.mutate(request)
        else:
            limit.put(request)
        if "manifest" in request.DESCRIPTOR.fields_by_name and row.door is Door.REMOTE and self._rng.random() < 0.9:
            request.manifest.job = self._manifest.job
        elif "job" in request.DESCRIPTOR.fields_by_name and row.door is Door.REMOTE and self._rng.random() < 0.9:
            request.job = self._manifest.job
        if limit is None and self._rng.random() < 0.1:
            request = Bytes(self._mutator.mangle(before))
        call = self._channels[row.door].stream_stream(f"/{row.method}")
        data, metadata = request.SerializeToString(), rpc.PROTOCOL_METADATA
        if row.door is Door.REMOTE:
            token = bytes.fromhex(self._target.launch_token) if row.proof is Proof.LAUNCH else self._manifest.token
            proved, data = proof.prove_call(
                token, self._target.node_id, f"/{row.method}", self._manifest.job, self._challenge, request
            )
            metadata = (*proved.metadata(), *metadata)
        code, text = grpc.StatusCode.OK, ""
        try:
            async for _ in call(_once(data), timeout=CALL_S, metadata=metadata):
                pass
        except grpc.aio.AioRpcError as error:
            code, text = error.code(), error.details() or ""
            if code is grpc.StatusCode.UNAUTHENTICATED:
                self._challenge = proof.challenge_in(error.trailing_metadata()) or self._challenge
        self.codes[code.name] += 1
        if code is grpc.StatusCode.UNKNOWN and len(self.unknown) < 20:
            self.unknown.append(f"{row.method} {row.door.name}: {text} {str(request)[:1500]}")

    async def _report(self, limit: FieldLimit | None = None) -> None:
        """Sends one request to the local socket; with a limit, a report with this number."""
        kind = "report" if limit is not None else self._rng.choice(("report", "slots"))
        request = pb.LocalRequest(protocol=messages.PROTOCOL)
        part = getattr(request, kind)
        self._fill(part)
        if limit is None:
            self._mutator.mutate(part)
        else:
            limit.put(part)
        data = local_socket.frame(request)
        if limit is None and self._rng.random() < 0.2:
            data = self._mutator.mangle(data)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_unix_connection(self._target.local)
            writer.write(data)
            with contextlib.closing(writer):
                await asyncio.wait_for(reader.read(1 << 16), 0.2)
        self.codes["local socket"] += 1


class ByteFuzz:
    """Opens connections to all sockets of the daemon, and sends bytes that mean little.

    Args:
        target: who is called.
        rng: what it draws from.
    """

    def __init__(self, target: Target, rng: random.Random) -> None:
        self._target, self._rng, self._mutator = target, rng, Mutator(rng)
        tls = target.tls()
        self._context = tls.client_context() if tls else None
        self.rate, self.made, self.codes = CONNECTIONS_S // 2, 0, Counter[str]()
        self._tasks: set[asyncio.Task[None]] = set()

    def start_one(self) -> None:
        if len(self._tasks) < AT_ONCE:
            task = asyncio.ensure_future(self._connect(self._rng.choice(("tcp", "unix", "local", "mover"))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self.made += 1

    async def _connect(self, where: str) -> None:
        context = self._context if where in ("tcp", "mover") and self._rng.random() < 0.5 else None
        self.codes[f"{where} in TLS" if context else where] += 1
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            if where in ("unix", "local"):
                path = self._target.local if where == "local" else self._target.unix.removeprefix("unix:")
                reader, writer = await asyncio.open_unix_connection(path)
            else:
                host, _, port = self._target.tcp.rpartition(":")
                port = self._target.mover if where == "mover" else port
                named = {"server_hostname": ""} if context else {}
                reader, writer = await asyncio.open_connection(host, port, ssl=context, **named)
            with contextlib.closing(writer):
                for piece in self._pieces(where, is_encrypted=context is not None):
                    writer.write(piece)
                    await asyncio.sleep(0)
                await asyncio.wait_for(reader.read(1 << 16), 0.1)

    def _pieces(self, where: str, is_encrypted: bool) -> Sequence[bytes]:
        noise = self._rng.randbytes(self._rng.choice((0, 1, 9, 100, 5000)))
        http2 = [HTTP2, self._rng.choice((BAD_HEADERS, LONG_FRAME, noise, self._mutator.mangle(BAD_HEADERS)))]
        real = {
            "tcp": [http2, [self._mutator.mangle(HTTP2)], [HALF_A_HANDSHAKE, noise], [NO_HANDSHAKE, noise]],
            "unix": [http2, [self._mutator.mangle(HTTP2)]],
            "local": [[(self._rng.randrange(1 << 25)).to_bytes(4, "little"), noise]],
            "mover": [[range_protocol.MAGIC + bytes(range_protocol.TICKET_BYTES), noise], [range_protocol.MAGIC[:5]]],
        }[where]
        if self._context and where in ("tcp", "mover") and not is_encrypted:
            real = [*real, [self._mutator.mangle(_client_hello(self._context)), noise]]
        return self._rng.choice([[noise], *real])


def _client_hello(context: ssl.SSLContext) -> bytes:
    """Returns the first bytes of a handshake."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


async def _once(data: bytes) -> Any:
    yield data


def _due(rate: float, seconds: float) -> Iterator[int]:
    """Yields how many are due now, until the time is over. What was missed is not made up for."""
    began, started = time.monotonic(), 0
    while (passed_s := time.monotonic() - began) < seconds:
        due = int(passed_s * rate)
        yield min(due - started, max(1, int(2 * rate * TICK_S)))
        started = due


async def run(target: Target, seed: int, seconds: float) -> None:
    """Fuzzes for so many seconds, says what was done, and ends the process."""
    print("begins", flush=True)
    calls, connections = MessageFuzz(target, random.Random(seed)), ByteFuzz(target, random.Random(seed + 1))

    async def go_on(fuzz: MessageFuzz | ByteFuzz) -> None:
        for count in _due(fuzz.rate, seconds):
            for _ in range(count):
                fuzz.start_one()
            await asyncio.sleep(TICK_S)

    await asyncio.gather(go_on(calls), go_on(connections))
    rates = {"calls/s": round(calls.made / seconds, 1), "connections/s": round(connections.made / seconds, 1)}
    done = {"seed": seed, **rates, "codes": {**calls.codes, **connections.codes}, "unknown": calls.unknown}
    print(json.dumps(done), flush=True)
    os._exit(0)  # calls under way must not delay the end


if __name__ == "__main__":
    asyncio.run(run(Target(**json.load(sys.stdin)), int(sys.argv[1]), float(sys.argv[2])))
