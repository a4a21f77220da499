"""The interface of a copy engine, and the job of copying one snapshot.

There is an engine for CPU and one for CUDA. One contract test runs both
(tests/client/snapshot/test_engines.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from reft.client.snapshot.replica_check import DigestSample
from reft.client.snapshot.save_plan import ParityTiling, SavePlan
from reft.client.snapshot.stats import CopyStats
from reft.core.pipeline.course import PacingPlan
from reft.core.pipeline.pacing import Tier
from reft.wire.slot_format import SlotMap


@dataclass
class CopyJob:
    """One snapshot to copy, and the callbacks of its stages.

    Attributes:
        open: returns the slot to write, in the state WRITING. If its argument is true, it may wait
            for a slot, and runs in the engine's thread. Raises if there is no slot.
        give_up: makes an `open` that waits raise.
        chunk_bytes: size of a chunk, the same in each slot.
        save_plan: what to write where.
        at_chunk: called with each chunk's index before the part with this chunk is copied; may
            raise.
        at_parity: called with each parity column's index before the column is computed; may raise.
        intact: called after the last byte was read, and before anything writes the state again.
            Raises if the state was written since the mark.
        landed: called when all bytes are in the slot, with the inline leaves' bytes at the mark, by
            name.
        sealed: called when the digests are there, with the digest of each chunk.
        failed: called when anything raises, in place of the callbacks that are still to come.
        samples: returns which bytes of the cells to digest, for comparison with other ranks.
        compared: called before `landed`, with the samples' digests by cell.
        pacing_plan: when in the window bytes are copied; None copies at once, beside whatever
            training does.
    """

    open: Callable[[bool], SlotMap]
    give_up: Callable[[], None]
    chunk_bytes: int
    save_plan: SavePlan
    at_chunk: Callable[[int], object]
    at_parity: Callable[[int], object]
    intact: Callable[[], None]
    landed: Callable[[Mapping[str, bytes]], None]
    sealed: Callable[[np.ndarray], None]
    failed: Callable[[Exception], None]
    samples: Callable[[], Sequence[DigestSample]]
    compared: Callable[[Mapping[int, int]], None]
    pacing_plan: PacingPlan | None = None


class CopyEngine(Protocol):
    """The part that copies a session's bytes, as the session needs it.

    Attributes:
        copy_stats: how many bytes were copied, when and how fast.
        parity_tiling: the sizes of the parity columns that this engine works best with.
        compares_all: whether the engine can digest all live bytes of a snapshot at a bearable cost.
        keeps_host_time: whether work is done on the device when Python has done it.
    """

    copy_stats: CopyStats
    parity_tiling: ParityTiling
    compares_all: bool
    keeps_host_time: bool

    def begin(self, job: CopyJob) -> None:
        """Starts one snapshot; the earlier one must have passed its fence."""

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

    def submit(self, task: Callable[[], None]) -> None:
        """Runs a small task in the engine's thread."""

    def close(self) -> None:
        """Ends the thread, after the snapshot that it works on."""
