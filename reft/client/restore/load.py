"""REFT-load: fills every rank's cells from the shards in all ranks' slots.

    slot's file ─► own tensors ─► digest of each chunk there ────┐
    slot, mapped: bytes of others ─► digest of each chunk ───────┴─► messages ═► live memory
                     (wrong: recorded, and still sent)               of other ranks
    parity of lost shards ═══════► buffer ─► decoded into live memory

    messages travel in the order of the load plan
    at the end: senders report whether all chunks were right;
    a rank that lost its slot compares with the old digests

Invariants
  1. All ranks process the same load plan in the same order (load_plan.py), with a window of
     messages under way. So ranks never deadlock, and a bad chunk does not stop a rank.
  2. A chunk is compared with its digest before it is sent. A rank reads and digests each chunk
     once.
  3. Beside slots and tensors a rank holds at most LoadSizes.memory_max bytes, independent of the
     state's size. On a device it holds the decoder's scratch.
  4. A rank that lost its slot compares the loaded bytes with the digests taken when the slot was
     saved, if these digests survive and no rank found a damaged slot.

Messages arrive in a tensor's own memory if a range is one run of one dense tensor on the host.
Else, and for tensors on a device, they arrive in a bounded buffer (pinned if there is a device) and
are copied on. Shards of a device are decoded there (`reft.client.restore.decode`), others on the
host. Their digests are computed on the host in both cases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from reft.client.restore.decode import Decoder
from reft.client.restore.executor import LocalShards, PeerMessages, TransferExecutor
from reft.client.restore.load_plan import LoadPlan, LoadSizes
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport
from reft.client.restore.verified_slot import AtChunk, SlotSource, VerifiedSlotReader
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Layout, align
from reft.errors import RestoreError
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest

THREADS = 2  # one core nearly saturates memory; the second hides page faults
RUN_BYTES = 32 << 20  # of unreplicated leaves, loaded by one thread at a time
DEFAULT_SIZES = LoadSizes()


def load(
    transport: Transport | None, placement: Placement, rank: int, have: frozenset[int], reader_of: Mapping[int, int],
    slots: Mapping[int, SlotMap], tensors: Mapping[str, torch.Tensor], absent: Collection[str],
    lost_digests: Mapping[int, npt.NDArray[np.uint64]], at_chunk: AtChunk, sizes: LoadSizes = DEFAULT_SIZES,
    decoder: Decoder | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Fills this rank's live tensors and serves the other ranks; all ranks call it together.

    Args:
        transport: to the other ranks; None if there are none.
        placement: the placement that the slots were written with.
        rank: this rank; it takes over the state of the old rank with the same number.
        have: old ranks whose slots are readable by some rank.
        reader_of: old rank → new rank that reads its slot; the same on all ranks.
        slots: old rank → its slot, for the slots that this rank reads.
        tensors: live tensors by name.
        absent: names of predicted leaves that did not exist: zeros in the cell, not loaded.
        lost_digests: old rank → digest of each chunk of its lost slot; only this rank's own is
            used.
        at_chunk: called before each chunk is read, from several threads.
        sizes: the same on all ranks.
        decoder: the decoder for the tensors' device; None: on the host.

    Returns:
        Old ranks whose slots this rank read and found damaged. If any rank returns one, the loaded
        bytes are useless.

    Raises:
        RestoreError: a rank is gone, or the bytes of a lost slot differ from the saved ones.
        LayoutChanged: a leaf has no tensor.
        ValueError: a stripe cannot be decoded from these slots.
    """
    load_plan, decoder = LoadPlan(placement, have, reader_of, sizes), decoder or Decoder()
    sources = {old: SlotSource(slot, placement, old, at_chunk) for old, slot in slots.items() if old in have}
    own_cells = placement.division.cells_of[placement.division.layout_of[rank]]
    cells = [placement.division.cells[cell] for cell in own_cells]
    flat_views = {
        number: FlatTensorView(cell.leaves, cell.offsets, tensors, absent, decoder.device)
        for number, cell in zip(own_cells, cells, strict=True)
    }
    decoder.begin()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="reft-load") as pool:
        is_pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
        peers = PeerMessages(transport, rank)
        local = LocalShards(rank, placement.lanes, sources, flat_views)
        TransferExecutor(load_plan, peers, local, pool, decoder, is_pinned).run()
        all_right = peers.exchange_verdicts(local.is_bad)
        for flat_view in flat_views.values():
            flat_view.finish()
        damaged = tuple(sorted(old for old, source in sources.items() if source.is_bad))
        if own_cells and rank not in have and rank in lost_digests and all_right:
            _verify(placement, rank, flat_views, lost_digests[rank], pool)
    return damaged


def load_unreplicated(
    slot: SlotMap,
    unreplicated: Layout,
    tensors: Mapping[str, torch.Tensor],
    at_chunk: AtChunk,
    run_bytes: int = RUN_BYTES,
) -> bool:
    """Copies a rank's unreplicated leaves from its own slot; returns whether all chunks were right.

    Args:
        slot: this rank's sealed slot.
        unreplicated: the unreplicated leaves; offsets count from the beginning of the slot's data.
        tensors: live tensors by name.
        at_chunk: called before each chunk, from several threads.
        run_bytes: the least that one thread loads at a time.
    """
    if not unreplicated.leaves:
        return True
    flat_view = FlatTensorView(unreplicated.leaves, unreplicated.offsets, tensors)
    end = max(offset + leaf.nbytes for leaf, offset in zip(unreplicated.leaves, unreplicated.offsets, strict=True))
    source = VerifiedSlotReader(slot, end, at_chunk)
    size = slot.header.geometry.chunk_bytes
    # Each thread takes the next run of chunks, because some threads are slower: their pages are not
    # made yet. Runs are long: two threads in one fresh huge page would both clear the page.
    step = align(run_bytes, size)

    def run(begin: int) -> None:
        for memory, first, last, at in flat_view.parts(begin, min(begin + step, end)):
            _load_run(source, begin + at, memory[first:last])

    with ThreadPoolExecutor(THREADS, thread_name_prefix="reft-load") as pool:
        list(pool.map(run, range(min(unreplicated.offsets) // size * size, end, step)))
    flat_view.finish()
    return not source.is_bad


def _load_run(source: VerifiedSlotReader, begin: int, memory: Bytes | torch.Tensor) -> None:
    """Copies a slot's data from `begin` on into live memory."""
    if not isinstance(memory, torch.Tensor):
        source.copy(begin, memory)
        return
    for at, stop in source.verify_chunks(begin, begin + memory.nbytes):
        memory[at - begin : stop - begin].copy_(torch.from_numpy(source.data[at:stop]))


def _verify(
    placement: Placement,
    rank: int,
    flat_views: Mapping[int, FlatTensorView],
    digests: npt.NDArray[np.uint64],
    pool: ThreadPoolExecutor,
) -> None:
    """Compares the data shards of a lost slot with its digests.

    The slot's parity is not computed again: it is a function of bytes that other ranks hold.

    Raises:
        RestoreError: the bytes differ.
    """
    shards = _Shards(placement, rank, flat_views)
    if len(digests) < shards.chunks:
        raise RestoreError(
            f"rank {rank} has {len(digests)} digests of its lost slot; its data shards have {shards.chunks} chunks."
        )

    def verify_part(thread: int) -> None:
        buffer = np.empty(placement.chunk_bytes, np.uint8)
        for index in range(shards.chunks * thread // THREADS, shards.chunks * (thread + 1) // THREADS):
            if shards.digest(index, buffer) != int(digests[index]):
                raise RestoreError(
                    f"chunk {index} of rank {rank}, loaded from its peers, differs from the saved bytes; it lies in lane "
                    f"{shards.lane_of(index)} (ranks {placement.lanes[shards.lane_of(index)].members[:8]}).",
                    "bring back the lost node's memory, or go back to a checkpoint",
                )

    list(pool.map(verify_part, range(THREADS)))


class _Shards:
    """The data section of a rank's slot, assembled from its live tensors."""

    def __init__(self, placement: Placement, rank: int, flat_views: Mapping[int, FlatTensorView]) -> None:
        part = placement.rank_placement(rank)
        self._lanes, self._flat_views = placement.lanes, flat_views
        self._size = placement.chunk_bytes
        self._blocks = part.blocks[: part.data_blocks]
        self._begins = [block.offset for block in self._blocks]
        self._end = min(part.parity_offset, part.data_bytes)
        self.chunks = -(-self._end // self._size)

    def lane_of(self, chunk: int) -> int:
        """Returns the lane in which a chunk begins."""
        return self._blocks[bisect_right(self._begins, chunk * self._size) - 1].lane

    def digest(self, chunk: int, buffer: npt.NDArray[np.uint8]) -> int:
        """Returns the digest of one chunk.

        The chunk is assembled in `buffer` unless all of it lies in one tensor.
        """
        at, end = chunk * self._size, min((chunk + 1) * self._size, self._end)
        buffer = buffer[: end - at]
        buffer[:] = 0
        for index in range(bisect_right(self._begins, at) - 1, len(self._blocks)):
            block = self._blocks[index]
            if block.offset >= end:
                break
            lane = self._lanes[block.lane]
            begin = lane.data_range(block.stripe, block.shard)[0]
            first, last = max(at, block.offset) - block.offset, min(end - block.offset, block.nbytes)
            last = min(last, lane.begin + lane.nbytes - begin)  # the rest is padding: zeros
            if first >= last:
                continue
            flat_view = self._flat_views[lane.cell]
            view = flat_view.view(begin + first, begin + last)
            if view is not None and view.nbytes == buffer.nbytes:
                return chunk_digest(view)
            start = block.offset + first - at
            flat_view.read(begin + first, buffer[start : start + last - first])
        return chunk_digest(buffer)
