"""Writes a sealed slot to storage, beside plain sequential writes of the same bytes.

    .venv/bin/python bench/persist.py [--quick] [--rounds 5] [--folder DIR] [--json FILE]

    plain    blocks of 8 MiB from the mapped slot; fdatasync and DONTNEED each 64 MiB, at last fsync
    reft     the daemon's persister: the same, each chunk compared with its digest before; then the
             node's index, and MANIFEST.json by a link

    ratio = median over rounds of (seconds of plain / seconds of reft) of one round

A round writes the bytes both ways, in turn the one or the other first. The folder's disk decides
the seconds, and a machine's page cache does not: both ways wait until the bytes are on the disk.

Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "daemon"))

import numpy as np

from bench import common, result
from bench.common import median, own_bytes
from bench.exchange_turn import verdict
from bench.options import count, output
from bench.result import Row
from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.wire import messages
from reft.wire import stored_format as stored
from reft.wire.shm import map_file
from reft.wire.slot_format import Geometry, SlotMap, chunk_digest
from reft_daemon.persist.persister import Persister
from reft_daemon.persist.slot_copy import BLOCK_BYTES, SlotRange, SlotSource
from reft_daemon.persist.storage_folder import SYNC_BYTES

JOB, LINEAGE = "bench-persist", "0123456789abcdef"
CHUNK = 256 << 10
EPOCH = Epoch(1, b"bench-persist-16")
DECISION = Decision(EPOCH, None)
GOAL, MEMORY_GOAL = 0.8, 100e6
NOTES = ("Both ways wait until the bytes are on the disk. Memory is what the persister has for itself (RssAnon).",)


def sealed_slot(nbytes: int, step: int) -> tuple[int, SlotMap]:
    """Returns a sealed slot with random bytes, in shared memory."""
    geometry = Geometry(0, nbytes, CHUNK)
    descriptor = os.memfd_create("bench-slot", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, geometry.file_bytes)
    slot = SlotMap.create(map_file(descriptor, geometry.file_bytes)[1], geometry, JOB, 0)
    slot.begin(Version(EPOCH, step), bytes(16), b"", nbytes)
    slot.data[:] = np.random.default_rng(step).integers(0, 256, nbytes, np.uint8)
    slot.landed()
    slot.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64))
    return descriptor, slot


def write_plain(slot: SlotMap, path: Path) -> float:
    """Writes the slot's data to a new file; returns the seconds until the bytes are on the disk."""
    began, unsynced = time.perf_counter(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    data = memoryview(slot.data.data).cast("B")
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        while block:
            block = block[os.write(descriptor, block) :]
        unsynced += BLOCK_BYTES
        if unsynced >= SYNC_BYTES:
            os.fdatasync(descriptor)
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            unsynced = 0
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - began


async def write_checkpoint(persister: Persister, descriptor: int, nbytes: int, step: int) -> float:
    """Makes a checkpoint of the slot; returns the seconds until it is complete."""
    began, version = time.perf_counter(), Version(EPOCH, step)
    source = SlotSource(0, descriptor, [SlotRange(0, nbytes)])
    digest = await persister.write(JOB, LINEAGE, version, (0, 0), [source], lambda _: None)
    decision = messages.decision_to(DECISION).SerializeToString()
    nodes = (stored.StoredNode(0, 0, digest),)
    manifest = stored.StoredManifest(version, JOB, LINEAGE, os.urandom(16).hex(), b"", decision, nodes)
    await persister.commit(manifest, DECISION)
    return time.perf_counter() - began


async def measure(folder: Path, nbytes: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Returns the seconds of each round, plain and by reft, and the persister's own memory."""
    persister = Persister(folder)
    await persister.decide(JOB, LINEAGE, DECISION)
    plain_s, reft_s, memory = [], [], 0
    for number in range(rounds + 1):  # the first round warms the disk, and does not count
        descriptor, slot = sealed_slot(nbytes, number + 1)

        async def both(
            is_plain: bool, descriptor: int = descriptor, slot: SlotMap = slot, step: int = number + 1
        ) -> float:
            if is_plain:
                return await asyncio.to_thread(write_plain, slot, folder / "plain")
            return await write_checkpoint(persister, descriptor, nbytes, step)

        times = {is_plain: await both(is_plain) for is_plain in ((True, False) if number % 2 else (False, True))}
        if number:
            plain_s.append(times[True])
            reft_s.append(times[False])
            print(f"plain {times[True]:.2f} s, reft {times[False]:.2f} s", file=sys.stderr, flush=True)
        assert persister.child.running is not None
        memory = max(memory, own_bytes(persister.child.running.process.pid))
        os.close(descriptor)
        (folder / "plain").unlink()
        shutil.rmtree(folder / JOB / LINEAGE / f"e1-{EPOCH.ident[:4].hex()}-s{number + 1}")
    persister.close()
    return plain_s, reft_s, memory


def main() -> int:
    common.end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB, one round")
    parser.add_argument("--rounds", type=count, help="rounds of both ways (5)")
    parser.add_argument("--folder", type=Path, help="a folder of the disk that is measured", default=Path("/var/tmp"))
    parser.add_argument("--json", type=output, help="write every figure to this file")
    options = parser.parse_args()
    nbytes, rounds = (64 << 20, 1) if options.quick else (1 << 30, 5)
    print(f"load before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    with common.folder(options.folder) as folder:
        plain_s, reft_s, memory = asyncio.run(measure(folder, nbytes, options.rounds or rounds))
    ratios = [plain / own for plain, own in zip(plain_s, reft_s, strict=True)]
    rows = [
        Row(
            "rate of reft over plain writes", "ratio", f">= {GOAL:g}", median(ratios), min=min(ratios), max=max(ratios)
        ),
        Row("plain writes", "MB/s", None, nbytes / 1e6 / median(plain_s)),
        Row("reft, until the checkpoint is complete", "MB/s", None, nbytes / 1e6 / median(reft_s)),
        Row("the persister's own memory", "MB", f"<= {MEMORY_GOAL / 1e6:g}", memory / 1e6),
    ]
    texts = [[verdict(row), row.name, f"{row.value:.3g}", row.goal or "", row.unit] for row in rows]
    print(common.table(["", "figure", "value", "goal", "unit"], texts))
    print(f"load after: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    if options.json:
        details = {"plain": plain_s, "reft": reft_s, "bytes": nbytes}
        result.write(
            options.json, __file__, "A checkpoint of one node, beside plain writes", rows, NOTES, details=details
        )
    return 1 if any(row.is_missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
