"""Gradient records: which slot a mark's record may use, and which records lead from P to T.

A node that copies the state of other ranks folds their gradients into its copy, on the host. For
that, each rank records the gradients of the ranks it copies, one record for each mark. A turn from
the protected step P to step T needs the records of the marks P+1 … T.

    mark            P │ P+1 … T │ T+1 …
    record slot       │ kept    │ kept for the next turn
                      └ free once P is protected; free at once if P+1 … T lack a record, because
                        then the turn of T is made by the mover

    EMPTY ──first gradient──► WRITING ──last byte──► LANDED ──digests──► SEALED ──► WRITING …

Invariants
  1. A sealed record holds the gradients of all updates since the mark before, bit for bit. A record
     that can't be made is left out: its mark is a gap.
  2. A gap is no error. The turn over a gap is made by the mover. Then P lies behind the gap.
  3. A record that a turn may still fold is not written again. These are the records behind P, if
     they are complete up to the turn under way, or up to the newest whole step.
  4. If the base was replayed from records, they stay until a step of the new epoch is whole: until
     then the base may have to be replayed again.
  5. Nothing waits for a free slot. Without one, the mark is a gap.

The next turn takes the newest whole step, or a later one. So with a gap before the newest whole
step, no turn folds any of the records up to that step. Without this rule, records before a gap
would keep their slots until the mover's turn ends, and each turn would meet the next gap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reft.core.commit.pins import Pins
from reft.core.commit.slots import Slot, SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import ALIGNMENT, align

SPARE_RECORDS = 2  # one that is written, and one whose turn is not known to be over
RECORD_SLOTS_MAX = 16  # of a rank; with longer intervals between snapshots no turn folds records


def record_slots(every: int) -> int:
    """Returns the number of record slots of a rank.

    Args:
        every: every how many marks a snapshot is taken. So many records lead from P to T, and so
            many marks may end during the turn.
    """
    return min(2 * every + SPARE_RECORDS, RECORD_SLOTS_MAX)


# What a record holds


@dataclass(frozen=True)
class RecordItem:
    """A gradient that each record has a place for.

    Attributes:
        owner: the rank whose section has the parameter's moments.
        optimizer: index of the optimizer.
        name: name of the parameter.
        dtype: dtype of the parameter and its gradient.
        shape: shape of both.
        nbytes: bytes of each of them.
        has_parameter: whether the parameter is recorded, too: its update reads the parameter.
    """

    owner: int
    optimizer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    has_parameter: bool


class RecordPlace(NamedTuple):
    """Where an item lies in a record's data; -1: the parameter is not recorded."""

    offset: int
    param_offset: int


@dataclass(frozen=True)
class RecordLayout:
    """The places of all items of an epoch's records.

    The items of each optimizer begin at a chunk, so an optimizer's step can be copied and digested
    by itself.

    Attributes:
        items: in the order of their optimizers.
        places: of the items.
        parts: optimizer → its first chunk, and the end of its chunks.
        data_bytes: size of the data; the last part ends there.
    """

    items: tuple[RecordItem, ...]
    places: tuple[RecordPlace, ...]
    parts: Mapping[int, tuple[int, int]]
    data_bytes: int

    @property
    def digest(self) -> bytes:
        """Names the layout, 16 bytes: the same items at the same places."""
        facts = repr((self.items, self.places, self.data_bytes))
        return hashlib.blake2b(facts.encode(), digest_size=16).digest()


def lay_out(items: Sequence[RecordItem], chunk_bytes: int) -> RecordLayout:
    """Returns the layout of records.

    Args:
        items: what each record has a place for.
        chunk_bytes: size of a chunk of the record slots.
    """
    ordered = sorted(items, key=lambda item: item.optimizer)
    places: list[RecordPlace] = []
    parts: dict[int, tuple[int, int]] = {}
    end = 0
    for item in ordered:
        if item.optimizer not in parts:
            end = align(end, chunk_bytes)
        begin, size = end, align(item.nbytes, ALIGNMENT)
        places.append(RecordPlace(begin, begin + size if item.has_parameter else -1))
        end = begin + size * (1 + item.has_parameter)
        first = parts[item.optimizer][0] if item.optimizer in parts else begin // chunk_bytes
        parts[item.optimizer] = first, -(-end // chunk_bytes)
    return RecordLayout(tuple(ordered), tuple(places), parts, end)


# Which slot is written


def needed_after(pins: Pins, sealed: Collection[int], mark: int) -> int:
    """Returns the mark behind which a turn may still fold records.

    Args:
        pins: the newest pins that are known.
        sealed: the marks of the epoch whose records are sealed.
        mark: the next mark to record. No record of an earlier mark is made any more.
    """
    target = pins.turn if pins.turn >= 0 else pins.whole
    before = range(pins.protected + 1, min(target + 1, mark))
    is_complete = pins.protected >= 0 and all(each in sealed for each in before)
    return pins.protected if is_complete else target


def usable_record_slots(
    slots: Sequence[Slot], epoch: Epoch, mark: int, pins: Pins, replayed: Collection[Version] = ()
) -> list[Slot]:
    """Returns the slots for the record of a mark, the best first.

    Without one the mark is a gap.

    Args:
        slots: all record slots of the rank. Nothing writes one of them now.
        epoch: the epoch in force.
        mark: the mark to record.
        pins: the newest pins that are known.
        replayed: records of an earlier epoch from which a rank has replayed the base.
    """
    kept = replayed if pins.whole < 0 else ()
    marks = {slot.index: mark_of(slot, epoch) for slot in slots}
    floor = needed_after(pins, set(marks.values()), mark)
    usable = [slot for slot in slots if marks[slot.index] <= floor and slot.version not in kept]
    return sorted(usable, key=lambda slot: marks[slot.index])


def mark_of(slot: Slot, epoch: Epoch) -> int:
    """Returns the mark of a sealed record of this epoch; -1 for any other content."""
    if slot.version is None or slot.version.epoch != epoch or slot.state is not SlotState.SEALED:
        return -1
    return slot.version.step


# Which records lead from P to T


class RecordDigests(NamedTuple):
    """The digest of a record, and of the one before, as the record names it."""

    previous: str
    own: str


def chain_gap(records: Mapping[int, RecordDigests], protected: int, turn: int) -> str:
    """Returns why the records don't lead from one step to another; empty if they do.

    The first record may name any record before it, since only later records are folded.

    Args:
        records: mark → digests of its record, of one rank and one epoch.
        protected: the step of the copies at hand.
        turn: the step of the copies to make.
    """
    if turn <= protected:
        return f"step {turn} does not lie behind step {protected}."
    for mark in range(protected + 1, turn + 1):
        if mark not in records:
            return f"the record of mark {mark} is missing."
        if mark > protected + 1 and records[mark].previous != records[mark - 1].own:
            return f"the record of mark {mark} follows another record than that of mark {mark - 1}."
    return ""


def log_end(protected: int, sealed: Collection[int]) -> int:
    """Returns the step to which sealed records lead from the protected one; -1: to none.

    So far a lost rank can replay its part. Without the record of that step itself, nobody records
    now.

    Args:
        protected: the step of the copies at hand.
        sealed: the marks of the epoch whose records are sealed.
    """
    end = protected
    while end + 1 in sealed:
        end += 1
    return end if end in sealed else -1
