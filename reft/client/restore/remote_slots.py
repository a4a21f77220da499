"""Slots and capsules that this rank must read and that lie on other nodes."""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from reft.core.commit.version import Version
from reft.core.recovery.recovery import HeldSlot, RecoveryPlan
from reft.errors import FormatError, RestoreError
from reft.wire import messages, rpc
from reft.wire.slot_format import PAGE, Bytes, SlotMap, best_header
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

FAR_BYTES_PER_S = 10 << 20  # a tenth of what one daemon gives on a slow network: several ranks may read from it at once
# Its daemon answers, and what was asked for is damaged, or gone: no source any more, as a damaged slot of one's own is none.
_LOST = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND)


def far_s(sources: Mapping[int, HeldSlot], reader_of: Mapping[int, int], nodes: Mapping[str, Sequence[int]]) -> float:
    """How many seconds all ranks may have to wait for the one that reads most from other nodes.

    Args:
        sources: old rank → its slot.
        reader_of: old rank → new rank that reads it.
        nodes: id of each node → the ranks that run there now.
    """
    far = Counter[int]()
    for old, held in sources.items():
        if reader_of[old] not in nodes.get(held.node, ()):
            far[reader_of[old]] += held.data_bytes
    return max(far.values(), default=0) / FAR_BYTES_PER_S


@dataclass(frozen=True)
class RemoteSlots:
    """What daemons of other nodes hold of one job, by way of this node's own: it has the certificates, and knows the ways.

    Args:
        job: its name.
        address: of this node's daemon.
        own: id of this node.
        nodes: node id → the node.
        deadline_s: of one call, beside what its bytes take.
    """

    job: str
    address: str
    own: str
    nodes: Mapping[str, pb.Node]
    deadline_s: float

    def slot(self, held: HeldSlot) -> SlotMap:
        """The bytes of a slot on another node.

        Raises:
            FormatError: it is damaged, or not there.
            RestoreError: its daemon did not give them.
        """
        head = np.zeros(2 * PAGE, np.uint8)
        self._read_into(held, head)
        geometry = best_header(head).geometry
        room = np.frombuffer(mmap.mmap(-1, geometry.file_bytes), np.uint8)
        self._read_into(held, room)
        return SlotMap(room)

    def capsule(self, node: str, rank: int, version: Version) -> pb.CapsuleRecord:
        """A capsule that a node keeps.

        Raises:
            FormatError: it is damaged, or not there.
            RestoreError: its daemon did not give it.
        """
        request = pb.CapsuleRequest(
            job=self.job, rank=rank, version=messages.version_to(version), node=self._elsewhere(node)
        )
        with self._stub(node, rank) as stub:
            record: pb.CapsuleRecord = stub.FetchCapsule(request, timeout=self.deadline_s)
        return record

    def earlier(self, plan: RecoveryPlan, rank: int) -> Iterator[bytes]:
        """The capsules that are left of a rank's steps before the plan's base, but for those that nobody gives."""
        for version, node in plan.earlier.get(rank, ()):
            with contextlib.suppress(FormatError, RestoreError):
                yield self.capsule(node, rank, version).capsule

    def _read_into(self, held: HeldSlot, room: Bytes) -> None:
        """Fills `room` with the slot's first bytes."""
        assert held.version is not None, "a slot without a version is no source"
        request = pb.ReadRequest(
            job=self.job,
            slot=held.slot,
            version=messages.version_to(held.version),
            offset=0,
            size=room.nbytes,
            node=self._elsewhere(held.node),
        )
        at = 0
        with self._stub(held.node, held.rank) as stub:
            for chunk in stub.Read(request, timeout=self.deadline_s + room.nbytes / FAR_BYTES_PER_S):
                room[at : at + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
                at += len(chunk.data)
        if at != room.nbytes:
            raise FormatError(f"slot {held.slot} on node {held.node} gave {at} of {room.nbytes} bytes.")

    def _elsewhere(self, node: str) -> pb.Node | None:
        """Whom this node's daemon is to ask; None: nobody."""
        return None if node == self.own else self.nodes[node]

    @contextlib.contextmanager
    def _stub(self, node: str, rank: int) -> Iterator[pb_grpc.DaemonStub]:
        with rpc.channel(self.address) as channel:
            try:
                yield pb_grpc.DaemonStub(channel)
            except grpc.RpcError as error:
                name = self.nodes[node].name if node in self.nodes else node
                kind = FormatError if error.code() in _LOST else RestoreError
                raise kind(
                    f"what rank {rank} needs lies on node {name}, and can't be read: {rpc.error_of(error, self.address)}"
                ) from error
