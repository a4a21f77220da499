"""Tests which record slot is written next, and when more are leased."""

from __future__ import annotations

import threading
from typing import Any

from reft.client.records.record_slots import RecordSlots
from reft.core.commit.pins import Pins
from reft.core.commit.version import Version
from tests.support.gradient_records import EPOCH, record_slots_of

PINS = Pins(0, 0, -1, 0)  # step 0 is protected: all later records are kept


class Lease:
    """Leases record slots without a daemon, once the test allows it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.counts: list[int] = []
        self.may_go, self.error = threading.Event(), error

    def __call__(self, count: int, mapped: list[Any]) -> list[Any]:
        assert self.may_go.wait(20)
        self.counts.append(count)
        if self.error:
            raise self.error
        return record_slots_of(count, 100)[len(mapped) :]


def record(slots: RecordSlots, mark: int, pins: Pins = PINS) -> bool:
    """Records a mark; returns whether there was a slot."""
    slot = slots.choose(EPOCH, mark, pins)
    if slot is not None:
        slot.map.begin(Version(EPOCH, mark), bytes(16), b"", 0)
        slot.map.landed()
        slot.map.sealed(slot.map.digests[:0])
    return slot is not None


def grown(slots: RecordSlots) -> int:
    """Waits for the lease of more slots; returns how many there are then."""
    assert slots._thread is not None
    slots._thread.join(20)
    return len(slots.mapped)


def test_slots_are_doubled_once_when_the_last_one_is_taken():
    lease = Lease()
    slots = RecordSlots(record_slots_of(4, 100), lease)
    assert all(record(slots, mark) for mark in (1, 2, 3)) and slots._thread is None
    assert record(slots, 4) and not record(slots, 5), "nothing waits for the lease"
    lease.may_go.set()
    assert grown(slots) == 8
    assert [record(slots, mark) for mark in range(6, 11)] == [True] * 4 + [False]
    assert grown(slots) == 8 and lease.counts == [8]
    assert sorted(slot.map.header.version.step for slot in slots.mapped) == [1, 2, 3, 4, 6, 7, 8, 9]


def test_no_more_are_leased_while_turns_keep_up():
    slots = RecordSlots(record_slots_of(4, 100), Lease())
    assert all(record(slots, mark, Pins(0, mark - 1, -1, mark - 2)) for mark in range(2, 20))
    assert slots._thread is None


def test_without_room_there_are_gaps_and_no_error(caplog):
    caplog.set_level("INFO")
    lease = Lease(OSError("no room"))
    lease.may_go.set()
    slots = RecordSlots(record_slots_of(2, 100), lease)
    assert record(slots, 1) and record(slots, 2)
    assert grown(slots) == 2 and "no more than 2 record slots: no room" in caplog.text
    assert not record(slots, 3)


def test_there_is_a_limit():
    lease = Lease()
    lease.may_go.set()
    slots = RecordSlots(record_slots_of(16, 100), lease)
    assert all(record(slots, mark) for mark in range(1, 17))
    assert grown(slots) == 16 and lease.counts == []
