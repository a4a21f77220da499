"""Replicates the round between daemons: one sender task per tree neighbour and per holder of a job.

A sender task keeps no queue. It only knows that something has changed, and sends the present state:

* to the parent: the report of this node's subtree;
* to a child: the outcome;
* to a holder: the capsules of this node's ranks that the holder lacks.

What a neighbour has acknowledged is not sent again. So a slow or dead neighbour costs one message,
however long it is away. The message is tried again every RETRY_S until it is acknowledged, or out
of date.

A restarted daemon has forgotten what it acknowledged. So a child asks its parent by Gather once at
its start, also without news: its slots may be memfds, which trainers have not given back yet. To
the parent, the report is repeated every RETRY_S as long as some step is undecided.
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
from reft.errors import AttachError, FormatError, ReftError
from reft.failpoints import Failpoints, InjectedFault
from reft.wire import messages, rpc
from reft.wire.slot_format import Bytes
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon import __version__
from reft_daemon.jobs import capsules, rounds
from reft_daemon.jobs.job_record import JobRecord

log = logging.getLogger("reft.daemon")
DEADLINE_S = 1.0
KEEP_DEADLINE_S = 5.0  # seconds; a full message takes 1.4 s at 100 Mbit/s
RETRY_S = 0.3
Send = Callable[[pb.Node], Awaitable[None]]
T = TypeVar("T")


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
        # address → channel, and the generation of the certificates that it uses
        self._channels: dict[str, tuple[grpc.aio.Channel, int]] = {}

    def is_own(self, node: pb.Node) -> bool:
        """Whether one of the node's addresses is this daemon's."""
        return not self._own_addresses.isdisjoint(node.addresses)

    def is_self(self, node: pb.Node) -> bool:
        """Whether all addresses of the node are this daemon's.

        The node of another host may have the same socket path, but not the same TCP address too.
        """
        return bool(node.addresses) and self._own_addresses.issuperset(node.addresses)

    async def call(
        self, node: pb.Node, token: bytes, service: type, method: str, request: Message,
        deadline_s: float | None, reconnect: bool = False,
    ) -> object:  # fmt: skip
        """Calls a method of `node`, trying its addresses in turn.

        Args:
            node: the node to call.
            token: the job's token.
            service: class of the gRPC stub.
            method: name of the method.
            request: what is sent.
            deadline_s: for each address; None means no deadline.
            reconnect: if the last connection to another host failed, connect again and wait,
                instead of failing at once.

        Raises:
            grpc.RpcError: the last address failed too.
            AttachError: the other daemon speaks another protocol; its reply is not looked at.
            ConnectionError: the node has no address that this daemon can call.
        """

        async def ask(channel: grpc.aio.Channel, is_far: bool) -> object:
            stub, metadata = service(channel), rpc.peer_metadata(token)
            waits = reconnect and is_far and channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
            call = getattr(stub, method)(request, timeout=deadline_s, metadata=metadata, wait_for_ready=waits)
            reply: object = await call
            _check_reply(node, await call.trailing_metadata())
            self.sent[method] += request.ByteSize()
            return reply

        return await self._first_reachable(node, ask)

    async def read(self, node: pb.Node, token: bytes, request: pb.ReadRequest, into: Bytes, deadline_s: float) -> None:
        """Fills `into` with bytes of a slot of `node`.

        Raises:
            grpc.RpcError: the last address failed too.
            FormatError: fewer or more bytes arrived.
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
        """Yields bytes of a slot of `node`, from the first of its addresses that answers.

        Raises:
            grpc.RpcError: the last address failed too, or the call failed midway.
        """

        async def begin(channel: grpc.aio.Channel, _: bool) -> tuple[Any, Any]:
            stub, metadata = pb_grpc.DaemonStub(channel), rpc.peer_metadata(token)
            call = stub.Read(request, timeout=deadline_s, metadata=metadata)
            chunk = await call.read()  # an error of the call shows here
            try:
                _check_reply(node, await call.initial_metadata())
            except AttachError:
                call.cancel()
                raise
            return call, chunk

        call, chunk = await self._first_reachable(node, begin)
        try:
            while chunk is not grpc.aio.EOF:
                yield chunk.data
                chunk = await call.read()
        finally:
            call.cancel()

    async def _first_reachable(self, node: pb.Node, ask: Callable[[grpc.aio.Channel, bool], Awaitable[T]]) -> T:
        """Returns the result of `ask` at the node's first address that can be reached."""
        error: grpc.RpcError | None = None
        for address in node.addresses:
            if address in self._own_addresses:
                continue
            try:
                return await ask(self._channel(address), not address.startswith("unix:"))
            except grpc.RpcError as failure:
                error = failure
        if error is None:
            raise ConnectionError(f"node {node.name} has no address that other nodes can call")
        raise error

    def _channel(self, address: str) -> grpc.aio.Channel:
        generation = self._tls.generation if self._tls else 0
        channel, made_at = self._channels.get(address, (None, -1))
        if channel is None or (made_at != generation and channel.get_state() is not grpc.ChannelConnectivity.READY):
            channel = rpc.peer_channel(address, self._tls, self._own_connections)
            self._channels[address] = channel, generation
        return channel

    async def drop(self, node: pb.Node) -> None:
        """Closes the connections to a node, which ends their calls.

        The next call connects again.
        """
        for address in node.addresses:
            if address in self._channels:
                await self._channels.pop(address)[0].close()

    async def close(self) -> None:
        for channel, _ in self._channels.values():
            await channel.close()


class RoundReplicator:
    """The sender tasks of one job in one epoch.

    Args:
        job: the job of the round.
        peers: channels to the other daemons.
        failpoints: let tests drop messages.
    """

    def __init__(self, job: JobRecord, peers: PeerChannels, failpoints: Failpoints) -> None:
        self._job = job
        self._peers = peers
        self._failpoints = failpoints
        self._epoch = job.epoch
        # child → the newest outcome that the child has acknowledged
        self._acknowledged_outcomes: dict[int, Outcome] = {}
        # the report that the parent acknowledged within the last RETRY_S
        self._acknowledged_report = pb.GatherRequest()
        self._has_heard_parent = False
        self._change_events: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        manifest, index = job.record.manifest, job.record.node_index
        parent = parent_of(index)
        if parent is not None:
            self._start_sender(parent, "answer in the round", self._send_report)
        for child in children_of(index, len(manifest.nodes)):
            self._start_sender(child, "answer in the round", functools.partial(self._send_outcome, child))
        for holder in job.record.holders:
            self._start_sender(holder, "keep our capsules", functools.partial(self._send_capsules, holder))

    def _start_sender(self, neighbour: int, duty: str, send: Send) -> None:
        has_changed = asyncio.Event()
        self._change_events.append(has_changed)
        node = self._job.record.manifest.nodes[neighbour]
        self._tasks.append(asyncio.ensure_future(self._send_changes(node, has_changed, duty, send)))

    def wake(self) -> None:
        """Starts the sender tasks: something has changed."""
        for dirty in self._change_events:
            dirty.set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _send_changes(self, node: pb.Node, has_changed: asyncio.Event, duty: str, send: Send) -> None:
        is_reachable = True
        while True:
            await has_changed.wait()
            has_changed.clear()
            try:
                await send(node)
            except (grpc.RpcError, OSError, ReftError) as error:
                if is_reachable:
                    log.warning("job=%s node=%s does not %s: %s", self._job.id, node.name, duty, reason_of(error))
                is_reachable = False
                has_changed.set()
                await asyncio.sleep(RETRY_S)
            else:
                is_reachable = True

    async def _send_outcome(self, child: int, node: pb.Node) -> None:
        """Sends a child the outcome, unless the child has acknowledged it already.

        The news of each child wakes the sender tasks of all other children, too.
        """
        job = self._job
        if job.round is None or self._failpoints.hit("round.send"):
            return
        outcome = job.round.outcome
        if outcome != self._acknowledged_outcomes.get(child, Outcome()):
            await self._call(node, "Announce", messages.outcome_to(job.id, job.epoch, outcome))
            self._acknowledged_outcomes[child] = outcome

    async def _send_report(self, node: pb.Node) -> None:
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
            layout=messages.layout_report_to(job.round.layout),
            guard=messages.guard_report_to(job.round.guard.report(job.round.outcome.pins)),
        )
        if (job.round.has_news or not self._has_heard_parent) and request != self._acknowledged_report:
            reply = await self._call(node, "Gather", request)
            self._acknowledged_report, self._has_heard_parent = request, True
            asyncio.get_running_loop().call_later(RETRY_S, self._repeat_report, request)
            rounds.hear_outcome(job, messages.outcome_from(reply))  # type: ignore[arg-type]

    def _repeat_report(self, request: pb.GatherRequest) -> None:
        if self._acknowledged_report is request:
            self._acknowledged_report = pb.GatherRequest()
            self.wake()

    async def _send_capsules(self, holder: int, node: pb.Node) -> None:
        """Sends the holder the capsules that it lacks, message by message, until it lacks none."""
        job = self._job
        while records := capsules.capsules_for(job, holder):
            if self._failpoints.hit("capsules.send"):
                raise InjectedFault("the capsules were dropped")
            epoch, outcome = messages.epoch_to(self._epoch), job.round.outcome if job.round else Outcome()
            outcome_message = messages.outcome_to(job.id, self._epoch, outcome)
            request = pb.KeepRequest(job=job.id, epoch=epoch, capsules=records, outcome=outcome_message)
            await self._call(node, "Keep", request, KEEP_DEADLINE_S)
            capsules.note_kept(job, holder, self._epoch, records)

    async def _call(self, node: pb.Node, method: str, request: Message, deadline_s: float = DEADLINE_S) -> object:
        token = self._job.record.manifest.token
        return await self._peers.call(node, token, pb_grpc.PeerStub, method, request, deadline_s)


def _check_reply(node: pb.Node, metadata: object) -> None:
    """Raises AttachError if the daemon that has replied speaks another protocol."""
    rpc.check_peer(metadata, f"the daemon of node {node.name} speaks", f"this daemon (reft {__version__})")


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failed call, for people to read."""
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
