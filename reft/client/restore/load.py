"""REFT-load: fills this rank's live memory by its transfer operations, and reports what was wrong.

plan ─► operations of this rank ─► executor ─► live memory
                                      └──────► LoadReport: damaged slots; faults of messages,
                                               of decoding, and of copies to a device
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from reft.client.restore.decode import StripeDecoder
from reft.client.restore.executor import LiveTarget, TransferExecutor
from reft.client.restore.slot_reader import SlotReader
from reft.client.restore.verify import ChunkVerifier, PeerMessages
from reft.console import say
from reft.core.budget import format_bytes
from reft.core.coding.placement import Placement
from reft.core.recovery.plan import TransferOperation, TransferSizes
from reft.wire.slot_format import Bytes

PROGRESS_S = 5.0  # a load that takes longer says so, this often
NO_RANK = -1


@dataclass(frozen=True)
class LoadReport:
    """What one rank tells all ranks of the bytes that it read, received and decoded.

    Attributes:
        damaged: old ranks whose slots are damaged.
        faults: what went wrong with bytes that were right when they were read → the old rank whose
            bytes they were; NO_RANK if another source would not help.
    """

    damaged: tuple[int, ...] = ()
    faults: dict[str, int] = field(default_factory=dict)


class LoadProgress:
    """Prints how far a long load is.

    Args:
        total: bytes to place.
        speaks: whether this rank prints.
    """

    def __init__(self, total: int, speaks: bool) -> None:
        self._total, self._speaks = total, speaks
        self._done = 0
        self._began = self._said = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Counts placed bytes; prints a line after each PROGRESS_S."""
        self._done += nbytes
        now = time.monotonic()
        if self._speaks and now - self._said >= PROGRESS_S:
            self._said = now
            rate = self._done / (now - self._began)
            rest = f", about {(self._total - self._done) / rate:.0f} s left" if rate else ""
            say(f"restores: {format_bytes(self._done)} of {format_bytes(self._total)} of this rank's state{rest}.")


def load(
    operations: Iterable[TransferOperation],
    sizes: TransferSizes,
    chunk_bytes: int,
    peers: PeerMessages,
    slots: Mapping[int, SlotReader],
    target: LiveTarget,
    decoder: StripeDecoder,
    inline_leaves: Mapping[int, Bytes] | None = None,
    verifiers: Mapping[int, ChunkVerifier] | None = None,
) -> LoadReport:
    """Fills this rank's live memory, and serves the other ranks; all ranks call it together.

    Args:
        operations: of this rank, in list order.
        sizes: the same on all ranks.
        chunk_bytes: size of the slots' chunks; the same on all ranks.
        peers: messages to and from other ranks.
        slots: old rank → its slot, for the slots that this rank reads.
        target: live memory.
        decoder: decodes lost shards.
        inline_leaves: old rank → its needed inline leaves, end to end.
        verifiers: old rank → verifier of its lost slot, for the slots that this rank makes.

    Raises:
        RestoreError: a rank is gone, or a slot on another node can't be read.
        ValueError: a stripe can't be decoded from the slots at hand.
    """
    verifiers = verifiers or {}
    progress = LoadProgress(target.flat_view.nbytes, peers.rank == 0)
    TransferExecutor(
        sizes, chunk_bytes, peers, slots, inline_leaves or {}, verifiers, target, decoder, progress.add
    ).run(operations)
    faults = {text: owner for owner, text in peers.compare().items()}
    for old, verifier in verifiers.items():
        if wrong := verifier.finish():
            faults[f"chunk {wrong[0]} of rank {old}, decoded from its peers, differs from the saved bytes"] = NO_RANK
    if not target.flat_view.are_copies_right():
        faults[f"rank {peers.rank}'s device holds other bytes than were copied to it"] = NO_RANK
    target.flat_view.finish()
    return LoadReport(tuple(sorted(old for old, slot in slots.items() if slot.is_bad)), faults)


def chunk_verifier(placement: Placement, old: int, digests: bytes) -> ChunkVerifier:
    """Returns the verifier of a lost slot's data shards.

    Args:
        placement: under which the slot was written.
        old: the old rank.
        digests: of the slot's chunks, from its capsule.
    """
    part = placement.rank_placement(old)
    end = max((block.offset + block.nbytes for block in part.blocks[: part.data_blocks]), default=0)
    return ChunkVerifier(np.frombuffer(digests, "<u8"), placement.chunk_bytes, end)
