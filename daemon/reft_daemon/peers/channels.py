"""Channels to the daemons of other nodes, with a proof of each call.

    call ─► the node's addresses in turn ─► proved call (reft/wire/proof.py) ─► proved reply
                                              ▲     └► no proof: UNAVAILABLE, as from a silent node
                                              └── once more, if the callee tells a new challenge

A call through a unix socket has no proof. Its path counts only if the socket lies in a folder that
no other user can enter, and is not this daemon's own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from reft.core.recovery.holdings import UNPROVED
from reft.errors import FormatError
from reft.wire import messages, proof, rpc
from reft.wire.certificate_role import REMEDY
from reft.wire.proof import ProvedCall, prove_call
from reft.wire.slot_format import Bytes
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

log = logging.getLogger("reft.daemon")
UNPROVED_EACH_S: Final = 60.0  # so often the log may say that a daemon's answers have no proof
UNUSED_S: Final = 120.0  # without an answer; then the channel is closed
UNIX: Final = "unix:"
# gRPC itself gives these where nobody answers. With them a server can do no more than be silent.
SILENCE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
TEXT_MAX: Final = 300  # characters of a text without a proof
# Bytes. On a new connection, a larger request follows a Hello, which tells the challenge. A callee
# takes few bytes before a proof, and a large request with a wrong challenge would use them up.
SMALL: Final = 16 << 10
STARTED_MAX: Final = 64  # calls to many nodes that were started within SLOW_S and have not ended
SLOW_S: Final = 0.01  # a call that takes longer waits for a silent node, and costs nothing meanwhile
T = TypeVar("T")
R = TypeVar("R")
# (channel, id of the node or None at a unix socket, token, seconds left) → result of a call
_Ask = Callable[["PeerChannel", str | None, bytes, float | None], Awaitable[T]]


class UnprovedReply(grpc.aio.AioRpcError):
    """A reply of somebody who may not know the token; it counts as no answer.

    Attributes:
        is_refusal: whether somebody says that the proof was wrong.
        challenge: that the call would have had to name; empty: the reply tells none.
    """

    def __init__(self, status: grpc.StatusCode, text: str, challenge: bytes = b"") -> None:
        words = "".join(each if each.isprintable() else " " for each in text[:TEXT_MAX])
        super().__init__(grpc.StatusCode.UNAVAILABLE, details=f"{UNPROVED} ({status.name}, unproved: {words})")
        self.is_refusal = status is grpc.StatusCode.UNAUTHENTICATED
        self.challenge = challenge


@dataclass
class PeerChannel:
    """A channel to one address, and what is known of the daemon there.

    Attributes:
        channel: gRPC's.
        generation: of the certificates that the channel uses.
        challenge: the newest one that the daemon has told.
        token: that the daemon has proved last; an older one of the job, if it missed an attach.
        calls: number of calls under way.
        answered_s: when a call was answered last; at first, when the channel was made.
        unproved_s: when the log said last that an answer had no proof.
    """

    channel: grpc.aio.Channel
    generation: int
    challenge: bytes = b""
    token: bytes = field(default=b"", repr=False)
    calls: int = 0
    answered_s: float = field(default_factory=time.monotonic)
    unproved_s: float = -math.inf


class PeerChannels:
    """Channels to other daemons, one per address, opened at the first use.

    When the certificates change, a channel without a connection is made anew. A connected channel
    keeps the old certificates.

    Args:
        tls: of this daemon.
        own: this daemon's addresses. They are never called: another host's node with the same
            socket path would lead back here.
        own_connections: whether these channels have connections of their own, shared with no other
            `PeerChannels`.

    Attributes:
        sent: method → bytes of the requests that other daemons answered, without the overhead of
            gRPC and TLS.
    """

    def __init__(self, tls: Tls | None, own: Collection[str], own_connections: bool = False) -> None:
        self._own_addresses = frozenset(own)
        self._own_connections = own_connections
        self.sent: collections.Counter[str] = collections.Counter()
        self._tls = tls
        self._channels: dict[str, PeerChannel] = {}  # by address

    def is_own(self, node: pb.Node) -> bool:
        """Whether one of the node's addresses is this daemon's."""
        return not self._own_addresses.isdisjoint(node.addresses)

    def is_self(self, node: pb.Node) -> bool:
        """Whether all addresses of the node are this daemon's.

        The node of another host may have the same socket path, but not the same TCP address too.
        """
        return bool(node.addresses) and self._own_addresses.issuperset(node.addresses)

    async def call(
        self, node: pb.Node, tokens: Sequence[bytes], service: type, method: str, request: Message,
        deadline_s: float | None, reconnect: bool = False,
    ) -> object:  # fmt: skip
        """Calls a method of `node`, trying its addresses in turn.

        Args:
            node: the node to call.
            tokens: of the job, the present one first. A node that missed an attach takes an older
                one.
            service: class of the gRPC stub.
            method: name of the method.
            request: what is sent.
            deadline_s: for each address; None means no deadline.
            reconnect: if the last connection to another host failed, connect again and wait,
                instead of failing at once.

        Raises:
            grpc.RpcError: the last address failed too, or nobody there proves a token.
            OSError: the node has no address that this daemon can call.
        """
        name, reply_type = rpc.method_of(service, method)

        async def ask(peer: PeerChannel, ident: str | None, token: bytes, left_s: float | None) -> object:
            state = peer.channel.get_state()
            waits = reconnect and ident is not None and state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
            if ident is not None and state is not grpc.ChannelConnectivity.READY and request.ByteSize() > SMALL:
                begin_s = time.monotonic()
                await _introduce(peer, left_s, waits)
                left_s = None if left_s is None else max(left_s - (time.monotonic() - begin_s), 0.0)
            if ident is not None and service is pb_grpc.PeerStub and request.ByteSize() > SMALL and peer.token != token:
                await _try_token(peer, ident, token, messages.job_of(request), left_s)
            call, data, metadata = _prepare(peer, token, ident, name, request)
            method_call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = peer.channel.unary_unary(name)
            pending = method_call(data, timeout=left_s, metadata=metadata, wait_for_ready=waits)
            try:
                reply_data = await pending
            except grpc.aio.AioRpcError as error:
                raise _judged(peer, call, error) from error
            if call is not None:
                _check_reply(peer, call, await pending.trailing_metadata(), reply_data)
            reply = reply_type.FromString(reply_data)
            if call is not None:
                call.veil_reply(reply)
            self.sent[method] += len(data)
            return reply

        return await self._first_reachable(node, tokens, deadline_s, ask)

    async def read(
        self, node: pb.Node, tokens: Sequence[bytes], request: pb.ReadRequest, into: Bytes, deadline_s: float
    ) -> None:
        """Fills `into` with bytes of a slot of `node`.

        Raises:
            grpc.RpcError: the last address failed too.
            FormatError: fewer or more bytes arrived.
        """
        at = 0
        async with contextlib.aclosing(self.pieces(node, tokens, request, deadline_s)) as pieces:
            async for data in pieces:
                if at + len(data) <= into.nbytes:
                    into[at : at + len(data)] = np.frombuffer(data, np.uint8)
                at += len(data)
        if at != into.nbytes:
            raise FormatError(f"slot {request.slot} on {node.name} gave {at} of {into.nbytes} bytes.")

    async def pieces(
        self, node: pb.Node, tokens: Sequence[bytes], request: pb.ReadRequest, deadline_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """Yields bytes of a slot of `node`, from the first of its addresses that answers.

        Raises:
            grpc.RpcError: the last address failed too, or the call failed midway.
            OSError: the node has no address that this daemon can call.
        """
        name, _ = rpc.method_of(pb_grpc.DaemonStub, "Read")

        async def begin(
            peer: PeerChannel, ident: str | None, token: bytes, left_s: float | None
        ) -> tuple[PeerChannel, ProvedCall | None, grpc.aio.UnaryStreamCall[bytes, bytes], bytes | None]:
            call, data, metadata = _prepare(peer, token, ident, name, request)
            method_call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = peer.channel.unary_stream(name)
            pieces = method_call(data, timeout=left_s, metadata=metadata)
            try:
                piece = await _next_piece(pieces)  # an error of the call shows here
                if call is not None:
                    _check_reply(peer, call, await pieces.initial_metadata(), b"")
            except UnprovedReply:
                pieces.cancel()
                raise
            except grpc.aio.AioRpcError as error:
                raise _judged(peer, call, error) from error
            return peer, call, pieces, piece

        peer, call, pieces, piece = await self._first_reachable(node, tokens, deadline_s, begin)
        try:
            with _in_use(peer):
                while piece is not None:
                    yield pb.Chunk.FromString(piece).data
                    piece = await _next_piece(pieces)
        except grpc.aio.AioRpcError as error:
            raise _judged(peer, call, error) from error
        finally:
            pieces.cancel()

    async def _first_reachable(
        self, node: pb.Node, tokens: Sequence[bytes], deadline_s: float | None, ask: _Ask[T]
    ) -> T:
        """Returns the result of `ask` at the node's first address that can be reached."""
        failure: grpc.RpcError | OSError | None = None
        for address in node.addresses:
            if address in self._own_addresses:
                continue
            try:
                if address.startswith(UNIX):
                    self._check_socket(address)
                return await self._ask(address, node, tokens, deadline_s, ask)
            except (grpc.RpcError, OSError) as error:
                failure = error
        if failure is None:
            raise ConnectionError(f"node {node.name} has no address that other nodes can call")
        raise failure

    def _check_socket(self, address: str) -> None:
        """Raises OSError for this daemon's own socket, and for one that others may have made."""
        path = rpc.check_private(address)
        own = (Path(each.removeprefix(UNIX)) for each in self._own_addresses if each.startswith(UNIX))
        if path.exists() and any(each.exists() and each.samefile(path) for each in own):
            raise ConnectionError(f"{path} is this daemon's own socket")

    async def _ask(
        self, address: str, node: pb.Node, tokens: Sequence[bytes], deadline_s: float | None, ask: _Ask[T]
    ) -> T:
        """Returns the result of `ask` at one address, under the first token proved there."""
        peer, end_s = self._channel(address), time.monotonic() + (deadline_s or 0.0)

        def left_s() -> float | None:
            return None if deadline_s is None else max(end_s - time.monotonic(), 0.0)

        with _in_use(peer):
            ident = None if address.startswith(UNIX) else node.id or await _introduce(peer, left_s())
            failure = UnprovedReply(grpc.StatusCode.UNAUTHENTICATED, "there is no token for this call")
            for token in sorted(tokens, key=lambda each: each != peer.token):  # first the one of the last call
                try:
                    result = await _under_its_challenge(peer, partial(ask, peer, ident, token), left_s)
                except UnprovedReply as error:
                    failure = error
                    if not error.is_refusal:
                        break
                else:
                    peer.token, peer.answered_s = token, time.monotonic()
                    return result
            # One job's calls may be proved there, and another job's not.
            if time.monotonic() - peer.unproved_s >= UNPROVED_EACH_S:
                log.warning("node=%s at %s counts as silent: %s", node.name, address, failure.details())
                peer.unproved_s = time.monotonic()
            raise failure

    def _channel(self, address: str) -> PeerChannel:
        generation = self._tls.generation if self._tls else 0
        peer = self._channels.get(address)
        if peer is None or (
            peer.generation != generation and peer.channel.get_state() is not grpc.ChannelConnectivity.READY
        ):
            peer = PeerChannel(rpc.peer_channel(address, self._tls, self._own_connections), generation)
            self._channels[address] = peer
        return peer

    async def drop(self, node: pb.Node) -> None:
        """Closes the connections to a node, which ends their calls.

        The next call connects again.
        """
        await self._close(node.addresses)

    async def close_unused(self) -> None:
        """Closes the channels without an answer for UNUSED_S.

        gRPC would dial a dead address for ever.
        """
        limit_s = time.monotonic() - UNUSED_S
        unused = [each for each, peer in self._channels.items() if not peer.calls and peer.answered_s < limit_s]
        await self._close(unused)

    async def close(self) -> None:
        await self._close(list(self._channels))

    async def _close(self, addresses: Collection[str]) -> None:
        peers = [self._channels.pop(address) for address in addresses if address in self._channels]
        await asyncio.gather(*(peer.channel.close() for peer in peers))


async def call_paced(call: Callable[[T], Awaitable[R]], nodes: Iterable[T]) -> list[R]:
    """Returns the result of `call` for each node, in the order of the nodes.

    The calls are started little by little, because each start takes time. At most STARTED_MAX are
    started within SLOW_S. So silent nodes delay the others by SLOW_S for each STARTED_MAX of them.

    Raises:
        Exception: a call has failed; all other calls are cancelled.
    """
    results: dict[int, R] = {}
    running: dict[int, asyncio.Task[R]] = {}
    left = enumerate(nodes)

    async def start_some() -> None:
        for number, node in left:
            task = running[number] = asyncio.ensure_future(call(node))
            await asyncio.wait([task], timeout=SLOW_S)
            if task.done():
                results[number] = running.pop(number).result()

    try:
        await asyncio.gather(*(start_some() for _ in range(STARTED_MAX)))
        for number, task in running.items():
            results[number] = await task
    finally:
        for task in running.values():
            task.cancel()
    return [results[number] for number in range(len(results))]


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failed call, for people to read."""
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)


def is_cut_off(error: grpc.RpcError) -> bool:
    """Whether a call failed on the way: the connection ended, or none could be made.

    A daemon that is gone refuses connections, and a wrong certificate stays wrong.
    """
    is_unavailable = error.code() is grpc.StatusCode.UNAVAILABLE and not isinstance(error, UnprovedReply)
    reason = reason_of(error)
    return is_unavailable and "refused" not in reason and not rpc.is_certificate_refused(reason)


def remedy_of(error: BaseException) -> str:
    """Returns what a person can do about a node that can't be reached."""
    return REMEDY if rpc.is_certificate_refused(reason_of(error)) else "check its daemon"


async def _under_its_challenge(
    peer: PeerChannel, ask: Callable[[float | None], Awaitable[T]], left_s: Callable[[], float | None]
) -> T:
    """Returns the result of `ask`. If the daemon tells a new challenge, asks once more."""
    challenge = peer.challenge
    try:
        return await ask(left_s())
    except UnprovedReply as error:
        if error.challenge in (b"", challenge):
            raise
        peer.challenge = error.challenge
    return await ask(left_s())


@contextlib.contextmanager
def _in_use(peer: PeerChannel) -> Iterator[None]:
    """Counts a call under way."""
    peer.calls += 1
    try:
        yield
    finally:
        peer.calls -= 1


async def _introduce(peer: PeerChannel, left_s: float | None, waits: bool = False) -> str:
    """Takes a daemon's challenge; returns the id of its node. A wrong one proves nothing.

    Args:
        peer: the channel.
        left_s: seconds left; None: no deadline.
        waits: whether to wait for a connection.

    Raises:
        grpc.RpcError: nobody answers.
    """
    name, _ = rpc.method_of(pb_grpc.DaemonStub, "Hello")
    data = messages.hello().SerializeToString()
    method_call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = peer.channel.unary_unary(name)
    call = method_call(data, timeout=left_s, metadata=rpc.PROTOCOL_METADATA, wait_for_ready=waits)
    reply = await call
    peer.challenge = proof.challenge_in(await call.trailing_metadata()) or peer.challenge
    try:
        return pb.HelloReply.FromString(reply).node_id
    except DecodeError as error:
        raise UnprovedReply(grpc.StatusCode.OK, str(error)) from error


async def _try_token(peer: PeerChannel, ident: str, token: bytes, job: str, left_s: float | None) -> None:
    """Makes a small call with a token that was not proved here yet.

    A node that missed an attach has an older token. Its refused large requests would use up the
    bytes that a callee takes before a proof, and hold up all other calls of the connection.

    Raises:
        grpc.RpcError: nobody answers.
        UnprovedReply: the token is not taken.
    """
    name, _ = rpc.method_of(pb_grpc.DaemonStub, "Status")
    call, data, metadata = _prepare(peer, token, ident, name, pb.StatusRequest(job=job))
    assert call is not None, "calls over TCP have a proof"
    method_call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = peer.channel.unary_unary(name)
    pending = method_call(data, timeout=left_s, metadata=metadata)
    try:
        reply = await pending
    except grpc.aio.AioRpcError as error:
        raise _judged(peer, call, error) from error
    _check_reply(peer, call, await pending.trailing_metadata(), reply)
    peer.token = token


async def _next_piece(pieces: grpc.aio.UnaryStreamCall[bytes, bytes]) -> bytes | None:
    """Returns the next message of a stream; None at its end."""
    piece = await pieces.read()
    return piece if isinstance(piece, bytes) else None


def _prepare(
    peer: PeerChannel, token: bytes, ident: str | None, method: str, request: Message
) -> tuple[ProvedCall | None, bytes, proof.Metadata]:
    """Returns a call, its request's bytes and its metadata.

    No call is returned for a unix socket, which takes no proof.
    """
    if ident is None:
        return None, request.SerializeToString(), rpc.PROTOCOL_METADATA
    call, data = prove_call(token, ident, method, messages.job_of(request), peer.challenge, request)
    return call, data, (*call.metadata(), *rpc.PROTOCOL_METADATA)


def _check_reply(peer: PeerChannel, call: ProvedCall, metadata: object, reply: bytes) -> None:
    """Takes the challenge of a proved reply.

    Raises:
        UnprovedReply: the reply has no proof.
    """
    if not call.has_reply(metadata, 0, reply):
        raise UnprovedReply(grpc.StatusCode.OK, "a reply")
    peer.challenge = proof.challenge_in(metadata) or peer.challenge


def _judged(peer: PeerChannel, call: ProvedCall | None, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """Returns the error of a call; `UnprovedReply` if a proof is missing."""
    code, text, metadata = error.code(), error.details() or "", error.trailing_metadata()
    if call is None or code in SILENCE:
        return error
    challenge = proof.challenge_in(metadata)
    if call.has_reply(metadata, code.value[0], text.encode()):
        peer.challenge = challenge or peer.challenge
        return error
    return UnprovedReply(code, text, challenge if code is grpc.StatusCode.UNAUTHENTICATED else b"")
