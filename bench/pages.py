"""What pages cost: pages of slots, small and huge, and fresh memory allocated in advance.

    slot    make | first and later memcpy into it, through a mapping | read back from its file, and
            through a new mapping
    room    make, alone | make beside a thread that computes in Python, by the kernel and by numpy,
            in blocks of some sizes; the longest wait of that thread when it mapped memory

`python bench/pages.py [--gib 1] [--json FILE]`. Each figure is the median of five rounds, with the
least and the most. The first round is not counted: a hypervisor must back the memory then.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import result
from bench.common import SHM, median
from bench.options import output
from bench.result import Row
from reft.client.link.slots import MappedSlot
from reft.client.memory import prefault
from reft.client.memory.huge_pages import HugePageBuffer
from reft.wire.shm import map_file
from reft.wire.slot_format import Bytes, Geometry, SlotMap
from reft_daemon.arena.huge_pages import make_huge

ROUNDS = 5
UNIT = 4 << 20  # bytes read or copied at a time


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def copy(to: Bytes, source: Bytes) -> None:
    for at in range(0, len(source), UNIT):
        np.copyto(to[at : at + UNIT], source[at : at + UNIT])


def slot(memory: Bytes, is_huge: bool) -> dict[str, float]:
    """Measures one slot: it is made, mapped by a trainer, written twice, and read back."""
    geometry = Geometry(table_capacity=0, data_capacity=len(memory), chunk_bytes=256 << 10)
    descriptor = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, geometry.file_bytes)
    _, whole = map_file(descriptor, geometry.file_bytes)
    huge_bytes = 0

    def make() -> None:
        nonlocal huge_bytes
        huge_bytes = make_huge(descriptor, whole, 0) if is_huge else 0
        os.posix_fallocate(descriptor, 0, geometry.file_bytes)

    times = {"make": seconds(make), "huge": huge_bytes / geometry.file_bytes}
    SlotMap.create(whole, geometry, "bench", 0)
    mapped = MappedSlot.open(0, "slot", os.dup(descriptor), geometry.file_bytes, keeps=True)
    times["touch"] = seconds(mapped.touch)
    for name in ("first copy", "copy"):
        times[name] = seconds(lambda: copy(mapped.map.data, memory))

    def read() -> None:
        for at in range(0, len(memory), UNIT):
            mapped.map.read(at, memory[at : at + UNIT])

    times["read"] = seconds(read)
    fresh = map_file(descriptor, geometry.file_bytes)[1][geometry.data_offset :]
    times["new mapping"] = seconds(lambda: copy(memory, fresh[: len(memory)]))
    mapped.close()
    os.close(descriptor)
    return times


def room(nbytes: int, is_busy: bool, mib: int = prefault.BLOCK_BYTES >> 20, by_numpy: bool = False) -> dict[str, float]:
    """Allocates fresh memory in two threads.

    Args:
        is_busy: whether this thread computes in Python meanwhile, and maps memory.
    """
    advice = 9999 if by_numpy else prefault._POPULATE_WRITE  # a kernel before 5.14 supports neither
    with mock.patch.multiple(prefault, BLOCK_BYTES=mib << 20, _POPULATE_WRITE=advice):
        began = time.perf_counter()
        buffer = HugePageBuffer(nbytes)
        waited = seconds(buffer.make_pages)  # a thread's stack is a mapping, too
        pages = buffer._pages
        while is_busy and pages and any(thread.is_alive() for thread in pages._threads):
            sum(range(100))
            waited = max(waited, seconds(lambda: mmap.mmap(-1, mmap.PAGESIZE)))
        buffer.wait()
        return {"make": time.perf_counter() - began, "a mapping waits": waited}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of memory")
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    nbytes = int(options.gib * 1024) << 20
    whole = np.ones(nbytes + 64, np.uint8)
    begin = -whole.ctypes.data % 64  # aligned like torch's tensors; otherwise the kernel copies at half the speed
    memory = whole[begin : begin + nbytes]
    times: dict[str, list[float]] = defaultdict(list)
    for is_huge in (False, True):
        slot(memory, is_huge)
        for _ in range(ROUNDS):
            for name, value in slot(memory, is_huge).items():
                times[f"slot, {'huge' if is_huge else 'small'}: {name}"].append(value)
    room(nbytes, False)
    for _ in range(ROUNDS):
        times["room, alone: make"].append(room(nbytes, False)["make"])
        for by_numpy, mib in ((False, 2), (False, 16), (False, 64), (False, nbytes >> 20), (True, 16)):
            way = f"room, beside Python, {'numpy' if by_numpy else 'kernel'}, {mib} MiB"
            for name, value in room(nbytes, True, mib, by_numpy).items():
                times[f"{way}: {name}"].append(value)
    for name, values in times.items():
        print(f"{name:56} {median(values):8.3f}  ({min(values):.3f} to {max(values):.3f})")
    if options.json:
        rows = [
            Row(
                name,
                "of all bytes" if name.endswith(": huge") else "s",
                None,
                median(values),
                min=min(values),
                max=max(values),
            )
            for name, values in times.items()
        ]
        result.write(options.json, __file__, f"Pages of slots and of fresh memory, {options.gib:g} GiB", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
