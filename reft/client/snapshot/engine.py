"""The seam between a session and what copies its bytes: one snapshot as a job, and what every engine does.

The CPU engine and the CUDA engine hold to it; one contract test runs both (tests/client/snapshot/test_engines.py).
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
    """One snapshot to take.

    Attributes:
        open: the slot to write, WRITING by then; called in the engine's thread, may wait for one if its argument is true,
            raises if there is none.
        give_up: makes a waiting `open` raise.
        chunk_bytes: of each slot.
        save_plan: what to write where.
        at_chunk: called with each chunk's index before the part that it belongs to is copied; may raise.
        at_parity: called with each parity column's index before it is computed; may raise.
        intact: called after the last byte was read and before anything writes the state again; raises if it was written.
        landed: what to do when the bytes are there; takes the riders' bytes, as they were at the mark, by name.
        sealed, failed: what to do when the digests are there, or instead of what was not done yet, if anything raises.
        samples: what of the cells to digest for comparison with other ranks.
        compared: takes the samples' digests, by cell, before `landed`.
        pacing_plan: where in the window the bytes are to go; None: at once, beside whatever training does.
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
    """The seam between a session and what moves its bytes."""

    copy_stats: CopyStats  # what it copied, when and how fast
    cut: ParityTiling  # how it wants parity cut
    compares_all: bool  # whether it may be asked to digest all live bytes of a snapshot
    keeps_host_time: bool  # whether the host's time is the device's

    def begin(self, job: CopyJob) -> None:
        """Starts one snapshot; the earlier one must have passed its fence."""

    def fence(self) -> None:
        """Makes sure that nothing reads the state any more; the time for which training is held up goes into the tally."""

    def is_capturing(self) -> bool:
        """Whether what training does now is only captured, into a CUDA graph: nothing may be enqueued for computing."""

    def enter(self, index: int, tier: Tier) -> Any:
        """Tells what training does from now on; stretches of a window are numbered, 0 begins at the mark.

        Returns:
            A stamp of this moment, for `times`.
        """

    def stamp(self) -> Any:
        """A stamp of this moment in the device's time."""

    def times(self, stamps: Sequence[Any]) -> list[float] | None:
        """When stamps were passed, in seconds of `time.perf_counter`; None if the device has not passed all of them."""

    def hurry(self) -> None:
        """Lets the snapshot that is under way go at once: somebody waits for it, or training has paused."""

    def submit(self, task: Callable[[], None]) -> None:
        """Runs a small task in the engine's thread."""

    def close(self) -> None:
        """Ends the thread, after the snapshot that it works on."""
