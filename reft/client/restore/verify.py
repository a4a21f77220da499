"""Verifies bytes that came over the wire or out of a decoder.

    sender    message ─► digest ─┐ one digest for each peer and old rank, over all messages
    receiver  message ─► digest ─┴─► compared at the end of the load

    decoder   bytes of a lost slot, in any order ─► digest of each chunk ─► compared with the
              digests that were taken when the slot was saved

A chunk may end in another packet or another shard than it began. Bytes that come too early are kept
in memory: at most one chunk for each packet of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from reft.client.restore.transport import Transport, Work
from reft.core.coding.placement import Placement
from reft.core.recovery.stripes import slot_name
from reft.errors import RestoreError
from reft.wire.slot_format import Bytes, chunk_digest

TAG, VERDICT_TAG = 1, 2
DIGEST_BYTES = 8


def message_digest(data: Bytes, at: int, chunk_bytes: int, known: Mapping[int, int]) -> int:
    """Returns the digest of a message: that of the digests of its pieces.

    Pieces end where the source's chunks end. So a sender need not pass over whole chunks again.

    Args:
        data: the message, uint8 [n].
        at: the offset in the source of the first byte.
        chunk_bytes: size of the source's chunks.
        known: chunk → its digest, taken from the memory that is sent.
    """
    digests, done = [], 0
    while done < data.nbytes:
        index, offset = divmod(at + done, chunk_bytes)
        piece = data[done : done + chunk_bytes - offset]
        is_known = index in known and piece.nbytes == chunk_bytes
        digests.append(known[index] if is_known else chunk_digest(piece))
        done += piece.nbytes
    return xxhash.xxh3_64_intdigest(np.array(digests, "<u8").tobytes())


@dataclass
class ChunkVerifier:
    """Compares a slot's chunks with their digests; accepts the slot's bytes in any order.

    Args:
        digests: the slot's digests, taken when it was sealed.
        chunk_bytes: size of a chunk.
        end: where the slot's data shards end; zeros follow up to the next chunk.
        section: begin and end of the unreplicated leaves, if their bytes come too. They begin with
            a chunk, and the last chunk ends with them.
    """

    digests: npt.NDArray[np.uint64]
    chunk_bytes: int
    end: int
    section: tuple[int, int] = (0, 0)
    _right: set[int] = field(default_factory=set)
    # Chunk → number of bytes digested so far, and the digest's state.
    _done: dict[int, tuple[int, xxhash.xxh3_64]] = field(default_factory=dict)
    # Chunk → offset in the chunk → bytes that came too early.
    _early: dict[int, dict[int, Bytes]] = field(default_factory=dict)

    def take(self, at: int, data: Bytes) -> None:
        """Accepts bytes uint8[n] of the slot's data that begin at `at`."""
        while data.nbytes:
            chunk, offset = divmod(at, self.chunk_bytes)
            size = min(data.nbytes, self.chunk_bytes - offset)
            self._take_part(chunk, offset, data[:size])
            at, data = at + size, data[size:]

    def finish(self) -> list[int]:
        """Returns the chunks that differ or lack bytes; call it after all bytes were passed."""
        chunks = -(-self.end // self.chunk_bytes)
        if self.end % self.chunk_bytes:
            self.take(self.end, np.zeros(-self.end % self.chunk_bytes, np.uint8))
        return sorted({*range(chunks), *self._section_chunks} - self._right)

    def is_in_section(self, chunk: int) -> bool:
        """Whether a chunk has unreplicated leaves."""
        return chunk in self._section_chunks

    @property
    def _section_chunks(self) -> range:
        begin, end = self.section
        return range(begin // self.chunk_bytes, -(-end // self.chunk_bytes))

    def _size_of(self, chunk: int) -> int:
        begin = chunk * self.chunk_bytes
        return min(self.chunk_bytes, self.section[1] - begin) if self.is_in_section(chunk) else self.chunk_bytes

    def _take_part(self, chunk: int, offset: int, data: Bytes) -> None:
        done, state = self._done.pop(chunk) if chunk in self._done else (0, xxhash.xxh3_64())
        early = self._early.pop(chunk, {})
        early[offset] = data
        while done in early:
            piece = early.pop(done)
            state.update(piece.data)
            done += piece.nbytes
        if done == self._size_of(chunk):
            if chunk < len(self.digests) and state.intdigest() == int(self.digests[chunk]):
                self._right.add(chunk)
            return
        self._done[chunk] = (done, state)
        if early:
            # Copy: the caller reuses the buffer.
            self._early[chunk] = {at: each if at != offset else each.copy() for at, each in early.items()}


def chunk_verifier(
    placement: Placement, old: int, digests: bytes, has_shards: bool = True, has_section: bool = False
) -> ChunkVerifier:
    """Returns the verifier of what is decoded of a lost slot.

    Args:
        placement: under which the slot was written.
        old: the old rank.
        digests: of the slot's chunks, from its capsule.
        has_shards: whether the slot's data shards are decoded.
        has_section: whether its unreplicated leaves are decoded.
    """
    part = placement.rank_placement(old)
    blocks = part.blocks[: part.data_blocks] if has_shards else ()
    end = max((block.offset + block.nbytes for block in blocks), default=0)
    section = (part.unreplicated_offset, part.data_bytes) if has_section else (0, 0)
    return ChunkVerifier(np.frombuffer(digests, "<u8"), placement.chunk_bytes, end, section)


class PeerMessages:
    """Messages between this rank and other ranks, and a digest for each pair.

    Args:
        transport: None if there are no other ranks.
        rank: this rank.
        old_world: the number of old ranks; greater numbers stand for parity slots.
    """

    def __init__(self, transport: Transport | None, rank: int, old_world: int = 1 << 32) -> None:
        self.rank, self._old_world = rank, old_world
        self._transport = transport
        # (peer, old rank) → digest of the messages with the bytes of that old rank
        self._sent: dict[tuple[int, int], xxhash.xxh3_64] = {}
        self._received: dict[tuple[int, int], xxhash.xxh3_64] = {}

    def send(self, data: Bytes, digest: int, to: int, owner: int) -> Work:
        """Begins to send a message of an old rank's bytes; see `Transport.send`."""
        self._sent.setdefault((to, owner), xxhash.xxh3_64()).update(digest.to_bytes(DIGEST_BYTES, "little"))
        return self._peers.send(data, to, TAG)

    def receive(self, into: Bytes, source: int) -> Work:
        """Begins to receive a message; see `Transport.receive`."""
        return self._peers.receive(into, source, TAG)

    def received(self, digest: int, source: int, owner: int) -> None:
        """Notes the digest of a message that has arrived; in the order of the messages."""
        self._received.setdefault((source, owner), xxhash.xxh3_64()).update(digest.to_bytes(DIGEST_BYTES, "little"))

    def compare(self) -> dict[int, str]:
        """Exchanges the digests with all peers; returns old rank → how its bytes arrived wrong.

        Raises:
            RestoreError: a peer is gone.
        """
        works, arrived = list[Work](), dict[int, Bytes]()
        for peer in sorted({peer for peer, _ in (*self._sent, *self._received)}):
            # Both ranks of a pair post in the same order, the lower rank's message first:
            # a transport may have no tags.
            for sender in sorted((peer, self.rank)):
                mine = _digests_of(self._sent if sender == self.rank else self._received, peer)
                if mine.nbytes and sender == self.rank:
                    works.append(self._peers.send(mine, peer, VERDICT_TAG))
                elif mine.nbytes:
                    arrived[peer] = np.zeros(mine.nbytes, np.uint8)
                    works.append(self._peers.receive(arrived[peer], peer, VERDICT_TAG))
        for work in works:
            work.wait()
        wrong: dict[int, str] = {}
        for peer, theirs in arrived.items():
            owners = sorted(owner for each, owner in self._received if each == peer)
            differ = theirs.view("<u8") != _digests_of(self._received, peer).view("<u8")
            for owner in (owner for owner, is_wrong in zip(owners, differ, strict=True) if is_wrong):
                way = f"rank {peer} sent them to rank {self.rank} over {self._peers.name}"
                wrong[owner] = f"bytes of {slot_name(owner, self._old_world)} changed on their way: {way}"
        return wrong

    @property
    def _peers(self) -> Transport:
        if self._transport is None:
            raise RestoreError(f"rank {self.rank} needs bytes of other ranks, and has no transport.")
        return self._transport


def _digests_of(states: dict[tuple[int, int], Any], peer: int) -> Bytes:
    """Returns the digests of all messages with a peer, one for each old rank, ascending."""
    digests = [states[key].intdigest() for key in sorted(states) if key[0] == peer]
    return np.array(digests, "<u8").view(np.uint8)
