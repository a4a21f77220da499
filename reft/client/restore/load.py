"""REFT-load: every rank gets all bytes of its cells, from the shards that lie in the slots of all ranks.

    slot's file ─► own tensors ─► digest of each chunk there ─┐                                   ┌────────────────────────┐
    slot, mapped: what is not theirs ─► digest of each chunk ─┴─► messages ═► live memory of others│ list of pieces: pieces │
                     (wrong: noted, and still sent)                                               │                        │
    parity of lost shards ════════════════════════════════════► buffer ─► decoded into live memory└────────────────────────┘
    at the end: senders tell whether all was right; who lost its slot compares what it has now with its old digests

Invariants
  1. All ranks take their part in the same list of pieces in the same order (load_plan.py), with a window of messages under way:
     no order of events makes ranks wait in a circle, and a bad chunk stops nobody.
  2. Nothing is sent before its chunk's digest was compared; a rank reads and digests each chunk once.
  3. Beside slots and tensors a rank holds at most Sizes.memory_max bytes, whatever the state's size; of a device, the decoder's
     scratch.
  4. A rank that lost its slot compares what it got with the digests that were taken when the slot was saved, if somebody has
     them and nobody found a damaged slot.

Messages arrive in a tensor's own memory where a piece is one run of one dense tensor on the host. Else, and for tensors on a
device, they arrive in a bounded buffer (pinned if there is a device) and are copied on. Shards of a device are decoded there
(`reft.client.restore.decode`), others on the host; their digests are taken on the host in either case.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from reft.client.restore.decode import Decoder
from reft.client.restore.executor import TransferExecutor
from reft.client.restore.load_plan import LoadPlan, LoadSizes
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport
from reft.client.restore.verified_slot import AtChunk, SlotSource, VerifiedSlotReader
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, align
from reft.errors import RestoreError
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest

THREADS = 2  # one core nearly saturates memory; the second hides page faults
RUN_BYTES = 32 << 20  # of kept leaves
DEFAULT_SIZES = LoadSizes()


def load(
    transport: Transport | None, placement: Placement, rank: int, have: frozenset[int], reader_of: Mapping[int, int],
    slots: Mapping[int, SlotMap], tensors: Mapping[str, torch.Tensor], absent: Collection[str],
    lost_digests: Mapping[int, npt.NDArray[np.uint64]], at_chunk: AtChunk, sizes: LoadSizes = DEFAULT_SIZES,
    decoder: Decoder | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Fills the live tensors of this rank's cells, and gives the other ranks what they need; all ranks call it together.

    Args:
        transport: to the other ranks; None if there are none.
        placement: under which the slots were written.
        rank: this rank; it takes over what the old rank of the same number had.
        have: old ranks whose slots are at hand somewhere.
        reader_of: old rank → new rank that reads its slot, the same on all ranks.
        slots: old rank → its slot, for those that this rank reads.
        tensors: live tensors by name.
        absent: names of predicted leaves that did not exist: zeros, not loaded.
        lost_digests: old rank → digest of each chunk of its lost slot; only this rank's own is looked at.
        at_chunk: called before each chunk that is read, from several threads.
        sizes: the same on all ranks.
        decoder: for the device of the tensors; None: on the host.

    Returns:
        Old ranks whose slots this rank read and found damaged. If there are any, what was loaded is of no use.

    Raises:
        RestoreError: a rank is gone, or the bytes of a lost slot are not what they were.
        LayoutChanged: a leaf has no tensor.
        ValueError: a stripe can't be decoded from these slots.
    """
    sequencer, decoder = LoadPlan(placement, have, reader_of, sizes), decoder or Decoder()
    read = {old: SlotSource(slot, placement, old, at_chunk) for old, slot in slots.items() if old in have}
    own = placement.division.cells_of[placement.division.layout_of[rank]]
    cells = [placement.division.cells[cell] for cell in own]
    flat_views = {
        number: FlatTensorView(cell.leaves, cell.offsets, tensors, absent, decoder.device)
        for number, cell in zip(own, cells, strict=True)
    }
    decoder.begin()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="reft-load") as pool:
        is_pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
        flow = TransferExecutor(transport, rank, sequencer, read, flat_views, pool, decoder, is_pinned)
        flow.run()
        all_well = flow.verdicts()
        for flat_view in flat_views.values():
            flat_view.finish()
        damaged = tuple(sorted(old for old, source in read.items() if source.is_bad))
        if own and rank not in have and rank in lost_digests and all_well:
            _verify(placement, rank, flat_views, lost_digests[rank], pool)
    return damaged


def load_unreplicated(
    slot: SlotMap, kept: Layout, tensors: Mapping[str, torch.Tensor], at_chunk: AtChunk, run_bytes: int = RUN_BYTES
) -> bool:
    """Copies a rank's kept leaves from its own slot; whether all their chunks were right.

    Args:
        slot: sealed, of this rank.
        kept: the kept leaves; offsets count from the beginning of the slot's data.
        tensors: live tensors by name.
        at_chunk: called before each chunk, from several threads.
        run_bytes: what one thread loads at a time, at least.
    """
    if not kept.leaves:
        return True
    flat_view = FlatTensorView(kept.leaves, kept.offsets, tensors)
    end = max(offset + leaf.nbytes for leaf, offset in zip(kept.leaves, kept.offsets, strict=True))
    source = VerifiedSlotReader(slot, end, at_chunk)
    size = slot.header.geometry.chunk_bytes
    # Each thread takes the next run of chunks: some are slower, where pages are not made yet. Long ones: two threads that meet
    # in one fresh huge page would both clear it.
    step = align(run_bytes, size)

    def run(begin: int) -> None:
        for memory, first, last, at in flat_view.parts(begin, min(begin + step, end)):
            _load_run(source, begin + at, memory[first:last])

    with ThreadPoolExecutor(THREADS, thread_name_prefix="reft-load") as pool:
        list(pool.map(run, range(min(kept.offsets) // size * size, end, step)))
    flat_view.finish()
    return not source.is_bad


def _load_run(source: VerifiedSlotReader, begin: int, memory: Bytes | torch.Tensor) -> None:
    """Copies a slot's data from `begin` on into live memory, of the host or a device."""
    if not isinstance(memory, torch.Tensor):
        source.copy(begin, memory)
        return
    for at, stop in source.checked(begin, begin + memory.nbytes):
        memory[at - begin : stop - begin].copy_(torch.from_numpy(source.data[at:stop]))


def _verify(
    placement: Placement,
    rank: int,
    flat_views: Mapping[int, FlatTensorView],
    digests: npt.NDArray[np.uint64],
    pool: ThreadPoolExecutor,
) -> None:
    """Compares the data shards that a lost slot had with its digests.

    The parity that it had is not made again: it is a function of bytes that others hold.

    Raises:
        RestoreError: they differ.
    """
    shards = _Shards(placement, rank, flat_views)
    if len(digests) < shards.chunks:
        raise RestoreError(
            f"rank {rank} has {len(digests)} digests of its lost slot; its data shards take {shards.chunks}."
        )

    def share(part: int) -> None:
        room = np.empty(placement.chunk_bytes, np.uint8)
        for index in range(shards.chunks * part // THREADS, shards.chunks * (part + 1) // THREADS):
            if shards.digest(index, room) != int(digests[index]):
                raise RestoreError(
                    f"chunk {index} of rank {rank}, which was loaded from its peers, is not what was saved; it lies in lane "
                    f"{shards.lane_of(index)} (ranks {placement.lanes[shards.lane_of(index)].members[:8]}).",
                    "bring back the lost node's memory, or go back to a checkpoint",
                )

    list(pool.map(share, range(THREADS)))


class _Shards:
    """The data section of a rank's slot, put together again from its live tensors."""

    def __init__(self, placement: Placement, rank: int, flat_views: Mapping[int, FlatTensorView]) -> None:
        part = placement.part(rank)
        self._lanes, self._spaces = placement.lanes, flat_views
        self._size = placement.chunk_bytes
        self._blocks = part.blocks[: part.data_blocks]
        self._begins = [block.offset for block in self._blocks]
        self._end = min(part.parity_offset, part.data_bytes)
        self.chunks = -(-self._end // self._size)

    def lane_of(self, chunk: int) -> int:
        """The lane in which a chunk begins."""
        return self._blocks[bisect_right(self._begins, chunk * self._size) - 1].lane

    def digest(self, chunk: int, room: npt.NDArray[np.uint8]) -> int:
        """The digest of one chunk, put together in `room` if it does not lie in one tensor."""
        at, end = chunk * self._size, min((chunk + 1) * self._size, self._end)
        room = room[: end - at]
        room[:] = 0
        for index in range(bisect_right(self._begins, at) - 1, len(self._blocks)):
            block = self._blocks[index]
            if block.offset >= end:
                break
            lane = self._lanes[block.lane]
            begin = lane.data_range(block.stripe, block.shard)[0]
            first, last = max(at, block.offset) - block.offset, min(end - block.offset, block.nbytes)
            last = min(last, lane.begin + lane.nbytes - begin)  # padding is zeros
            if first >= last:
                continue
            flat_view = self._spaces[lane.cell]
            view = flat_view.view(begin + first, begin + last)
            if view is not None and view.nbytes == room.nbytes:
                return chunk_digest(view)
            start = block.offset + first - at
            flat_view.read(begin + first, room[start : start + last - first])
        return chunk_digest(room)
