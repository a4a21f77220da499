"""Reads slots and capsules from which lost slots are made, on any node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import grpc
import numpy as np

from reft.core.commit.slots import SlotState
from reft.errors import AttachError, FormatError, ReftError
from reft.wire import messages
from reft.wire.slot_format import PAGE, Bytes, best_header
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.jobs import capsules, slot_reads
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.peers.channels import PeerChannels, reason_of

READ_DEADLINE_S = 30.0
PATIENCE_S = 5.0


class DamagedSource(Exception):
    """A slot or a capsule that the rebuild needs is damaged or missing."""

    def __init__(self, node: pb.Node, slot: str, reason: str) -> None:
        super().__init__(f"{slot} on node {node.name}: {reason}")
        self.node, self.slot = node, slot


@dataclass
class SourceReader:
    """Reads the sources of one request to rebuild slots.

    Args:
        node_id: of this node.
        peers: channels to the other nodes.
        job: the job here.
        request: names the sources and their nodes.
        world: number of ranks of the version; parity numbers begin there.

    Attributes:
        read_bytes: bytes of slots that were read.
    """

    node_id: str
    peers: PeerChannels
    job: JobRecord
    request: pb.RebuildRequest
    world: int
    read_bytes: int = 0
    # rank, or parity number → offset of the data in its slot's file
    _data_offsets: dict[int, int] = field(default_factory=dict)

    async def capsule(self, lost: pb.LostRank) -> pb.CapsuleRecord:
        """Returns the capsule of a lost rank.

        Raises:
            DamagedSource: the capsule is missing, or has changed on its way.
            AttachError: its node can't be reached.
        """
        request, node, name = self.request, self.request.nodes[lost.keeper], f"capsule-{lost.rank}"
        version = messages.version_from(request.version)
        if node.id == self.node_id:
            record = capsules.capsule(self.job, lost.rank, version)
        else:
            wanted = pb.CapsuleRequest(job=self.job.id, rank=lost.rank, version=request.version)
            ask = partial(
                self.peers.call,
                node,
                messages.known_tokens(request.manifest),
                pb_grpc.DaemonStub,
                "FetchCapsule",
                wanted,
            )
            record = await _answer(node, name, partial(ask, READ_DEADLINE_S))
        if record is None or record.rank != lost.rank or messages.version_from(record.version) != version:
            raise DamagedSource(node, name, "the capsule is missing")
        try:
            messages.check_capsule(record)
        except FormatError as error:
            raise DamagedSource(node, name, error.message) from error
        return record

    async def check(self, ranks: Iterable[int]) -> None:
        """Checks the headers of the slots of these ranks and parity numbers; `read` needs them.

        Raises:
            DamagedSource: a slot is damaged, gone, or of another version.
            AttachError: a node can't be reached.
        """
        await asyncio.gather(*(self._check(rank, self._sources[rank]) for rank in ranks))

    async def _check(self, number: int, source: pb.SlotSource) -> None:
        head = np.zeros(2 * PAGE, np.uint8)
        await self._read(source, 0, head, checked=False)
        node, version = self.request.nodes[source.node], messages.version_from(self.request.version)
        try:
            header = best_header(head)
        except FormatError as error:
            raise DamagedSource(node, source.slot, str(error)) from error
        if (header.rank, header.version, header.state) != (source.rank, version, SlotState.SEALED):
            raise DamagedSource(node, source.slot, f"it holds {header.version} of rank {header.rank}")
        self._data_offsets[number] = header.geometry.data_offset

    async def read(self, rank: int, offset: int, into: Bytes) -> None:
        """Fills `into` with data of a rank's slot, or of a parity number's.

        The slot's node compares digests first.

        Raises:
            DamagedSource: the slot is damaged, gone, or of another version.
            AttachError: its node can't be reached.
        """
        await self._read(self._sources[rank], self._data_offsets[rank] + offset, into, checked=True)

    def node_names(self, ranks: Iterable[int]) -> list[str]:
        """Returns the names of the nodes that have these ranks' slots, each once, in order."""
        nodes = (self.request.nodes[self._sources[rank].node] for rank in ranks)
        return list(dict.fromkeys(node.name for node in nodes))

    @cached_property
    def _sources(self) -> dict[int, pb.SlotSource]:
        world = self.world
        parity = {world + source.rank: source for source in self.request.parity}
        return {**{source.rank: source for source in self.request.slots}, **parity}

    async def _read(self, source: pb.SlotSource, offset: int, into: Bytes, checked: bool) -> None:
        request, node = self.request, self.request.nodes[source.node]
        read_request = pb.ReadRequest(
            job=self.job.id, slot=source.slot, version=request.version, offset=offset, size=into.nbytes, checked=checked
        )
        if node.id == self.node_id:
            read = partial(slot_reads.read_here, self.job, read_request, into)
        else:
            read = partial(
                self.peers.read, node, messages.known_tokens(request.manifest), read_request, into, READ_DEADLINE_S
            )
        await _answer(node, source.slot, read)
        self.read_bytes += into.nbytes


async def _answer(node: pb.Node, source: str, call: Callable[[], Awaitable[Any]]) -> Any:
    """Returns the result of a call that asks a node for a source.

    The call is repeated for PATIENCE_S while the daemon is unavailable, which may be restarting:
    gRPC itself connects again only once a second.

    Raises:
        DamagedSource: the source is damaged, gone, or of another version.
        AttachError: the node can't be reached.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except (grpc.RpcError, OSError, ReftError) as error:
            if slot_reads.is_damage(error):
                raise DamagedSource(node, source, reason_of(error)) from error
            is_unavailable = isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE
            if not is_unavailable or time.monotonic() > end:
                text = f"node {node.name} can't be read: {reason_of(error)}."
                raise AttachError(text, "check its daemon, and try again") from error
        await asyncio.sleep(0.2)
