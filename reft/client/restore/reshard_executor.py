"""One rank's part in the list of parcels and bands: reads, checks, packs, sends, receives, unpacks, in the list's order.

    parcel   sender: chunks against their digests ─► packed (or as they lie) ─► receivers: unpacked into live tensors
    band     readers: k shards' columns ─► rebuilder: decoded ─► compared with the lost slot's digests ─► its parcels

Invariants
  1. Nothing is sent before its chunk's digest was compared. A wrong chunk is noted and stops nobody: a rank that waits for its
     bytes gets them, and all ranks give up what was loaded afterwards.
  2. Beside slots and tensors a rank holds at most Sizes.window of messages, one band, and a chunk for each packet of a shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from reft.client.restore.executor import BufferPool
from reft.client.restore.gather_scatter import Starts, gather, scatter
from reft.client.restore.reshard_decode import ChunkVerifier, StripeDecoder
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport, Work
from reft.client.restore.verified_slot import VerifiedSlotReader
from reft.core.layout.regions import ByteRuns
from reft.core.recovery.regather import LostShardSlice, NeededRange, ReshardPlan, TransferMessage
from reft.core.recovery.shard_matching import PieceSource
from reft.errors import RestoreError
from reft.wire.slot_format import Bytes

TAG = 1


@dataclass
class _UnderWay:
    works: list[Work]
    nbytes: int
    staging: Bytes | None = None
    parcel: TransferMessage | None = None  # to be unpacked from the staging


@dataclass
class ReshardExecutor:
    """See the module.

    Args:
        transport: None if there is nobody to send to.
        rank: this new rank.
        reshard_plan: makes the list.
        slots: old rank → its slot, for those that this rank reads.
        inline_leaves: old rank → name → bytes, for those whose capsules this rank has.
        proofs: old rank → what proves its lost slot, for those that this rank decodes.
        flat_view: the live leaves of this rank.
        offsets: name → where the leaf begins in the space.
        is_pinned: whether messages for a device arrive in pinned memory.
    """

    transport: Transport | None
    rank: int
    reshard_plan: ReshardPlan
    slots: Mapping[int, VerifiedSlotReader]
    inline_leaves: Mapping[int, Mapping[str, bytes]]
    proofs: Mapping[int, ChunkVerifier]
    flat_view: FlatTensorView
    offsets: Mapping[str, int]
    is_pinned: bool
    _under_way: deque[_UnderWay] = field(default_factory=deque)
    _bytes: int = 0
    _bands: StripeDecoder = field(default_factory=StripeDecoder)
    _room: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    _capsules: dict[int, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.reshard_plan.sizes
        self._stagings = BufferPool(max(sizes.window // sizes.piece, 1) + 1, sizes.piece, self.is_pinned)

    def run(self) -> None:
        """All entries that this rank has a part in.

        Raises:
            RestoreError: a peer is gone.
        """
        for entry in self.reshard_plan.entries(self.rank):
            if isinstance(entry, LostShardSlice):
                self._band(entry)
            elif self.rank == entry.sender:
                self._give(entry, *self._source(entry))
            elif self.rank in entry.receivers:
                self._take(entry)
        while self._under_way:
            self._retire()
        self.flat_view.finish()

    @property
    def _peers(self) -> Transport:
        if self.transport is None:
            raise RestoreError(f"rank {self.rank} needs what other ranks have, and has no way to them.")
        return self.transport

    # Parcels

    def _source(self, parcel: TransferMessage) -> tuple[Bytes, Callable[[int], int]]:
        """The bytes that a parcel is made of, checked, and where an offset of its source is in them."""
        if parcel.where is PieceSource.SLOT:
            source = self.slots[parcel.owner]
            for part in parcel.parts:
                self._check(source, part.at, part.at + part.end - part.begin)
            return source.data, lambda at: at
        if parcel.owner not in self._capsules:
            names = [extent.needs[0].piece.name for extent in self.reshard_plan.inline_leaves(parcel.owner)]
            whole = b"".join(self.inline_leaves[parcel.owner][name] for name in names)
            self._capsules[parcel.owner] = np.frombuffer(bytearray(whole), np.uint8)
        return self._capsules[parcel.owner], lambda at: at

    def _check(self, source: VerifiedSlotReader, begin: int, end: int) -> None:
        for _ in source.checked(begin, end):
            pass

    def _give(self, parcel: TransferMessage, source: Bytes, place: Callable[[int], int]) -> None:
        """Sends a parcel, and copies what is for this rank."""
        parts = [(part, _runs(part, place(part.at))) for part in parcel.parts]
        others = [rank for rank in parcel.receivers if rank != self.rank]
        if others:
            staging = None
            if len(parts) == 1 and len(parts[0][1].old) == 1:
                begin = int(parts[0][1].old[0])
                data = source[begin : begin + parcel.nbytes]
            else:
                staging = self._stagings.take(self._retire)
                at = 0
                for _, runs in parts:
                    at += gather(source, runs.old, runs.nbytes, staging[at:])
                data = staging[:at]
            works = [self._peers.send(data, to, TAG) for to in others]
            self._post(_UnderWay(works, parcel.nbytes * len(others), staging))
        if self.rank in parcel.receivers:
            for part, runs in parts:
                room = np.empty(int(runs.nbytes.sum()), np.uint8)
                gather(source, runs.old, runs.nbytes, room)
                self._unpack(part, runs, room)

    def _take(self, parcel: TransferMessage) -> None:
        """Receives a parcel: in place if it is one run of live memory."""
        if len(parcel.parts) == 1:
            part = parcel.parts[0]
            runs = _runs(part, 0)
            if len(runs.new) == 1:
                begin = self.offsets[part.need.leaf.name] + int(runs.new[0])
                view = self.flat_view.view(begin, begin + parcel.nbytes)
                if view is not None:
                    self._post(_UnderWay([self._peers.receive(view, parcel.sender, TAG)], parcel.nbytes))
                    return
        staging = self._stagings.take(self._retire)
        work = self._peers.receive(staging[: parcel.nbytes], parcel.sender, TAG)
        self._post(_UnderWay([work], parcel.nbytes, staging, parcel))

    def _unpack(self, part: NeededRange, runs: ByteRuns, data: Bytes) -> None:
        scatter(data, self.flat_view, self.offsets[part.need.leaf.name], runs.new, runs.nbytes)

    def _post(self, entry: _UnderWay) -> None:
        self._under_way.append(entry)
        self._bytes += entry.nbytes
        while self._bytes > self.reshard_plan.sizes.window and len(self._under_way) > 1:
            self._retire()

    def _retire(self) -> None:
        """Waits for the oldest message under way."""
        entry = self._under_way.popleft()
        for work in entry.works:
            work.wait()
        self._bytes -= entry.nbytes
        if entry.parcel is not None and entry.staging is not None:
            at = 0
            for part in entry.parcel.parts:
                runs = _runs(part, 0)
                nbytes = int(runs.nbytes.sum())
                self._unpack(part, runs, entry.staging[at : at + nbytes])
                at += nbytes
        if entry.staging is not None:
            self._stagings.give(entry.staging)

    # Bands

    def _band(self, band: LostShardSlice) -> None:
        if self.rank == band.rebuilder:
            self._rebuild(band)
            return
        for old, offset in band.inputs:
            if self.reshard_plan.reader_of[old] == self.rank:
                self._send_band(band, self.slots[old], offset)
        for parcel in band.parcels:
            if self.rank in parcel.receivers:
                self._take(parcel)

    def _send_band(self, band: LostShardSlice, source: VerifiedSlotReader, offset: int) -> None:
        staging, data = None, None
        if len(band.ranges) > 1:
            staging = self._stagings.take(self._retire)
        data = self._columns(band, source, offset, staging)
        work = self._peers.send(data, band.rebuilder, TAG)
        self._post(_UnderWay([work], data.nbytes, staging))

    def _columns(self, band: LostShardSlice, source: VerifiedSlotReader, offset: int, room: Bytes | None) -> Bytes:
        """The band of one shard at hand, checked: as it lies, or packed into `room`."""
        ranges = [(offset + begin, offset + end) for begin, end in band.ranges]
        for begin, end in ranges:
            self._check(source, begin, end)
        if room is None:
            return source.data[ranges[0][0] : ranges[0][1]]
        starts: Starts = np.array([begin for begin, _ in ranges], np.int64)
        nbytes: Starts = np.array([end - begin for begin, end in ranges], np.int64)
        return room[: gather(source.data, starts, nbytes, room)]

    def _rebuild(self, band: LostShardSlice) -> None:
        """Decodes a band that this rank has the shards of, or gets them."""
        size = sum(end - begin for begin, end in band.ranges)
        if self._room.nbytes < size * len(band.inputs):
            self._room = np.empty(size * len(band.inputs), np.uint8)
        shards: dict[int, Bytes] = {}
        works = []
        for i, (shard, (old, offset)) in enumerate(zip(band.read.shards, band.inputs, strict=True)):
            room = self._room[i * size : (i + 1) * size]
            reader = self.reshard_plan.reader_of[old]
            if reader == self.rank:
                shards[shard] = self._columns(band, self.slots[old], offset, room if len(band.ranges) > 1 else None)
            else:
                works.append(self._peers.receive(room, reader, TAG))
                shards[shard] = room
        for work in works:
            work.wait()
        data = self._bands.decode(band, shards)
        proof, width, at = self.proofs[band.owner], band.end - band.begin, 0
        for begin, end in band.ranges:
            proof.take(band.block.offset + begin, data[at : at + end - begin])
            at += end - begin

        def place(where: int) -> int:
            packet, column = divmod(where - band.block.offset, band.lane.packet_bytes)
            return packet * width + column - band.begin

        for parcel in band.parcels:
            # What is sent as it lies must stay: the next band is decoded into memory of its own.
            self._give(parcel, data, place)


def _runs(part: NeededRange, at: int) -> ByteRuns:
    """The runs of a part: where they lie in a source in which the part begins at `at`, and in the new leaf."""
    old, new, nbytes = part.need.copy.within(part.begin, part.end)
    return ByteRuns(old + (at - part.begin), new, nbytes)
