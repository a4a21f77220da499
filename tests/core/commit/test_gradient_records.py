"""Tests which record slot a mark may use, which records lead from P to T, and where bytes lie."""

from __future__ import annotations

import itertools

import pytest

from reft.core.commit.gradient_records import (
    RECORD_SLOTS_MAX,
    RecordDigests,
    RecordItem,
    chain_gap,
    lay_out,
    log_end,
    needed_after,
    record_slots,
    usable_record_slots,
)
from reft.core.commit.pins import Pins
from reft.core.commit.slots import Slot, SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import ALIGNMENT

OWN, OLD = Epoch(2, b"2" * 16), Epoch(1, b"1" * 16)
CHUNK = 4096


def test_record_slots_hold_those_of_a_turn_and_some_more():
    assert [record_slots(every) for every in (1, 3, 7, 8, 100)] == [4, 8, RECORD_SLOTS_MAX] + 2 * [RECORD_SLOTS_MAX]


@pytest.mark.parametrize(
    ("pins", "sealed", "mark", "floor"),
    [
        # whole, turn, protected
        (Pins(), (), 1, -1),
        (Pins(0, 3), (1, 2, 3), 4, 3),  # nothing is protected: the next turn has no copies to fold into
        (Pins(0, 3, 2), (1, 2, 3), 4, 2),
        (Pins(0, 5, -1, 3), (4, 5), 6, 3),  # complete: kept for the turn of 5 or later
        (Pins(0, 5, -1, 3), (5,), 6, 5),  # a gap at 4
        (Pins(0, 5, -1, 3), (4,), 6, 5),  # a gap at 5
        (Pins(0, 7, 5, 3), (4, 5, 6, 7), 8, 3),
        (Pins(0, 7, 5, 3), (4, 6, 7), 8, 5),  # the turn of 5 is the mover's: only later records count
        (Pins(0, 7, 5, 3), (4, 5, 7), 8, 3),  # the gap at 6 does not matter to the turn of 5
        (Pins(0, 5, -1, 5), (), 6, 5),
        (Pins(0, 6, -1, 4), (5,), 6, 4),  # 6 is being recorded: not yet a gap
        (Pins(0, 7, 7, 4), (5,), 6, 4),
        (Pins(0, 7, 7, 4), (), 6, 7),
    ],
)
def test_records_are_needed_from_the_protected_step_on_unless_a_gap_follows(pins, sealed, mark, floor):
    assert needed_after(pins, sealed, mark) == floor


def slots_with(*marks: int | None, epoch: Epoch = OWN, state: SlotState = SlotState.SEALED) -> list[Slot]:
    return [
        Slot(i, SlotState.EMPTY if mark is None else state, None if mark is None else Version(epoch, mark))
        for i, mark in enumerate(marks)
    ]


def chosen(slots: list[Slot], pins: Pins, mark: int) -> int | None:
    slot = next(iter(usable_record_slots(slots, OWN, mark, pins)), None)
    return None if slot is None else slot.index


def test_an_empty_slot_comes_first_then_the_oldest_record():
    assert chosen(slots_with(4, None, 5), Pins(0, 5, -1, 5), 6) == 1
    assert chosen(slots_with(5, 4, 3), Pins(0, 5, -1, 5), 6) == 2


def test_no_slot_is_free_while_all_records_are_needed():
    assert chosen(slots_with(4, 5, 6, 7), Pins(0, 7, 5, 3), 8) is None
    assert chosen(slots_with(4, 5, 6, 7), Pins(0, 7, -1, 4), 8) == 0


@pytest.mark.parametrize("state", [SlotState.WRITING, SlotState.LANDED])
def test_a_record_that_was_not_sealed_is_free(state):
    assert chosen(slots_with(4, 5, state=state), Pins(0, 3, -1, 3), 6) == 0


def test_a_record_of_another_epoch_is_free():
    assert chosen(slots_with(4, 5, epoch=OLD), Pins(0, 3, -1, 3), 6) == 0
    other = Epoch(OWN.counter, b"3" * 16)
    assert chosen(slots_with(4, 5, epoch=other), Pins(0, 3, -1, 3), 6) == 0


def test_records_of_a_replayed_base_stay_until_a_step_of_the_new_epoch_is_whole():
    slots, replayed = slots_with(4, 5, 6, epoch=OLD), frozenset({Version(OLD, 5), Version(OLD, 6)})

    def chosen_now(pins: Pins, slots: list[Slot]) -> int | None:
        slot = next(iter(usable_record_slots(slots, OWN, 7, pins, replayed)), None)
        return None if slot is None else slot.index

    assert chosen_now(Pins(), slots) == 0 and chosen_now(Pins(), slots[1:]) is None
    assert chosen_now(Pins(0, 6), slots[1:]) == 1
    assert chosen(slots[1:], Pins(), 7) == 1


def test_recording_begins_again_after_a_turn_that_lasts_longer_than_the_slots():
    """Each turn of the mover lasts 3 marks. With 4 slots the records since T are complete then."""
    slots, pins, folded = slots_with(None, None, None, None), Pins(), []
    for mark in range(1, 30):
        slot = next(iter(usable_record_slots(slots, OWN, mark, pins)), None)
        if slot is not None:
            slots[slot.index] = Slot(slot.index, SlotState.SEALED, Version(OWN, mark))
        sealed = {each.version.step for each in slots if each.version}
        turn, protected = pins.turn, pins.protected
        if turn >= 0 and (mark - turn == 3 or (protected >= 0 and set(range(protected + 1, turn + 1)) <= sealed)):
            folded += [turn] if mark - turn < 3 else []
            turn, protected = -1, turn
        pins = Pins(0, mark, mark if turn < 0 else turn, protected)
    assert folded, "no turn was folded"
    assert folded[-1] >= 27


def records_of(*links: tuple[int, str, str]) -> dict[int, RecordDigests]:
    return {mark: RecordDigests(previous, own) for mark, previous, own in links}


CHAIN = records_of((4, "", "d"), (5, "d", "e"), (6, "e", "f"))


def test_a_chain_leads_from_the_protected_step_to_the_turn():
    for protected, turn in itertools.combinations(range(3, 7), 2):
        assert chain_gap(CHAIN, protected, turn) == ""


@pytest.mark.parametrize(
    ("records", "protected", "turn", "reason"),
    [
        (CHAIN, 2, 6, "mark 3 is missing"),
        (CHAIN, 3, 7, "mark 7 is missing"),
        ({mark: CHAIN[mark] for mark in (4, 6)}, 3, 6, "mark 5 is missing"),
        ({**CHAIN, 5: RecordDigests("", "e")}, 3, 6, "mark 5 follows another"),
        ({**CHAIN, 6: RecordDigests("d", "f")}, 3, 6, "mark 6 follows another"),
        ({4: CHAIN[5], 5: CHAIN[4], 6: CHAIN[6]}, 3, 6, "mark 5 follows another"),
        ({4: CHAIN[4], 5: CHAIN[4], 6: CHAIN[6]}, 3, 6, "mark 5 follows another"),
        (CHAIN, 5, 5, "does not lie behind"),
        (CHAIN, 6, 5, "does not lie behind"),
    ],
)
def test_a_dropped_repeated_reordered_or_changed_record_ends_the_chain(records, protected, turn, reason):
    assert reason in chain_gap(records, protected, turn)


def item(optimizer: int, name: str, nbytes: int, has_parameter: bool = False) -> RecordItem:
    return RecordItem(1, optimizer, name, "uint8", (nbytes,), nbytes, has_parameter)


@pytest.mark.parametrize(
    ("protected", "sealed", "end"),
    [(3, (4, 5), 5), (3, (3,), 3), (3, (4, 6), 4), (3, (5, 6), -1), (3, (), -1), (3, (2, 3, 4, 5, 7), 5), (0, (1,), 1)],
)
def test_the_log_ends_before_the_first_gap(protected, sealed, end):
    assert log_end(protected, sealed) == end


def test_items_lie_end_to_end_and_each_optimizer_begins_a_chunk():
    layout = lay_out([item(1, "c", 10, True), item(0, "a", 5000), item(0, "b", 64, True)], CHUNK)
    assert [each.name for each in layout.items] == ["a", "b", "c"]
    assert layout.places == ((0, -1), (5056, 5120), (8192, 8256))
    assert layout.parts == {0: (0, 2), 1: (2, 3)} and layout.data_bytes == 8320
    ranges = sorted(
        (begin, begin + each.nbytes)
        for each, place in zip(layout.items, layout.places, strict=True)
        for begin in place
        if begin >= 0
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert all(begin % ALIGNMENT == 0 for begin, _ in ranges) and ranges[-1][1] <= layout.data_bytes


def test_other_items_or_places_have_another_digest():
    layouts = [
        lay_out([item(0, "a", 10)], CHUNK), lay_out([item(0, "b", 10)], CHUNK), lay_out([item(0, "a", 11)], CHUNK),
        lay_out([item(0, "a", 10, True)], CHUNK), lay_out([item(1, "a", 10)], CHUNK), lay_out([], CHUNK),
    ]  # fmt: skip
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert all(len(layout.digest) == 16 for layout in layouts)
    assert lay_out([], CHUNK).data_bytes == 0
