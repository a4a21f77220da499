"""What carries the round between daemons: one courier for each neighbour of a job in the tree, and for each holder.

A courier keeps no queue. It knows only that something changed, and sends what is true when it sends: to the parent what
the subtree says, to a child the outcome, to a holder the capsules of all ranks of this node that it lacks; what a neighbour
has acknowledged is not sent to it again. So a slow or dead neighbour costs one message, however long it lasts; it is tried
again every RETRY_S until what it should know is no longer news.

Who was restarted has forgotten what it acknowledged. A child asks by Gather. A parent is told again every RETRY_S, as long
as something is undecided.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Any, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message

from reft.core.commit.round import Outcome, children_of, parent_of
from reft.errors import FormatError, ReftError
from reft.failpoints import Failpoints, InjectedFault
from reft.wire import messages, rpc
from reft.wire.slot_format import Bytes
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.jobs.job_record import JobRecord

log = logging.getLogger("reft.daemon")
DEADLINE_S = 1.0
KEEP_DEADLINE_S = 5.0  # a full message takes 1.4 s at 100 Mbit/s
RETRY_S = 0.3
Send = Callable[[pb.Node], Awaitable[None]]
T = TypeVar("T")


class PeerChannels:
    """Channels to other daemons, one an address, opened when first used.

    One that is not connected is made anew once the certificates have changed; one that is goes on with the old ones.

    Args:
        tls: of this daemon.
        own: this daemon's addresses: a node with the same socket path on another host would be ourselves.
        apart: whether these channels share no connection with those of another `PeerChannels`.

    Attributes:
        sent: method → bytes of the requests that other daemons answered, without what gRPC and TLS add.
    """

    def __init__(self, tls: Tls | None, own: Collection[str], apart: bool = False) -> None:
        self._own = frozenset(own)
        self._apart = apart
        self.sent: collections.Counter[str] = collections.Counter()
        self._tls = tls
        self._channels: dict[str, tuple[grpc.aio.Channel, int]] = {}  # with the generation of the certificates

    def is_own(self, node: pb.Node) -> bool:
        """Whether an address of the node is this daemon's."""
        return not self._own.isdisjoint(node.addresses)

    async def call(
        self, node: pb.Node, token: bytes, service: type, method: str, request: Message,
        deadline_s: float | None, anew: bool = False,
    ) -> object:  # fmt: skip
        """Calls a method of `node`, by each of its addresses in turn.

        Args:
            anew: that another host could not be reached a moment ago is no answer: the connection is made anew first.

        Raises:
            grpc.RpcError: the last address failed too.
        """

        async def ask(channel: grpc.aio.Channel, is_far: bool) -> object:
            stub, metadata = service(channel), rpc.token_metadata(token)
            waits = anew and is_far and channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
            call = getattr(stub, method)(request, timeout=deadline_s, metadata=metadata, wait_for_ready=waits)
            reply: object = await call
            self.sent[method] += request.ByteSize()
            return reply

        return await self._first(node, ask)

    async def read(self, node: pb.Node, token: bytes, request: pb.ReadRequest, into: Bytes, deadline_s: float) -> None:
        """Fills `into` with bytes of a slot of `node`.

        Raises:
            grpc.RpcError: the last address failed too.
            FormatError: fewer or more bytes came.
        """
        at = 0
        async with contextlib.aclosing(self.pieces(node, token, request, deadline_s)) as pieces:
            async for data in pieces:
                if at + len(data) <= into.nbytes:
                    into[at : at + len(data)] = np.frombuffer(data, np.uint8)
                at += len(data)
        if at != into.nbytes:
            raise FormatError(f"slot {request.slot} on {node.name} gave {at} of {into.nbytes} bytes.")

    async def pieces(
        self, node: pb.Node, token: bytes, request: pb.ReadRequest, deadline_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """Bytes of a slot of `node`, piece by piece, by the first of its addresses that gives any.

        Raises:
            grpc.RpcError: the last address failed too, or the call did in its midst.
        """

        async def begin(channel: grpc.aio.Channel, _: bool) -> tuple[Any, Any]:
            stub, metadata = pb_grpc.DaemonStub(channel), rpc.token_metadata(token)
            call = stub.Read(request, timeout=deadline_s, metadata=metadata)
            return call, await call.read()

        call, chunk = await self._first(node, begin)
        try:
            while chunk is not grpc.aio.EOF:
                yield chunk.data
                chunk = await call.read()
        finally:
            call.cancel()

    async def _first(self, node: pb.Node, ask: Callable[[grpc.aio.Channel, bool], Awaitable[T]]) -> T:
        """What the first address of the node that can be reached gives."""
        error: grpc.RpcError | None = None
        for address in node.addresses:
            if address in self._own:
                continue
            try:
                return await ask(self._channel(address), not address.startswith("unix:"))
            except grpc.RpcError as failure:
                error = failure
        if error is None:
            raise ConnectionError(f"node {node.name} has no address that other nodes could use")
        raise error

    def _channel(self, address: str) -> grpc.aio.Channel:
        generation = self._tls.generation if self._tls else 0
        channel, made_at = self._channels.get(address, (None, -1))
        if channel is None or (made_at != generation and channel.get_state() is not grpc.ChannelConnectivity.READY):
            channel = rpc.peer_channel(address, self._tls, self._apart)
            self._channels[address] = channel, generation
        return channel

    async def drop(self, node: pb.Node) -> None:
        """Ends the connections to a node with the calls on them; the next call makes new ones."""
        for address in node.addresses:
            if address in self._channels:
                await self._channels.pop(address)[0].close()

    async def close(self) -> None:
        for channel, _ in self._channels.values():
            await channel.close()


class RoundReplicator:
    """The couriers of one job in one epoch.

    Args:
        job: whose round is carried.
        peers: channels to the other daemons.
    """

    def __init__(self, job: JobRecord, peers: PeerChannels, failpoints: Failpoints) -> None:
        self._job = job
        self._peers = peers
        self._failpoints = failpoints
        self._epoch = job.epoch
        self._told: dict[int, Outcome] = {}  # by the child that has acknowledged it
        self._said = pb.GatherRequest()  # what the parent has acknowledged, RETRY_S ago at most
        self._dirty: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        manifest, index = job.record.manifest, job.record.node_index
        parent = parent_of(index)
        if parent is not None:
            self._start(parent, "hear the round", self._gather)
        for child in children_of(index, len(manifest.nodes)):
            self._start(child, "hear the round", functools.partial(self._announce, child))
        for holder in job.record.holders:
            self._start(holder, "keep our capsules", functools.partial(self._deposit, holder))

    def _start(self, neighbour: int, what: str, send: Send) -> None:
        dirty = asyncio.Event()
        self._dirty.append(dirty)
        node = self._job.record.manifest.nodes[neighbour]
        self._tasks.append(asyncio.ensure_future(self._serve(node, dirty, what, send)))

    def wake(self) -> None:
        """Something changed."""
        for dirty in self._dirty:
            dirty.set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _serve(self, node: pb.Node, dirty: asyncio.Event, what: str, send: Send) -> None:
        reachable = True
        while True:
            await dirty.wait()
            dirty.clear()
            try:
                await send(node)
            except (grpc.RpcError, OSError, ReftError) as error:
                if reachable:
                    log.warning("job=%s node=%s does not %s: %s", self._job.id, node.name, what, reason_of(error))
                reachable = False
                dirty.set()
                await asyncio.sleep(RETRY_S)
            else:
                reachable = True

    async def _announce(self, child: int, node: pb.Node) -> None:
        """Tells a child the outcome, if it has not acknowledged it: each child's news wakes the couriers of all the others."""
        job = self._job
        if job.round is None or self._failpoints.hit("round.send"):
            return
        outcome = job.round.outcome
        if outcome != self._told.get(child, Outcome()):
            await self._call(node, "Announce", messages.outcome_to(job.id, job.epoch, outcome))
            self._told[child] = outcome

    async def _gather(self, node: pb.Node) -> None:
        job = self._job
        if job.round is None or self._failpoints.hit("round.send"):
            return
        request = pb.GatherRequest(
            job=job.id,
            epoch=messages.epoch_to(job.epoch),
            node_index=job.record.node_index,
            steps=messages.report_to(job.round.report(), job.round.digests()),
            mismatched=sorted(job.round.outcome.mismatched),
            requested_every=job.round.requested_every,
        )
        if job.round.has_news and request != self._said:
            reply = await self._call(node, "Gather", request)
            self._said = request
            asyncio.get_running_loop().call_later(RETRY_S, self._say_again, request)
            job.hear_outcome(messages.outcome_from(reply))  # type: ignore[arg-type]

    def _say_again(self, request: pb.GatherRequest) -> None:
        if self._said is request:
            self._said = pb.GatherRequest()
            self.wake()

    async def _deposit(self, holder: int, node: pb.Node) -> None:
        """Sends what the holder lacks, message by message, until nothing is owed to it."""
        job = self._job
        while records := job.owed_to(holder):
            if self._failpoints.hit("capsules.send"):
                raise InjectedFault("the capsules were dropped")
            epoch, outcome = messages.epoch_to(self._epoch), job.round.outcome if job.round else Outcome()
            decided = messages.outcome_to(job.id, self._epoch, outcome)
            request = pb.KeepRequest(job=job.id, epoch=epoch, capsules=records, outcome=decided)
            await self._call(node, "Keep", request, KEEP_DEADLINE_S)
            job.acknowledged(holder, self._epoch, records)

    async def _call(self, node: pb.Node, method: str, request: Message, deadline_s: float = DEADLINE_S) -> object:
        token = self._job.record.manifest.token
        return await self._peers.call(node, token, pb_grpc.PeerStub, method, request, deadline_s)


def reason_of(error: BaseException) -> str:
    """What a person reads of a failed call."""
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
