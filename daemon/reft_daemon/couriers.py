"""What carries the round between daemons: one courier for each neighbour of a job in the tree.

A courier holds no queue. It knows only that something changed, and sends what is true when it sends: all that is
undecided to the parent, the outcome to a child. So a slow or dead neighbour costs one message, however long it lasts;
it is tried again every RETRY_S until what it should know is no longer news.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc

from reft.core.round import children_of, parent_of
from reft.errors import ReftError
from reft.failpoints import Failpoints
from reft.wire import messages, rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.job import HeldJob

log = logging.getLogger("reft.daemon")
DEADLINE_S = 1.0
RETRY_S = 0.3


class Peers:
    """Channels to other daemons, one an address, opened when first used."""

    def __init__(self, tls: rpc.Tls | None) -> None:
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def call(
        self, node: pb.Node, token: bytes, service: type, method: str, request: object, deadline_s: float
    ) -> object:
        """Calls a method of `node`, by each of its addresses in turn.

        Raises:
            grpc.RpcError: the last address failed too.
        """
        error: grpc.RpcError | None = None
        for address in node.addresses:
            if address not in self._channels:
                self._channels[address] = rpc.peer_channel(address, self._tls)
            stub = service(self._channels[address])
            try:
                metadata = rpc.token_metadata(token)
                return await getattr(stub, method)(request, timeout=deadline_s, metadata=metadata)
            except grpc.RpcError as failure:
                error = failure
        if error is None:
            raise ConnectionError(f"node {node.name} has no address that other nodes could use")
        raise error

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


class Couriers:
    """The couriers of one job in one epoch.

    Args:
        job: whose round is carried.
        peers: channels to the other daemons.
    """

    def __init__(self, job: HeldJob, peers: Peers, failpoints: Failpoints) -> None:
        self._job = job
        self._peers = peers
        self._failpoints = failpoints
        manifest, index = job.record.manifest, job.record.node_index
        parent = parent_of(index)
        neighbours = [*children_of(index, len(manifest.nodes)), *([] if parent is None else [parent])]
        self._dirty = {neighbour: asyncio.Event() for neighbour in neighbours}
        self._tasks = [asyncio.ensure_future(self._serve(n, n == parent)) for n in neighbours]

    def wake(self) -> None:
        """Something changed."""
        for dirty in self._dirty.values():
            dirty.set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _serve(self, neighbour: int, is_parent: bool) -> None:
        node = self._job.record.manifest.nodes[neighbour]
        reachable = True
        while True:
            await self._dirty[neighbour].wait()
            self._dirty[neighbour].clear()
            try:
                await self._send(node, is_parent)
            except (grpc.RpcError, OSError, ReftError) as error:
                if reachable:
                    log.warning("job=%s node=%s does not hear the round: %s", self._job.id, node.name, _reason(error))
                reachable = False
                self._dirty[neighbour].set()
                await asyncio.sleep(RETRY_S)
            else:
                reachable = True

    async def _send(self, node: pb.Node, is_parent: bool) -> None:
        job = self._job
        if job.round is None or self._failpoints.hit("round.send"):
            return
        epoch = messages.epoch_to(job.epoch)
        if not is_parent:
            await self._call(node, "Announce", messages.outcome_to(job.id, job.epoch, job.round.outcome))
            return
        answers: Sequence[pb.StepAnswer] = messages.answers_to(job.round.undecided())
        if answers:
            request = pb.GatherRequest(job=job.id, epoch=epoch, node_index=job.record.node_index, answers=answers)
            job.hear_outcome(messages.outcome_from(await self._call(node, "Gather", request)))

    async def _call(self, node: pb.Node, method: str, request: object) -> pb.Outcome:
        token = self._job.record.manifest.token
        return await self._peers.call(node, token, pb_grpc.PeerStub, method, request, DEADLINE_S)  # type: ignore[return-value]


def _reason(error: Exception) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
