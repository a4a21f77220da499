"""When a coordinator persists a step, and which one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.core.commit.pins import Pins
from reft.core.persist.persist_cadence import PersistCadence, newest_step

FRESH = PersistCadence(every_s=60, due_s=100)


@pytest.mark.parametrize(
    ("pins", "step", "flushed"),
    [
        (Pins(), -1, -1),
        (Pins(0, 7), 7, 7),
        (Pins(1, 7, 6), 6, 7),
        (Pins(2, 7, 6, 4), 4, 7),
        (Pins(2, 7, -1, 4), 4, 7),
    ],
)
def test_a_protected_step_goes_first_and_a_flush_takes_the_newest(pins, step, flushed):
    assert (newest_step(pins), newest_step(pins, flush=True)) == (step, flushed)


def test_a_step_is_persisted_when_the_interval_is_over():
    pins = Pins(0, 7)
    assert FRESH.next_step(pins, 99) == -1 and FRESH.next_step(pins, 100) == 7
    assert FRESH.next_step(Pins(), 100) == -1, "no step is whole yet"
    after = FRESH.begin(101).end(7, True)
    assert after.next_step(Pins(0, 9), 160) == -1 and after.next_step(Pins(0, 9), 161) == 9
    assert after.next_step(pins, 200) == -1, "it is on storage already"
    assert replace(FRESH, every_s=0).next_step(pins, 1e9) == -1, "only on request"


def test_a_request_is_answered_by_its_step_or_a_newer_one():
    asked = FRESH.request(Pins(0, 7), flush=False)
    assert asked.requested == 7 and asked.next_step(Pins(0, 8), 0) == 8
    assert asked.end(8, True).requested == -1
    later = asked.request(Pins(0, 9), flush=False)
    assert later.end(8, True).next_step(Pins(0, 9), 0) == 9, "the checkpoint under way was older than the request"


def test_a_request_that_is_given_up_is_not_tried_again():
    given_up = FRESH.request(Pins(0, 7), flush=True).end(7, False)
    assert (given_up.given_up, given_up.requested, given_up.flushes) == (7, -1, False)
    assert given_up.next_step(Pins(0, 8), 99) == -1 and given_up.next_step(Pins(0, 8), 100) == 8
    assert given_up.request(Pins(0, 8), flush=False).given_up == -1, "the next request counts by itself"
    older = FRESH.request(Pins(0, 9), flush=False).end(7, False)
    assert older.next_step(Pins(0, 9), 0) == 9, "the checkpoint that failed was begun before the request"


def test_a_restarted_coordinator_goes_on_with_the_pinned_step():
    pins = Pins(3, 9, -1, -1, 0, 0, -1, 5)
    assert FRESH.next_step(pins, 0) == 5
    assert FRESH.end(5, True).next_step(pins, 0) == -1, "complete, and not yet unpinned"


def test_the_interval_goes_on_over_an_attach():
    again = FRESH.end(7, True).request(Pins(0, 9), flush=True).next_epoch()
    assert again == FRESH, "steps of the earlier epoch are forgotten"


@pytest.mark.parametrize(
    ("age_s", "due_s"),
    [(0, 70), (20, 50), (60, 10), (1e9, 10), (-1e9, 70)],
)
def test_the_interval_counts_from_the_checkpoint_that_storage_has(age_s, due_s):
    begun = PersistCadence(every_s=60, due_s=70)
    assert begun.found(age_s, now_s=10).due_s == due_s
    assert replace(begun, due_s=5).found(age_s, now_s=10).due_s == 5, "an attach delays no checkpoint"
