"""Judges each call before its request is read: the rows of `doors.py`, carried out.

    metadata ─► protocol ─► proof ─► calls under way ─► one message, with a deadline and a size
                                                           │
    reply ◄─ the service's method ◄─ job, node, fields ◄───┘ parsed
       any step may refuse: the call ends with a status, and nothing more of it is read

Every method is a stream handler on bytes, which is the same on the wire as a unary one. gRPC would
read and parse the whole request of a unary handler before the handler is asked.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from reft.errors import ReftError
from reft.wire import messages, rpc
from reft.wire.certificate_role import REMEDY, Role
from reft.wire.proof import CERTIFIED, PROOF_KEY, Challenges, Metadata, ProvedCall, UnprovedCall, job_in, manifests_in
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon import __version__
from reft_daemon.arena import shortage
from reft_daemon.jobs import slot_reads
from reft_daemon.membership.monitors import JobNotWatched
from reft_daemon.registry import Registry, UnknownJob
from reft_daemon.server.callers import Caller, Callers, Door
from reft_daemon.server.doors import ROWS, MethodRow, Proof

Context = grpc.aio.ServicerContext
Code = grpc.StatusCode
OWN_PROTOCOL = "/Hello"  # the request has the protocol
FOREIGN = "grpc."  # methods of services that know no protocol of reft
# Bytes of the requests of one method that are parsed and worked on at the same time, by door. The
# largest request fits alone; parsed it can take fifty times its size. So many bytes may wait, too.
BYTES_MAX = rpc.MESSAGE_MAX


# Why calls are refused, for the log. Nothing that a caller sent is in it.
REASONS = {
    Code.UNAUTHENTICATED: "their calls had no valid proof",
    Code.PERMISSION_DENIED: "their calls asked for more than their proof or certificate allows",
}


class CallRefused(ReftError):
    """A call ends with this status.

    Args:
        status: of the call.
    """

    def __init__(self, status: grpc.StatusCode, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status


@dataclass(frozen=True)
class AdmittedCall:
    """What a service knows about an admitted call.

    Attributes:
        caller: who calls.
        left_s: seconds that the caller waits yet; None: without end.
    """

    caller: Caller
    left_s: float | None

    @property
    def is_local(self) -> bool:
        return self.caller.door is Door.LOCAL


class Judge:
    """Admits or refuses the calls at one door.

    Args:
        door: where the calls come in.
        registry: the jobs and their tokens.
        callers: who calls on each connection; gets to know which of them have a proof.
        challenges: judge the proofs of calls; None: at this door nothing has to be proved.
        own_role: of this daemon's certificate; None: it has none.
    """

    def __init__(
        self,
        door: Door,
        registry: Registry,
        callers: Callers,
        challenges: Challenges | None = None,
        own_role: Role | None = None,
    ) -> None:
        self._door, self._registry, self._callers = door, registry, callers
        self._challenges, self._own_role = challenges, own_role

    def handlers(self, services: Mapping[str, object]) -> list[grpc.GenericRpcHandler]:
        """Returns the handlers of this door's rows.

        Args:
            services: full name of a service → the object with its methods.
        """
        by_service: dict[str, dict[str, grpc.RpcMethodHandler]] = collections.defaultdict(dict)
        for row in ROWS:
            if row.door is self._door:
                service, name = row.method.split("/")
                handler = MethodHandler(self, row, descriptor_of(row.method), getattr(services[service], name))
                by_service[service][name] = handler.for_grpc()
        return [grpc.method_handlers_generic_handler(*each) for each in by_service.items()]

    def admit(self, row: MethodRow, context: Context) -> tuple[Caller, ProvedCall | None]:
        """Judges a call by its connection and its metadata.

        Returns:
            The caller, and the call that was proved; None: no proof was asked for.

        Raises:
            ReftError: the call is refused.
        """
        caller = self._callers.of(context.peer())
        if caller is None or caller.door is not self._door:
            raise CallRefused(Code.UNAUTHENTICATED, "this daemon does not know the connection of the call")
        metadata = dict(context.invocation_metadata() or ())
        has_protocol = self._door is Door.REMOTE or rpc.says_protocol(metadata)
        if has_protocol and not row.method.startswith(FOREIGN) and not row.method.endswith(OWN_PROTOCOL):
            rpc.check_peer(metadata, "you speak", f"this daemon (reft {__version__})")
        if row.proof in (Proof.SOCKET, Proof.NONE):
            return caller, None
        if caller.role is not None and not caller.role.node and not row.from_agents:
            text = f"the certificate is of the {caller.role}; {row.method} takes that of a daemon"
            raise CallRefused(Code.PERMISSION_DENIED, text, REMEDY)
        if self._challenges is None:
            raise CallRefused(Code.UNAUTHENTICATED, f"this call needs {row.proof.value}")
        tokens = self._tokens(row.proof, job_in(metadata), caller)
        try:
            proved = self._challenges.check(metadata, f"/{row.method}", tokens)
        except UnprovedCall as error:
            if row.proof is Proof.REBUILD:
                raise UnprovedCall(
                    error.message, f"run reft-cli recover {job_in(metadata) or 'JOB'} on this node"
                ) from error
            raise
        self._callers.note_proved(context.peer())
        return caller, proved

    def note_refused(self, peer: str, reason: str) -> None:
        """Notes that a call was refused, for the line that says so once a minute."""
        if self._door is Door.REMOTE:  # at the unix socket an error of another node may have this status
            self._callers.note_refused(peer, reason)

    def answer_metadata(self, proved: ProvedCall | None, status: grpc.StatusCode, content: bytes) -> Metadata:
        """Returns the metadata of an answer: this daemon's protocol and challenge, and a proof.

        Args:
            proved: the call; None: it is answered without a proof.
            status: of the answer.
            content: the reply's bytes, or the text of the error.
        """
        metadata: Metadata = rpc.PROTOCOL_METADATA
        if self._challenges is not None:
            metadata = (*metadata, *self._challenges.metadata())
        if proved is not None:
            metadata = (*metadata, (PROOF_KEY, proved.reply_proof(status.value[0], content)))
        return metadata

    def _tokens(self, proof: Proof, job: str, caller: Caller) -> list[bytes]:
        """Returns the tokens that admit to a job; none if nobody may call.

        A job that is not held has no token here. To have it rebuilt takes the token of an agent of
        this node, or the certificate of another daemon of the same user.
        """
        record, monitors = self._registry.jobs.get(job), self._registry.heartbeat_service.monitors
        if proof is Proof.LAUNCH:
            return list(monitors.tokens(job))
        if record is not None:
            # A call that may begin an epoch must not come from a node with an older token.
            begins = proof in (Proof.REBUILD, Proof.EPOCH)
            return [record.record.manifest.token] if begins else messages.admitting_tokens(record.record)
        if proof is not Proof.REBUILD:
            return []
        certified = [CERTIFIED] if is_fellow_daemon(caller.role, self._own_role) else []
        return [*monitors.tokens_of_agent(job), *certified]

    def check(self, row: MethodRow, request: Any, caller: Caller, proved: ProvedCall | None) -> None:
        """Judges a request, now that it is read.

        Raises:
            CallRefused: the call may not ask for this.
        """
        for path, most in row.lists.items():
            if (count := _entries(request, path)) > most:
                text = f"the request has {count} entries in {path}; the limit is {most}"
                raise CallRefused(Code.INVALID_ARGUMENT, text)
        if proved is None:
            return
        if address := next((each for each in _addresses(request) if each.startswith("unix:")), ""):
            text = f"the address {address} came over TCP, where only HOST:PORT counts"
            raise CallRefused(Code.INVALID_ARGUMENT, text, "start the daemon there with --listen")
        if messages.job_of(request) != proved.job:
            text = f"the request is about job {messages.job_of(request)!r}, and the proof about job {proved.job}"
            raise CallRefused(Code.PERMISSION_DENIED, text)
        if local := [each.name for each, _ in request.ListFields() if each.name in row.unset]:
            text = f"only callers at the unix socket of this node may set {', '.join(local)}"
            raise CallRefused(Code.PERMISSION_DENIED, text)
        if row.speaker:
            self._check_speaker(getattr(request, row.speaker), caller, proved.job)

    def _check_speaker(self, node_id: str, caller: Caller, job: str) -> None:
        """Refuses calls in the name of this node, or of another certificate's node."""
        if node_id == self._registry.arena.node_id:
            raise CallRefused(Code.PERMISSION_DENIED, "only callers at the unix socket may speak for this node")
        if caller.role is None:
            return
        name = self._registry.heartbeat_service.monitors.node_name(job, node_id)
        if not caller.role.is_on(name):
            text = f"the certificate is of the {caller.role}, and the call speaks for node {name or node_id!r}"
            raise CallRefused(Code.PERMISSION_DENIED, text)


class MethodHandler:
    """Handles the calls of one method at one door.

    Args:
        judge: of the door.
        row: of the method.
        descriptor: of the method.
        method: of the service: takes the request and an `AdmittedCall`. It may return the bytes of
            its reply, if the method is served at the unix socket alone: these veil no token.
    """

    def __init__(
        self, judge: Judge, row: MethodRow, descriptor: MethodDescriptor, method: Callable[[Any, AdmittedCall], Any]
    ) -> None:
        self._judge, self._row, self._method = judge, row, method
        self._streams = descriptor.server_streaming
        self._request_class = GetMessageClass(descriptor.input_type)
        self._calls = 0
        self._bytes = ByteLimit(BYTES_MAX)
        self._ended: set[asyncio.Task[None]] = set()  # calls whose request did not come in time

    def for_grpc(self) -> grpc.RpcMethodHandler:
        """Returns the handler in gRPC's form."""
        if self._streams:
            return grpc.stream_stream_rpc_method_handler(self._answer_stream)
        return grpc.stream_unary_rpc_method_handler(self._answer_once)

    async def _answer_once(self, _: object, context: Context) -> bytes:
        proved: ProvedCall | None = None
        try:
            caller, proved = self._judge.admit(self._row, context)
            async with self._request_of(context, caller, proved) as (request, call):
                reply: Message | bytes = await self._method(request, call)
                if proved is not None and isinstance(reply, Message):
                    proved.veil_reply(reply)
                data = reply if isinstance(reply, bytes) else reply.SerializeToString()
            context.set_trailing_metadata(self._judge.answer_metadata(proved, Code.OK, data))
            return data
        except (ReftError, OSError) as error:
            await self._refuse(context, proved, error)
            raise  # not reached

    async def _answer_stream(self, _: object, context: Context) -> AsyncIterator[bytes]:
        proved: ProvedCall | None = None
        try:
            caller, proved = self._judge.admit(self._row, context)
            async with self._request_of(context, caller, proved) as (request, call):
                await context.send_initial_metadata(self._judge.answer_metadata(proved, Code.OK, b""))
                async with contextlib.aclosing(self._method(request, call)) as pieces:
                    async for piece in pieces:
                        yield piece.SerializeToString()
        except (ReftError, OSError) as error:
            await self._refuse(context, proved, error)

    async def _refuse(self, context: Context, proved: ProvedCall | None, error: ReftError | OSError) -> None:
        """Ends a call with an error. Nothing is proved to a caller who has proved nothing."""
        code, text = status_of(error)
        if code in REASONS:
            self._judge.note_refused(context.peer(), REASONS[code])
        known = None if isinstance(error, UnprovedCall) else proved
        await context.abort(code, text, self._judge.answer_metadata(known, code, text.encode()))

    @contextlib.asynccontextmanager
    async def _request_of(
        self, context: Context, caller: Caller, proved: ProvedCall | None
    ) -> AsyncGenerator[tuple[Message, AdmittedCall], None]:
        """Reads the request of an admitted call, and judges it.

        Raises:
            ReftError: the call is refused.
        """
        row = self._row
        if self._calls >= row.calls_max:
            text = f"{row.calls_max} calls of {row.method} are under way, which is the limit"
            raise CallRefused(Code.RESOURCE_EXHAUSTED, text, "try again")
        self._calls += 1
        try:
            data = await self._read(context) if row.proof is not Proof.NONE else b""
            if proved is not None:
                proved.check_request(data)
            async with self._bytes.reserved(len(data)):
                request = self._request_class()
                try:
                    request.ParseFromString(data)
                except DecodeError as error:
                    raise CallRefused(Code.INVALID_ARGUMENT, f"the request can't be read: {error}") from error
                del data
                if proved is not None:
                    proved.veil_request(request)
                self._judge.check(row, request, caller, proved)
                yield request, AdmittedCall(caller, context.time_remaining())
        finally:
            self._calls -= 1

    async def _read(self, context: Context) -> bytes:
        """Returns the bytes of the request, once the caller can send no more.

        Raises:
            CallRefused: the call has no message, more than one, or a too large one.
        """
        timer = asyncio.get_running_loop().call_later(self._row.read_s, self._end_late, context)
        try:
            data = await context.read()
            if data is grpc.aio.EOF:
                raise CallRefused(Code.INVALID_ARGUMENT, "the call has no request")
            if len(data) > self._row.request_max:
                text = f"the request has {len(data)} bytes; the limit of {self._row.method} is {self._row.request_max}"
                raise CallRefused(Code.RESOURCE_EXHAUSTED, text)
            if await context.read() is not grpc.aio.EOF:
                raise CallRefused(Code.INVALID_ARGUMENT, "the call has more than one request")
            return bytes(data)
        finally:
            timer.cancel()

    def _end_late(self, context: Context) -> None:
        """Ends a call whose request did not come in time, and its read."""
        task = asyncio.ensure_future(_abort(context, f"no request arrived within {self._row.read_s:g} s"))
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)


class ByteLimit:
    """Bytes that calls may hold at the same time; further calls wait in their order.

    Bytes are counted once a request has arrived: a slow caller makes no other caller wait.

    Args:
        nbytes: the most. So many may also wait.
    """

    def __init__(self, nbytes: int) -> None:
        self._free = self._may_wait = nbytes
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @contextlib.asynccontextmanager
    async def reserved(self, nbytes: int) -> AsyncGenerator[None, None]:
        """Holds that many bytes, once they are free.

        Raises:
            CallRefused: too many bytes wait already.
        """
        await self._take(nbytes)
        try:
            yield
        finally:
            self._give(nbytes)

    async def _take(self, nbytes: int) -> None:
        if not self._waiting and nbytes <= self._free:
            self._free -= nbytes
            return
        if nbytes > self._may_wait:
            text = "too many bytes of such requests wait already"
            raise CallRefused(Code.RESOURCE_EXHAUSTED, text, "try again")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        self._may_wait -= nbytes
        try:
            await turn
        except asyncio.CancelledError:
            self._give(0 if turn.cancelled() else nbytes)  # the bytes may have come at the same time
            raise
        finally:
            self._may_wait += nbytes

    def _give(self, nbytes: int) -> None:
        """Takes bytes back, and gives them to the calls that wait."""
        self._free += nbytes
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._free):
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= wanted
                turn.set_result(None)


def status_of(error: ReftError | OSError) -> tuple[grpc.StatusCode, str]:
    """Returns the status and the text with which a failed call ends."""
    if isinstance(error, CallRefused):
        return error.status, str(error)
    if isinstance(error, UnprovedCall):
        return Code.UNAUTHENTICATED, str(error)
    if isinstance(error, (UnknownJob, JobNotWatched)):
        return Code.NOT_FOUND, str(error)
    if isinstance(error, ReftError):
        return slot_reads.status_of(error), str(error)
    # not DATA_LOSS: the error does not show that data is damaged
    return Code.INTERNAL, str(shortage.shortage_error(error))


def descriptor_of(method: str) -> MethodDescriptor:
    """Returns the descriptor of a method, by its full name."""
    service, name = method.split("/")
    file = health_pb2.DESCRIPTOR if service.startswith(FOREIGN) else pb.DESCRIPTOR
    return file.services_by_name[service.rpartition(".")[2]].methods_by_name[name]


def is_fellow_daemon(role: Role | None, own: Role | None) -> bool:
    """Returns whether a certificate is of a daemon of the same user.

    Args:
        role: of the caller's certificate.
        own: of this daemon's certificate.
    """
    return role is not None and own is not None and bool(role.node) and role.user == own.user


def _addresses(request: Any) -> Iterator[str]:
    """Returns the addresses of all nodes that a request names."""
    for holder in (request, *(manifest for _, manifest in manifests_in(request))):
        for node in getattr(holder, "nodes", ()):
            yield from node.addresses


def _entries(message: Any, path: str) -> int:
    """Returns the number of entries of a repeated field, by its path in the message."""
    *parts, name = path.split(".")
    for part in parts:
        message = getattr(message, part)
    return len(getattr(message, name))


async def _abort(context: Context, text: str) -> None:
    with contextlib.suppress(grpc.aio.AbortError):
        await context.abort(Code.DEADLINE_EXCEEDED, text)
