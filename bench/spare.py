"""What `reft-daemon --spare` saves when a spare node joins the job.

    python bench/spare.py [--gib 1] [--rounds 3] [--json FILE]

It saves the time of making slots, and of the first write to each of their pages. Each round makes
the slots of a fresh arena twice, once anew and once from a pool, in alternating order. How slow new
memory is depends on the machine. It is fast on a machine whose memory was in use before, like here
after the first round.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "daemon"))

from bench import result
from bench.options import count, output
from bench.result import Row
from reft.wire.slot_format import PAGE, Geometry
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.pool import SpareFiles

SLOTS = 3
PARTS = ("fill the pool", "make slots", "first write of all pages")


def measure(gib: float, is_spare: bool) -> tuple[float, float, float]:
    """Returns the seconds for filling the pool, making the slots, and writing to each page.

    The pages are written through a new mapping.
    """
    folder = Path(tempfile.mkdtemp(prefix="reft-bench-", dir="/dev/shm"))
    geometry = Geometry(PAGE, int(gib * (1 << 30)) // SLOTS // PAGE * PAGE, 4 << 20)
    try:
        arena = Arena(folder, 0, SpareFiles(SLOTS, geometry.file_bytes) if is_spare else SpareFiles())
        begun_at = time.perf_counter()
        arena.pool.refill()
        filled_at = time.perf_counter()
        slots = arena.create("bench", 0, {f"rank-0.slot-{i}": geometry for i in range(SLOTS)}, [])
        made_at = time.perf_counter()
        for slot in slots:
            pages = np.frombuffer(mmap.mmap(slot.descriptor, slot.file_bytes), np.uint8)
            pages[geometry.data_offset :: PAGE] = 0
        written_at = time.perf_counter()
        for slot in slots:
            arena.free(slot)
        arena.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return filled_at - begun_at, made_at - filled_at, written_at - made_at


def main() -> None:
    """Prints a line for each round, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    seconds_by_kind: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for number in range(options.rounds):
        for is_spare in (bool(number % 2), not number % 2):
            seconds_by_kind[is_spare].append(measure(options.gib, is_spare))
            print(line("spare" if is_spare else "anew", seconds_by_kind[is_spare][-1]), flush=True)
    for is_spare, rows in seconds_by_kind.items():
        print("median", line("spare" if is_spare else "anew", tuple(map(statistics.median, zip(*rows, strict=True)))))
    if options.json:
        lines = [
            Row(f"{'spare' if is_spare else 'anew'}: {part}", "s", None, statistics.median(s), min=min(s), max=max(s))
            for is_spare, rows in seconds_by_kind.items()
            for part, s in zip(PARTS, zip(*rows, strict=True), strict=True)
        ]
        result.write(options.json, __file__, f"Slots out of a spare pool, {options.gib:g} GiB", lines)


def line(name: str, seconds: tuple[float, ...]) -> str:
    """Returns one measurement as a line."""
    fill, make, write = seconds
    return f"{name:>5}: fill the pool {fill:.2f} s, make slots {make:.2f} s, first write of all pages {write:.2f} s"


if __name__ == "__main__":
    main()
