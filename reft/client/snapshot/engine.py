"""The interface of a copy engine: what it takes, and the events that it gives back.

    trainer's thread    begin(order) ─► RunningCopy                         enter, hurry, fence
    snapshot thread     for event in copy.events(slot):  CopiedEvent ─► DigestedEvent

The engine calls nobody back. The snapshot thread pulls the events one by one: when it asks for the
next event, it has dealt with the one before. An exception ends the events, and with them the
snapshot.

There is an engine for CPU and one for CUDA. One contract test runs both
(tests/client/snapshot/test_engines.py).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from reft.client.snapshot.replica_check import DigestSample, digest_of, leaf_digests
from reft.client.snapshot.save_plan import ParityTiling, SavePlan
from reft.client.snapshot.stats import CopyStats
from reft.core.pipeline.course import PacingPlan
from reft.core.pipeline.pacing import Tier
from reft.failpoints import Failpoints
from reft.wire.slot_format import Bytes, SlotMap


@dataclass(frozen=True)
class CopyOrder:
    """One snapshot to copy. The fence is the deadline of all its reads of the live state.

    Attributes:
        save_plan: what to write where.
        chunk_bytes: size of a chunk, the same in each slot.
        step: the step; decides which window of each cell is digested for other ranks.
        compares_all: whether all bytes of each cell are digested, not only a window.
        pacing_plan: when in the window bytes are copied; None copies at once, beside whatever
            training does.
        failpoints: faults to inject before each chunk and parity column.
        facts: rank, step and epoch, for the failpoints.
    """

    save_plan: SavePlan
    chunk_bytes: int
    step: int
    compares_all: bool = False
    pacing_plan: PacingPlan | None = None
    failpoints: Failpoints = field(default_factory=Failpoints)
    facts: Mapping[str, int] = field(default_factory=dict)

    def at_chunk(self, index: int) -> None:
        """Passes the failpoint before the part with this chunk is copied."""
        self.failpoints.hit("snapshot.chunk", chunk=index, **self.facts)

    def at_parity(self, index: int) -> None:
        """Passes the failpoint before this parity column is computed."""
        self.failpoints.hit("snapshot.parity", chunk=index, **self.facts)


@dataclass(frozen=True)
class CopiedEvent:
    """All bytes are in the slot, and no copy reads the live state any more.

    Attributes:
        inline_leaves: the inline leaves' bytes at the mark, by name.
        cell_digests: cell → digest of this rank's bytes in it, for comparison with other ranks.
        leaf_digests: digest of each leaf in the cells, by name and cell, if all bytes are compared;
            else empty.
    """

    inline_leaves: Mapping[str, bytes]
    cell_digests: Mapping[int, int]
    leaf_digests: Mapping[str, str] = field(default_factory=dict)


def copied_event(
    order: CopyOrder, inline_leaves: Mapping[str, bytes], sums: Sequence[tuple[DigestSample, Sequence[Bytes]]]
) -> CopiedEvent:
    """Returns the event after the copy of an order.

    Args:
        order: the order.
        inline_leaves: the inline leaves' bytes at the mark, by name.
        sums: each sample, and the sums of each of its runs.
    """
    by_leaf: dict[str, str] = {}
    for sample, parts in sums if order.compares_all else ():
        by_leaf |= leaf_digests(sample, parts, order.save_plan.leaves)
    return CopiedEvent(inline_leaves, {sample.cell: digest_of(sample, parts) for sample, parts in sums}, by_leaf)


@dataclass(frozen=True)
class DigestedEvent:
    """The slot has its digests: one uint64 for each chunk."""

    digests: np.ndarray


CopyEvent = CopiedEvent | DigestedEvent


class RunningCopy(Protocol):
    """One snapshot that an engine copies."""

    def events(self, slot: SlotMap) -> Generator[CopyEvent, None, None]:
        """Copies into the slot, and yields `CopiedEvent`, then `DigestedEvent`.

        The fence of the CPU engine opens once the caller asks for the event after `CopiedEvent`, or
        closes the iterator.

        Args:
            slot: a slot in the state WRITING; the same as in `begin`, if one was passed there.

        Raises:
            Exception: the copy failed.
        """

    def drop(self) -> None:
        """Opens the fence of a copy that gets no slot, and so reads nothing."""


class CopyEngine(Protocol):
    """The part that copies a session's bytes, as the session needs it.

    Attributes:
        copy_stats: how many bytes were copied, when and how fast.
        parity_tiling: the sizes of the parity columns that this engine works best with.
        keeps_host_time: whether work is done on the device when Python has done it.
        needs_slot_at_mark: whether `begin` needs the slot. If not, the slot may come later in the
            window.
        copy_cpu: the CPU that the snapshot thread shall run on; None leaves it to the scheduler.
    """

    copy_stats: CopyStats
    parity_tiling: ParityTiling
    keeps_host_time: bool
    needs_slot_at_mark: bool
    copy_cpu: int | None

    def note_writer(self) -> None:
        """Notes that an optimizer is about to write the state, in the calling thread's stream."""

    def behind_writer(self) -> AbstractContextManager[None]:
        """Orders what a mark enqueues inside behind these writes, and before the work after it."""

    def begin(self, order: CopyOrder, slot: SlotMap | None) -> RunningCopy:
        """Starts one snapshot; the earlier one must have passed its fence.

        Raises:
            ReftError: the snapshot can't be copied; nothing was started.
        """

    def fence(self) -> None:
        """Makes sure that no copy reads the live state any more.

        It counts the time of this wait.
        """

    def is_capturing(self) -> bool:
        """Tells whether training is being captured into a CUDA graph: nothing may be enqueued."""

    def enter(self, index: int, tier: Tier) -> Any:
        """Notes that training enters a phase of the window; phase 0 begins at the mark.

        Returns:
            A stamp of this moment, for `times`.
        """

    def stamp(self) -> Any:
        """Returns a stamp of this moment in the device's time."""

    def times(self, stamps: Sequence[Any]) -> list[float] | None:
        """Returns when the device passed the stamps, in seconds of `time.perf_counter`.

        Returns:
            None if the device has not passed all of them.
        """

    def hurry(self) -> None:
        """Copies the rest of the snapshot at once: a caller waits, or training has paused."""

    def close(self) -> None:
        """Ends the engine's threads; its last snapshot must have ended."""
