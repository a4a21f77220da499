"""Ways to a slot or a capsule that this rank must read: mapped from its own node's daemon, or fetched from another one."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from reft.core.recovery import Held
from reft.core.version import Version
from reft.errors import RestoreError
from reft.wire import messages, rpc
from reft.wire.slot_format import PAGE, Bytes, SlotMap, best_header
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

Ask = Callable[[pb_grpc.DaemonStub, tuple[tuple[str, bytes], ...]], Any]


@dataclass(frozen=True)
class Remote:
    """The daemons of other nodes, for one job.

    Args:
        job: its name.
        token: of the manifest under which the other daemons hold it.
        nodes: node id → its addresses. An address of this node's own daemon must not stand for another node.
        deadline_s: of one call.
    """

    job: str
    token: bytes
    nodes: Mapping[str, Sequence[str]]
    deadline_s: float

    def slot(self, held: Held, needs_data: bool) -> SlotMap:
        """The bytes of a slot on another node; only the parts before the data, unless its data are needed too.

        Raises:
            RestoreError: no daemon gave them.
        """
        head = np.zeros(2 * PAGE, np.uint8)
        self._read_into(held, head)
        geometry = best_header(head).geometry
        # Anonymous pages: what is not fetched costs nothing.
        room = np.frombuffer(mmap.mmap(-1, geometry.file_bytes), np.uint8)
        self._read_into(held, room if needs_data else room[: geometry.data_offset])
        return SlotMap(room)

    def capsule(self, node: str, rank: int, version: Version) -> pb.CapsuleRecord:
        """A capsule that a node keeps.

        Raises:
            RestoreError: no daemon gave it.
        """
        request = pb.CapsuleRequest(job=self.job, rank=rank, version=messages.version_to(version))
        return self._ask(
            node,
            lambda stub, token: stub.FetchCapsule(request, timeout=self.deadline_s, metadata=token),
            f"rank {rank}",
        )  # type: ignore[no-any-return]

    def _read_into(self, held: Held, room: Bytes) -> None:
        """Fills `room` with the slot's first bytes."""
        assert held.version is not None, "a slot without a version is no source"
        version = messages.version_to(held.version)
        request = pb.ReadRequest(job=self.job, slot=held.slot, version=version, offset=0, size=room.nbytes)

        def ask(stub: pb_grpc.DaemonStub, token: tuple[tuple[str, bytes], ...]) -> None:
            at = 0
            for chunk in stub.Read(request, timeout=self.deadline_s, metadata=token):
                room[at : at + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
                at += len(chunk.data)
            if at != room.nbytes:
                raise RestoreError(f"slot {held.slot} on node {held.node} gave {at} of {room.nbytes} bytes.")

        self._ask(held.node, ask, f"rank {held.rank}")

    def _ask(self, node: str, ask: Ask, what: str) -> Any:
        failures = []
        for address in self.nodes.get(node, ()):
            with rpc.channel(address) as channel:
                try:
                    return ask(pb_grpc.DaemonStub(channel), rpc.token_metadata(self.token))
                except grpc.RpcError as error:
                    failures.append(str(rpc.error_of(error, address)))
        raise RestoreError(f"what {what} needs lies on node {node}, and can't be read there: {failures}.")
