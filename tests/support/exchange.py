"""Jobs whose ranks have state of their own, which nodes exchange parity of."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from reft.core.coding.placement import Placement
from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.core.layout.layout import Leaf
from reft.wire import capsule_format, rpc
from reft.wire.manifest import placement_of
from reft.wire.slot_format import PAGE, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Job
from tests.support.manifests import described
from tests.support.trainer_forks import Trainer
from tests.support.two_level import expected_parity

CHUNK = 64 << 10
SHARED = 3 * CHUNK + 100
SLOTS = 4
SEALED = StepAnswer.SEALED
SIZES = (9 * CHUNK, 7 * CHUNK + 321, 8 * CHUNK)


def leaf(name: str, nbytes: int) -> Leaf:
    return Leaf(name, "uint8", (nbytes,), (1,), nbytes, False, (nbytes,), (0,))


def exchange_fields(sizes: Sequence[int], protect: str = "auto") -> dict[str, Any]:
    """Returns fields of a manifest: each rank has one replicated leaf, and one of its own."""
    return {"protect": protect, "tolerate": -1, "chunk_bytes": CHUNK, "slots": SLOTS, **described_of(sizes)}


def described_of(sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the layout fields of such a manifest."""
    return described(*([leaf("shared", SHARED), leaf(f"own{rank}", size)] for rank, size in enumerate(sizes)))


def rank_data(placement: Placement, rank: int, step: int) -> bytes:
    """Returns the data of a rank's slot: random, without any code between replicas."""
    return random.Random(f"{rank} {step}").randbytes(placement.rank_placement(rank).data_bytes)


def write_step(slot: SlotMap, version: Version, data: bytes) -> None:
    """Writes and seals a version, as a trainer does."""
    slot.begin(version, b"l" * 16, b"", len(data))
    slot.put_capsule(capsule_format.encode({"compared": {}}))
    slot.write(0, np.frombuffer(data, np.uint8))
    slot.landed()
    slot.sealed(np.fromiter(slot.digests_of(0, slot.chunks), np.uint64))


class ShardedJob(Job):
    """A job whose ranks, one on each node, have one replicated leaf and one of their own."""

    def __init__(
        self,
        daemons: Sequence[DaemonProcess],
        sizes: Sequence[int],
        trainer: Trainer | None = None,
        tolerate: int = -1,
        protect: str = "auto",
    ) -> None:
        nodes = [(daemon, [rank]) for rank, daemon in enumerate(daemons)]
        super().__init__(nodes, **exchange_fields(sizes, protect) | {"tolerate": tolerate})
        self.placement = placement_of(self.manifest)
        (self.lane,) = self.placement.guard_lanes
        self.sizes, self.trainer = sizes, trainer
        self.maps_of: dict[int, list[SlotMap]] = {}

    def begin(self) -> ShardedJob:
        self.decide()
        for rank in self.home:
            self.maps_of[rank] = self.maps(rank, self.lease_all(rank))
        return self

    def lease_all(self, rank: int) -> list[str]:
        data_bytes = self.placement.rank_placement(rank).data_bytes
        return self.lease(rank, self.trainer, slots=SLOTS, data_bytes=data_bytes, table_bytes=PAGE, chunk_bytes=CHUNK)

    def data(self, rank: int, step: int) -> bytes:
        return rank_data(self.placement, rank, step)

    def section(self, rank: int, step: int) -> bytes:
        begin = self.placement.rank_placement(rank).unreplicated_offset
        return self.data(rank, step)[begin:]

    def seal(self, step: int) -> None:
        """Seals a step on all ranks, and reports it."""
        for rank in self.home:
            self.write(rank, step)
        for rank in self.home:
            self.report(rank, {step: SEALED})

    def write(self, rank: int, step: int) -> SlotMap:
        slot = self.maps_of[rank][step % SLOTS]
        write_step(slot, self.version(step), self.data(rank, step))
        return slot

    def exchange(self, node: int = 0) -> pb.ExchangeStatus:
        return self.daemons[node].status(self.name).exchange

    def await_protected(self, step: int, nodes: Sequence[int] = ()) -> None:
        for node in nodes or range(len(self.daemons)):
            until(lambda node=node: self.exchange(node).protected == step, what=f"protected({step}) on node {node}")

    def parity_headers(self, node: int) -> list[pb.SlotHeader]:
        reply = self.daemons[node].call("Inventory", pb.InventoryRequest(job=self.name))
        return [slot for slot in reply.slots if slot.parity]

    def parity(self, node: int, step: int) -> bytes:
        """Reads the sealed parity of a step on a node, as a recovery does."""
        (header,) = [
            each for each in self.parity_headers(node)
            if each.state == SlotState.SEALED and each.version.step == step and each.layout == self.lane.digest
        ]  # fmt: skip
        (descriptor,) = self.descriptors(node, [header.slot])
        nbytes = os.fstat(descriptor).st_size
        os.close(descriptor)
        data = nbytes - (self.lane.parity_bytes + PAGE - 1) // PAGE * PAGE
        request = pb.ReadRequest(
            job=self.name,
            slot=header.slot,
            version=header.version,
            offset=data,
            size=self.lane.parity_bytes,
            checked=True,
        )
        with rpc.channel(self.daemons[node].address) as channel:
            return b"".join(chunk.data for chunk in pb_grpc.DaemonStub(channel).Read(request, timeout=20))

    def check_parity(self, step: int, nodes: Sequence[int] = ()) -> None:
        sections = [self.section(rank, step) for rank in self.lane.members]
        for node in nodes or range(len(self.daemons)):
            holder = self.lane.members.index(node)
            assert self.parity(node, step) == expected_parity(self.lane, sections, holder)
