"""Tests that capsule files of an earlier reft are read, and those of a newer one are left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reft.core.commit.version import Epoch, Version
from reft.errors import FormatError
from reft.wire import capsule_format, messages
from reft_daemon.arena import capsule_store
from reft_daemon.arena.arena import Arena

GOLDEN = Path(__file__).parent / "golden/capsule-1.0"  # written on 2026-11-24 by commit 7f3928b


def test_a_golden_capsule_is_read_and_made_again():
    data = GOLDEN.read_bytes()
    job, record = capsule_store.decode(data)
    assert (job, record.rank, record.unreplicated_bytes, record.digests) == ("golden-job.1", 5, 64, bytes(range(32)))
    assert messages.version_from(record.version) == Version(Epoch(3, bytes(range(16))), 1234)
    tree = capsule_format.decode(record.capsule)
    assert (tree["step"], tree["random"], tree["seed"]) == (1234, (1, 2, -3.5), b"\x00\xff")
    assert np.array_equal(tree["order"], np.arange(4))
    record.capsule = capsule_format.encode(tree)
    assert capsule_store.encode(job, record) == data


@pytest.mark.parametrize("at", [0, 8, 20, 86, -1])
def test_a_flipped_byte_is_refused(at):
    data = bytearray(GOLDEN.read_bytes())
    data[at] ^= 1
    with pytest.raises(FormatError):
        capsule_store.decode(bytes(data))


def test_a_capsule_of_a_newer_format_stays_as_it_is_and_counts(tmp_path, caplog):
    arena = Arena(tmp_path / "arena", 0)
    data = bytearray(GOLDEN.read_bytes())
    name = f"capsule-5.3-{bytes(range(16)).hex()}-1234"
    path = arena.write_file("golden-job.1", name, bytes(data))
    data[8] += 1
    newer = arena.write_file("golden-job.1", f"{name}5", bytes(data))
    store = capsule_store.CapsuleStore(arena, "golden-job.1")
    store.adopt()
    assert [header.version.step for header in store.headers()] == [1234]
    assert newer.read_bytes() == data and "stays as it is: the capsule has format 2.0" in caplog.text
    assert arena.held_bytes == store.held_bytes == path.stat().st_size + newer.stat().st_size
    store.free()
    assert arena.held_bytes == 0 and newer.exists(), "it goes with the job's folder"
