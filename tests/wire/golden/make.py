"""Makes the golden slot files of format 3.0, one for each state: python tests/wire/golden/make.py

The files are gzipped, since a slot has a megabyte of space for its capsule. A test makes the files
again and compares them byte for byte. So a change of the format shows as a failure, not as a file
that can't be read any more. A sealed file of format 2.0 is left, which readers read, and one of
format 1.0, which readers refuse.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import Layout, Leaf, pack
from reft.wire import capsule_format
from reft.wire.messages import table_to
from reft.wire.slot_format import Geometry, SlotMap, chunk_digest

FOLDER = Path(__file__).parent
STATES = ("empty", "writing", "landed", "sealed")
VERSION = Version(Epoch(3, bytes(range(16))), 1234)
GEOMETRY = Geometry(table_capacity=4096, data_capacity=12288, chunk_bytes=4096)
JOB, RANK = "golden-job.1", 5
TREE = {"step": 1234, "random": (1, 2, -3.5), "seed": b"\x00\xff", "order": np.arange(4, dtype="<i8")}
NAMES = capsule_format.NameTable(tuple(f"model.0.{i}" for i in range(6)))
NAMED_TREE = {**TREE, "params": [*NAMES.names[:4], "a name in full", NAMES.names[5]], "riders": {NAMES.names[1]: b"x"}}

# pb.INLINE, pb.CELL; the other leaves are UNREPLICATED.
PLACES = {"model.0.running_mean": 2, "model.0.shared": 1}


def layout() -> Layout:
    """Returns four leaves: two unreplicated (two chunks and a bit), one inline, one in a cell."""
    unreplicated = [
        Leaf("model.0.bias", "float32", (16,), (1,), 64, True, (16,), (0,)),
        Leaf("model.0.weight", "bfloat16", (64, 64), (64, 1), 8192, False, (128, 64), (64, 0)),
    ]
    elsewhere = (
        Leaf("model.0.running_mean", "float32", (4,), (1,), 16, True, (4,), (0,)),
        Leaf("model.0.shared", "float32", (1 << 20,), (1,), 4 << 20, False, (1 << 20,), (0,)),
    )
    packed = pack(unreplicated)
    return Layout(packed.leaves + elsewhere, (*packed.offsets, 0, 0), packed.data_bytes)


def payload() -> np.ndarray:
    return (np.arange(layout().data_bytes, dtype=np.uint32) * 2654435761 >> 7).astype(np.uint8)


def make(state: str) -> np.ndarray:
    """Returns the bytes of a slot in `state`.

    They are written as a trainer and a daemon write them.
    """
    slot = np.zeros(GEOMETRY.file_bytes, np.uint8)
    map_ = SlotMap.create(slot, GEOMETRY, JOB, RANK)
    if state == "empty":
        return slot
    held = layout()
    map_.begin(VERSION, held.digest, table_to(held, PLACES), held.data_bytes)
    map_.put_capsule(capsule_format.encode(NAMED_TREE, NAMES))
    map_.data[: held.data_bytes // 2] = payload()[: held.data_bytes // 2]
    if state == "writing":
        return slot
    map_.data[: held.data_bytes] = payload()
    map_.landed()
    if state == "sealed":
        map_.sealed(np.array([chunk_digest(map_.chunk(i)) for i in range(map_.chunks)], np.uint64))
    return slot


def path_of(state: str) -> Path:
    return FOLDER / f"slot-3.0-{state}.gz"


def read(state: str) -> np.ndarray:
    """Returns the bytes of a golden file, writable."""
    return np.frombuffer(gzip.decompress(path_of(state).read_bytes()), np.uint8).copy()


if __name__ == "__main__":
    for each in STATES:
        path_of(each).write_bytes(gzip.compress(make(each).tobytes(), mtime=0))
