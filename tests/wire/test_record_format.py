"""Tests the record of gradients: it reads back as written, and each wrong field is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reft.core.commit.version import Epoch, Version
from reft.errors import FormatError
from reft.wire import capsule_format
from reft.wire.record_format import (
    NO_RECORD,
    GradientRecord,
    RecordLeaf,
    RecordUpdate,
    decode_record,
    encode_record,
    read_record,
    record_digest,
)
from reft.wire.slot_format import Geometry, SlotMap, chunk_digest

LEAVES = (
    RecordLeaf(2, "model.0.weight", 0, 0, 64, "float32", (4, 4)),
    RecordLeaf(2, "b", 1, 64, 16, "float32", (4,), 128),
)
GROUPS = (
    {"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "amsgrad": False},
    {"lr": 1e-3, "maximize": True, "name": "x"},
)
RECORD = GradientRecord(7, "9f0c", (RecordUpdate("optimizer", "AdamW", GROUPS, LEAVES),))
GEOMETRY = Geometry(0, 256, 128)


def slot_with(record: GradientRecord = RECORD, fill: int = 1, ident: bytes = b"a" * 16, mark: int = 7) -> SlotMap:
    """Returns a sealed slot with a record."""
    slot = SlotMap.create(np.zeros(GEOMETRY.file_bytes, np.uint8), GEOMETRY, "job", 1)
    slot.begin(Version(Epoch(3, ident), mark), b"l" * 16, b"", 144)
    slot.data[:144] = fill
    slot.put_capsule(encode_record(record))
    slot.landed()
    slot.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64))
    return slot


def test_round_trip():
    assert decode_record(encode_record(RECORD), 144) == RECORD
    record, digest = read_record(slot_with())
    assert record == RECORD
    assert digest == read_record(slot_with())[1] != NO_RECORD


def test_a_mark_without_updates():
    record = GradientRecord(0, NO_RECORD, ())
    assert decode_record(encode_record(record), 0) == record


def wrong(**changes: Any) -> dict[str, Any]:
    """Returns the tree of RECORD with other fields; `leaf=(i, value)` changes a field of a leaf."""
    tree = copy.deepcopy(capsule_format.decode(encode_record(RECORD)))
    for key, value in changes.items():
        if key == "leaf":
            tree["updates"][0]["leaves"][1][value[0]] = value[1]
        elif key in tree:
            tree[key] = value
        else:
            tree["updates"][0][key] = value
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        [], {}, {**wrong(), "more": 1}, wrong(mark=-1), wrong(mark=True), wrong(previous=None), wrong(updates=()),
        wrong(updates=[1]), wrong(optimizer=1), wrong(more=1), wrong(groups=[]), wrong(groups=[{"lr": 1.0}]),
        wrong(groups=[{"lr": [1.0]}, {}]), wrong(groups=[{1: 1.0}, {}]), wrong(leaves=[1]), wrong(leaves=[[1]]),
        wrong(leaf=(0, -1)), wrong(leaf=(0, "2")), wrong(leaf=(2, 2)), wrong(leaf=(2, -1)), wrong(leaf=(3, -1)),
        wrong(leaf=(3, 129)), wrong(leaf=(4, -1)), wrong(leaf=(4, 81)), wrong(leaf=(6, [-1])), wrong(leaf=(6, (4,))),
        wrong(leaf=(6, ["4"])), wrong(leaf=(7, -2)), wrong(leaf=(7, 129)),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused(tree):
    with pytest.raises(FormatError):
        decode_record(capsule_format.encode(tree), 144)


def test_the_digest_covers_all_facts():
    slot = slot_with()
    header, capsule, digests = slot.header, slot.capsule(), [1, 2]
    geometry = Geometry(0, 256, 64)
    others = [
        (replace(header, job="other"), capsule, digests), (replace(header, rank=2), capsule, digests),
        (replace(header, layout=bytes(16)), capsule, digests), (replace(header, data_bytes=143), capsule, digests),
        (replace(header, geometry=geometry), capsule, digests), (header, capsule + b"x", digests),
        (header, capsule, [2, 1]), (header, capsule, [1]),
        (replace(header, version=Version(Epoch(4, b"a" * 16), 7)), capsule, digests),
        (replace(header, version=Version(Epoch(3, b"b" * 16), 7)), capsule, digests),
        (replace(header, version=Version(Epoch(3, b"a" * 16), 8)), capsule, digests),
    ]  # fmt: skip
    all_digests = [record_digest(*facts) for facts in [(header, capsule, digests), *others]]
    assert len(set(all_digests)) == len(all_digests)
    with pytest.raises(ValueError, match="empty"):
        record_digest(replace(header, version=None), capsule, digests)


def test_a_slot_without_a_record_is_refused():
    slot = slot_with(mark=8)
    with pytest.raises(FormatError, match="mark 7 lies in a slot of step 8"):
        read_record(slot)
    slot.begin(Version(Epoch(3, b"a" * 16), 9), b"l" * 16, b"", 144)
    with pytest.raises(FormatError, match="WRITING"):
        read_record(slot)
    slot.empty()
    with pytest.raises(FormatError, match="EMPTY"):
        read_record(slot)
