"""Makes the slots of all ranks of a job in one process, for a placement.

Passes messages between threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from reft.client.state.tensors import flat_bytes, leaf_of
from reft.core.coding.erasure import encode_program, run
from reft.core.coding.placement import Lane, Placement, place
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import INLINE_BYTES_MAX, divide
from reft.core.layout.layout import Layout, pack
from reft.errors import RestoreError
from reft.wire.messages import table_to
from reft.wire.slot_format import Geometry, SlotMap
from tests.support.two_level import expected_parity

VERSION = Version(Epoch(1, bytes(range(16))), 7)
Tensors = dict[str, torch.Tensor]


def plain_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor's bytes as a slot holds them."""
    layout = leaf_of("", tensor, False)
    plain = torch.empty_strided(layout.shape, layout.stride, dtype=tensor.dtype)
    return flat_bytes(plain.copy_(tensor)).numpy()


def placed(
    ranks: Sequence[Tensors],
    domains: Sequence[int],
    scheme: Any,
    tolerate: int | None,
    chunk_bytes: int,
    slots: int = 0,
    inline_bytes_max: int = INLINE_BYTES_MAX,
) -> Placement:
    """Returns the placement of a job whose ranks have these tensors, and so many slots."""
    layouts: dict[bytes, Layout] = {}
    layout_of = []
    for tensors in ranks:
        layout = pack(leaf_of(name, tensor, False) for name, tensor in tensors.items())
        layouts[layout.digest] = layout
        layout_of.append(layout.digest)
    division = divide(layouts, layout_of, inline_bytes_max=inline_bytes_max)
    return place(division, domains, scheme, tolerate, chunk_bytes, slots)


def slot_data(placement: Placement, rank: int, tensors: Tensors) -> np.ndarray:
    """Returns the data of a rank's slot, uint8."""
    part = placement.rank_placement(rank)
    data = np.zeros(part.data_bytes, np.uint8)
    cells = {}
    for index in placement.division.cells_of[placement.division.layout_of[rank]]:
        cell = placement.division.cells[index]
        cells[index] = np.zeros(cell.nbytes, np.uint8)
        for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
            cells[index][offset : offset + leaf.nbytes] = plain_bytes(tensors[leaf.name])
    for block in part.blocks:
        lane = placement.lanes[block.lane]
        whole = data[block.offset : block.offset + block.nbytes]
        if block.shard < lane.code.k:
            _shard(lane, block.stripe, block.shard, cells[lane.cell], whole)
        else:
            _parity(lane, block.stripe, block.shard, cells[lane.cell], whole)
    for leaf, offset in zip(part.unreplicated.leaves, part.unreplicated.offsets, strict=True):
        at = part.unreplicated_offset + offset
        data[at : at + leaf.nbytes] = plain_bytes(tensors[leaf.name])
    return data


def _shard(lane: Lane, stripe: int, shard: int, cell: np.ndarray, out: np.ndarray) -> None:
    begin, end = lane.data_range(stripe, shard)
    limit = lane.begin + lane.nbytes
    begin, end = min(begin, limit), min(end, limit)
    out[: end - begin] = cell[begin:end]


def _parity(lane: Lane, stripe: int, shard: int, cell: np.ndarray, out: np.ndarray) -> None:
    shards = np.zeros((lane.code.k, lane.shard_bytes), np.uint8)
    for each in range(lane.code.k):
        _shard(lane, stripe, each, cell, shards[each])
    packets = shards.reshape(lane.code.k, lane.code.w, lane.packet_bytes)
    program = encode_program(lane.code, shard - lane.code.k)
    rows = out.reshape(lane.code.w, lane.packet_bytes)
    scratch = list(np.zeros((program.scratch, lane.packet_bytes), np.uint8))
    run(program, [packets[i, r] for i, r in program.inputs], [rows[r] for _, r in program.outputs], scratch)


def make_slot(
    placement: Placement, rank: int, tensors: Tensors, pages: Callable[[int], np.ndarray] | None = None
) -> SlotMap:
    """Returns a sealed slot of a rank.

    Args:
        pages: allocates a number of bytes; None uses numpy.
    """
    data = slot_data(placement, rank, tensors)
    layout = pack(leaf_of(name, tensor, False) for name, tensor in tensors.items())
    geometry = Geometry(1 << 16, max(data.nbytes, 1), placement.chunk_bytes)
    memory = (pages or (lambda n: np.zeros(n, np.uint8)))(geometry.file_bytes)
    slot = SlotMap.create(memory, geometry, "job", rank)
    slot.begin(VERSION, layout.digest, table_to(layout), data.nbytes)
    slot.data[: data.nbytes] = data
    slot.put_capsule(b"capsule")
    slot.landed()
    slot.sealed(np.fromiter(slot.digests_of(0, slot.chunks), np.uint64))
    return slot


def make_parity(placement: Placement, rank: int, slots: Sequence[SlotMap]) -> SlotMap:
    """Returns a member's sealed parity slot, as core/coding/exchange.py draws it."""
    where = placement.guard_lane_of(rank)
    assert where is not None
    lane, holder = placement.guard_lanes[where[0]], where[1]
    parts = [placement.rank_placement(member) for member in lane.members]
    sections = [
        slots[member].data[part.unreplicated_offset : part.data_bytes].tobytes()
        for member, part in zip(lane.members, parts, strict=True)
    ]
    parity = expected_parity(lane, sections, holder)
    geometry = Geometry(1 << 12, len(parity), placement.chunk_bytes)
    slot = SlotMap.create(np.zeros(geometry.file_bytes, np.uint8), geometry, "job", rank)
    slot.begin(VERSION, lane.digest, b"", len(parity))
    slot.data[:] = np.frombuffer(parity, np.uint8)
    slot.landed()
    seal(slot)
    return slot


def seal(slot: SlotMap) -> None:
    """Seals a slot with the digests of its bytes as they are."""
    slot.sealed(np.fromiter(slot.digests_of(0, slot.chunks), np.uint64))


class Postbox:
    """Messages between threads. As with gloo, a message is copied once both sides have posted it.

    Args:
        deadline_s: how long a side waits for the other one.
        reached: called with (sender, receiver) when a message is sent; may raise.
        on_way: called with (sender, receiver, bytes) of each message that arrives; may change the
            bytes.
    """

    def __init__(
        self,
        deadline_s: float = 20.0,
        reached: Callable[[int, int], None] = lambda a, b: None,
        on_way: Callable[[int, int, np.ndarray], None] = lambda a, b, data: None,
    ) -> None:
        self.deadline_s = deadline_s
        self.reached = reached
        self.on_way = on_way
        self.lock = threading.Lock()
        self.waiting: dict[tuple[int, int, int, bool], deque[_Message]] = {}
        self.sent_bytes: dict[tuple[int, int], int] = {}  # by (sender, receiver)
        # (rank, peer) → (sender, tag) in the order of posting
        self.posted: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def of(self, rank: int) -> _Box:
        return _Box(self, rank)

    def post(self, key: tuple[int, int, int], is_send: bool, data: np.ndarray) -> _Message:
        mine = _Message(data, threading.Event(), self.deadline_s)
        sender, receiver, tag = key
        me, peer = (sender, receiver) if is_send else (receiver, sender)
        with self.lock:
            self.posted.setdefault((me, peer), []).append((sender, tag))
            others = self.waiting.setdefault((*key, not is_send), deque())
            if others:
                other = others.popleft()
                source, target = (mine, other) if is_send else (other, mine)
                assert source.data.nbytes == target.data.nbytes, "the two sides disagree on a message"
                target.data[:] = source.data
                self.on_way(sender, receiver, target.data)
                mine.done.set()
                other.done.set()
            else:
                self.waiting.setdefault((*key, is_send), deque()).append(mine)
            if is_send:
                self.sent_bytes[key[:2]] = self.sent_bytes.get(key[:2], 0) + data.nbytes
        return mine


class _Message:
    def __init__(self, data: np.ndarray, done: threading.Event, deadline_s: float) -> None:
        self.data, self.done, self.deadline_s = data, done, deadline_s

    def wait(self) -> None:
        if not self.done.wait(self.deadline_s):
            raise RestoreError("no sign of the other rank")


class _Box:
    name = "memory"

    def __init__(self, office: Postbox, rank: int) -> None:
        self.office, self.rank = office, rank

    def send(self, data: np.ndarray, to: int, tag: int) -> _Message:
        self.office.reached(self.rank, to)
        return self.office.post((self.rank, to, tag), True, data)

    def receive(self, into: np.ndarray, source: int, tag: int) -> _Message:
        return self.office.post((source, self.rank, tag), False, into)


def on_all(world: int, act: Callable[[int], Any]) -> list[Any]:
    """Runs `act(rank)` in a thread for each rank; returns the results, or the exceptions raised."""

    def one(rank: int) -> Any:
        try:
            return act(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def alike(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], names: Sequence[str]) -> bool:
    """Tells whether the tensors have the same bits."""
    return all(np.array_equal(plain_bytes(one[name]), plain_bytes(other[name])) for name in names)
