"""Tests which slots a rank writes while the layout changes, without a daemon."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest

from reft.client.snapshot.rank_slots import RankSlots
from reft.client.snapshot.round_view import KeptVersions
from reft.core.commit.slots import Slot, SlotState
from reft.core.commit.version import Epoch, Version
from reft.errors import NoRoom
from reft.wire.slot_format import Geometry, Header
from tests.support.daemons import until

OLD, NEW = Epoch(1, b"1" * 16), Epoch(2, b"2" * 16)
BASE, WHOLE = Version(OLD, 9), Version(NEW, 10)
PLAN, LARGER = (SimpleNamespace(data_bytes=size, table=b"") for size in (4096, 2 * 4096))


def slot_of(index: int, version: Version | None = None, data_bytes: int = 4096) -> SimpleNamespace:
    state = SlotState.SEALED if version else SlotState.EMPTY
    header = Header(Geometry(4096, data_bytes, 4096), "job", 0, state, version)
    slot = SimpleNamespace(index=index, map=SimpleNamespace(header=header), closed=0, left=0)
    slot.view = lambda: Slot(index, state, version)
    slot.close = lambda: setattr(slot, "closed", slot.closed + 1)
    slot.leave = lambda: setattr(slot, "left", slot.left + 1)
    return slot


def kept_with(whole: Version | None, *pinned: Version) -> KeptVersions:
    return KeptVersions(whole, frozenset({whole, *pinned} - {None}))


KEPT = kept_with(WHOLE)


class FakeLeases:
    """Leases whose further slots come when `is_made` is set.

    Args:
        further: the slots that come, or the error that is raised.
    """

    epoch = NEW

    def __init__(self, further: list[SimpleNamespace] | NoRoom) -> None:
        self.further, self.is_made, self.asked = further, threading.Event(), []

    def lease_further(self, mapped: list[SimpleNamespace]) -> list[SimpleNamespace]:
        self.asked.append([slot.index for slot in mapped])
        assert self.is_made.wait(20)
        if isinstance(self.further, NoRoom):
            raise self.further
        return self.further

    def lease(self, data_bytes: int, table_bytes: int) -> list[SimpleNamespace]:
        return [slot_of(0, data_bytes=data_bytes), slot_of(1, data_bytes=data_bytes)]


def prepared(slots: RankSlots, count: int) -> None:
    """Prepares snapshots until the rank has so many slots."""
    until(lambda: slots.prepare(PLAN, KEPT) and len(slots) == count, what="the slots")


def test_a_missing_slot_joins_in_the_background_once_a_version_of_the_epoch_is_whole():
    leases = FakeLeases([slot_of(2)])
    slots = RankSlots([slot_of(0, WHOLE), slot_of(1)], leases, 0, wanted=3)
    assert slots.prepare(PLAN, KEPT) and len(slots) == 2, "snapshots go on while the slot is made"
    assert slots.prepare(PLAN, KEPT) and len(slots) == 2
    leases.is_made.set()
    prepared(slots, 3)
    assert leases.asked == [[0, 1]], "asked once"
    chosen = slots.choose({0, 1}, KEPT, lambda _: False)
    assert chosen is leases.further[0]
    slots.unmap()
    assert leases.further[0].closed == 1


@pytest.mark.parametrize(
    ("held", "whole", "wanted"),
    [
        ([BASE, None], BASE, 3),
        ([None, None], BASE, 3),
        ([None, None], None, 3),
        ([Version(NEW, 11), None], WHOLE, 3),
        ([WHOLE, None], WHOLE, 2),
    ],
)
def test_no_slot_joins_while_older_slots_are_needed_or_none_is_missing(held, whole, wanted):
    """The base may still be needed, or a whole version lies in slots of an older layout."""
    leases = FakeLeases([slot_of(2)])
    slots = RankSlots([slot_of(i, version) for i, version in enumerate(held)], leases, 0, wanted)
    assert slots.prepare(PLAN, kept_with(whole)) and slots.prepare(PLAN, kept_with(whole))
    assert leases.asked == [] and len(slots) == 2


def test_without_memory_for_the_missing_slot_the_rank_goes_on(caplog):
    leases = FakeLeases(NoRoom("no room."))
    leases.is_made.set()
    slots = RankSlots([slot_of(0, WHOLE), slot_of(1)], leases, 0, wanted=3)
    assert slots.prepare(PLAN, KEPT)
    until(lambda: "rank 0 goes on with 2 of 3 slots: no room." in caplog.text, what="the warning")
    assert slots.prepare(PLAN, KEPT) and slots.prepare(PLAN, KEPT)
    assert len(leases.asked) == 1 and len(slots) == 2


def test_a_larger_layout_waits_for_the_missing_slot_and_replaces_all():
    leases = FakeLeases([slot_of(2)])
    slots = RankSlots([slot_of(0, WHOLE), slot_of(1)], leases, 0, wanted=3)
    assert slots.prepare(PLAN, KEPT)
    assert not slots.prepare(LARGER, KEPT)
    leases.is_made.set()
    until(lambda: slots.prepare(LARGER, KEPT), what="the larger slots")
    assert len(slots) == 2, "the third one joins once a larger slot holds a whole version"
    assert len(leases.asked) == 1


def test_replaced_slots_are_left_and_held_no_longer_but_not_closed():
    """A running snapshot holds its own slot. After three growths 7 of 10 mapped slots were such."""
    old = [slot_of(0, WHOLE), slot_of(1)]
    slots = RankSlots([*old], FakeLeases([]), 0, wanted=2)
    assert not slots.prepare(LARGER, KEPT)
    until(lambda: slots.prepare(LARGER, KEPT), what="the larger slots")
    assert [(slot.left, slot.closed) for slot in old] == [(1, 0), (1, 0)]
    assert not any(slot in gc.get_referents(held) for slot in old for held in vars(slots).values())
    slots.unmap()
    assert [slot.closed for slot in old] == [0, 0]


def test_a_closed_session_says_nothing_of_slots_that_are_still_made(caplog):
    leases = FakeLeases(NoRoom("no room."))
    slots = RankSlots([slot_of(0, WHOLE), slot_of(1)], leases, 0, wanted=3)
    slots.prepare(PLAN, KEPT)
    thread = next(thread for thread in threading.enumerate() if thread.name == "reft-lease")
    slots.forget_lease()
    leases.is_made.set()
    thread.join(20)
    assert not caplog.text


def test_no_slot_joins_while_the_guard_is_held():
    """The daemon still holds the guard in a retired slot, and would make no more slots."""
    leases = FakeLeases([slot_of(2)])
    slots = RankSlots([slot_of(0, WHOLE), slot_of(1)], leases, 0, wanted=3)
    assert slots.prepare(PLAN, kept_with(WHOLE, BASE)) and leases.asked == []
    leases.is_made.set()
    prepared(slots, 3)


def test_a_pinned_slot_is_not_chosen():
    slots = RankSlots([slot_of(0, Version(NEW, 1)), slot_of(1, Version(NEW, 2))], FakeLeases([]), 0, wanted=2)
    assert slots.choose(set(), kept_with(WHOLE, Version(NEW, 1)), lambda _: False).index == 1
    assert slots.choose({1}, kept_with(WHOLE, Version(NEW, 1)), lambda _: False) is None
