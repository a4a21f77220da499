"""Tests which parity slots turns write, and which names parity slots have."""

from __future__ import annotations

from reft.core.commit.version import Version
from reft.wire.slot_format import Geometry, Header
from reft_daemon.arena.arena import PARITY, next_names
from reft_daemon.jobs.parity import fitting_parity
from tests.support.jobs import epoch_of

WANTED = Geometry(0, 1 << 20, 4096)


def header(step: int | None = None, geometry: Geometry = WANTED, counter: int = 1) -> Header:
    version = None if step is None else Version(epoch_of(counter), step)
    return Header(geometry, "job", 0, version=version)


def at(step: int, counter: int = 1) -> Version:
    return Version(epoch_of(counter), step)


def test_slots_of_other_sizes_and_damaged_ones_do_not_fit():
    smaller, other_chunks = Geometry(0, 1 << 19, 4096), Geometry(0, 1 << 20, 8192)
    headers = {"a": header(1, smaller), "b": header(2, other_chunks), "c": None, "d": header()}
    assert fitting_parity(headers, WANTED, None) == ["d"]


def test_at_most_two_slots_are_written_and_one_of_them_has_the_kept_version():
    headers = {"a": header(4), "b": header(), "c": header(2)}
    assert fitting_parity(headers, WANTED, at(2)) == ["c", "a"]
    assert fitting_parity(headers, WANTED, at(2, 2)) == ["a", "b"], "another history"
    assert fitting_parity(headers, WANTED, None) == ["a", "b"]


def test_names_of_parity_slots_are_counted_by_themselves():
    taken = ["rank-3.slot-7", "parity-3.slot-1", "parity-31.slot-5"]
    assert next_names(taken, 3, 2, PARITY) == ["parity-3.slot-2", "parity-3.slot-3"]
    assert next_names(taken, 3, 1) == ["rank-3.slot-8"]
