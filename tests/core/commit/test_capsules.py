"""Capsules: owed, acknowledged, dropped; lost, late and repeated messages; a random history."""

from __future__ import annotations

import random

import pytest

from reft.core.commit.capsules import CapsuleAcks, capsules_to_drop
from reft.core.commit.decision import Decision, counts
from reft.core.commit.pins import Pins
from reft.core.commit.round import UNDECIDED_MAX, Outcome, StepReport
from reft.core.commit.version import Epoch, Version
from tests.support.saying import SEALED, VOID, report_of

NOW, BEFORE, OTHER = Epoch(2, b"n" * 16), Epoch(1, b"b" * 16), Epoch(1, b"o" * 16)


# What is owed


def pending(*steps: int, until: int | None = None) -> StepReport:
    return StepReport(until=max(steps) if until is None else until, pending=frozenset(steps))


def test_without_holders_every_answer_counts_at_once():
    capsule_acks = CapsuleAcks(())
    assert capsule_acks.hear_rank(0, report_of({1: SEALED, 2: VOID})) == report_of({1: SEALED, 2: VOID})
    assert capsule_acks.owed(0) == []


def test_sealed_counts_once_every_holder_has_it():
    capsule_acks = CapsuleAcks((4, 7))
    assert capsule_acks.hear_rank(0, report_of({1: SEALED})) == pending(1)
    assert capsule_acks.owed(4) == capsule_acks.owed(7) == [(0, 1)]
    assert capsule_acks.acknowledge(7, [(0, 1)]) == {}
    assert capsule_acks.owed(7) == [] and capsule_acks.owed(4) == [(0, 1)]
    assert capsule_acks.acknowledge(4, [(0, 1)]) == {0: report_of({1: SEALED})}
    assert capsule_acks.hear_rank(0, report_of({1: SEALED})) == report_of({1: SEALED})  # repeated, it still counts


def test_a_void_counts_at_once_without_a_capsule():
    capsule_acks = CapsuleAcks((4,))
    assert capsule_acks.hear_rank(0, report_of({1: VOID})) == report_of({1: VOID})
    assert capsule_acks.hear_rank(0, report_of({1: SEALED})) == report_of({1: VOID})
    assert capsule_acks.owed(4) == []


def test_the_first_answer_counts_before_acknowledgement():
    capsule_acks = CapsuleAcks((4,))
    capsule_acks.hear_rank(0, report_of({1: SEALED}))
    assert capsule_acks.hear_rank(0, report_of({1: VOID})) == pending(1)
    assert capsule_acks.acknowledge(4, [(0, 1)]) == {0: report_of({1: SEALED})}


def test_late_repeated_and_foreign_acknowledgements_change_nothing():
    capsule_acks = CapsuleAcks((4, 7))
    capsule_acks.hear_rank(0, report_of({1: SEALED}))
    assert capsule_acks.acknowledge(4, [(0, 1), (0, 9), (5, 1)]) == {}
    assert capsule_acks.acknowledge(4, [(0, 1)]) == capsule_acks.acknowledge(9, [(0, 1)]) == {}
    assert capsule_acks.owed(7) == [(0, 1)]
    assert capsule_acks.acknowledge(7, [(0, 1)]) == {0: report_of({1: SEALED})}
    assert capsule_acks.acknowledge(7, [(0, 1)]) == {}


def test_capsules_of_decided_steps_are_not_owed():
    capsule_acks = CapsuleAcks((4,))
    capsule_acks.hear_rank(0, report_of({1: SEALED, 2: SEALED, 3: SEALED, 4: SEALED}))
    capsule_acks.settle(Outcome(Pins(whole=2), 4, frozenset({3})))
    assert capsule_acks.owed(4) == [(0, 3)]
    assert capsule_acks.hear_rank(0, report_of({1: SEALED, 4: SEALED})) == StepReport(2, 4, pending=frozenset({3}))
    assert capsule_acks.owed(4) == [(0, 3)]
    assert capsule_acks.acknowledge(4, [(0, 2)]) == {}


def test_digests_are_kept_as_long_as_the_answer():
    capsule_acks = CapsuleAcks((4,))
    capsule_acks.hear_rank(0, report_of({1: SEALED, 2: SEALED}), {1: {7: 11}, 2: {7: 12}})
    capsule_acks.hear_rank(0, report_of({1: SEALED}), {1: {7: 99}})  # the first answer counts
    assert capsule_acks.acknowledge(4, [(0, 1)]) == {0: StepReport(-1, 2, frozenset({1}), frozenset({2}))}
    assert capsule_acks.digests_of(0)[1] == {7: 11} and not capsule_acks.digests_of(5)
    capsule_acks.settle(Outcome(Pins(whole=1), 1))
    assert capsule_acks.digests_of(0) == {2: {7: 12}}


def test_a_step_lost_from_the_slots_counts_only_if_sealed_again():
    """A restarted daemon lacks a memfd: the rank reports first, and returns the slot later."""
    capsule_acks = CapsuleAcks((4,))
    capsule_acks.hear_rank(0, report_of({1: SEALED}))
    capsule_acks.forget(0, 1)
    capsule_acks.forget(3, 1)
    assert capsule_acks.owed(4) == [] and capsule_acks.acknowledge(4, [(0, 1)]) == {}
    assert capsule_acks.hear_rank(0, report_of({2: VOID})) == pending(1, until=2), "not void, because a void is final"
    assert capsule_acks.hear_rank(0, StepReport(sealed=frozenset({1}))) == pending(1, until=2)
    assert capsule_acks.owed(4) == [(0, 1)]
    assert capsule_acks.acknowledge(4, [(0, 1)]) == {0: report_of({1: SEALED, 2: VOID})}


def test_a_capsule_from_before_a_long_silence_counts_once_acknowledged():
    capsule_acks = CapsuleAcks((4,))
    for newest in range(10, 1000):
        capsule_acks.hear_rank(0, report_of({1: SEALED, 7: SEALED, newest: VOID}), {1: {0: 11}, 7: {0: 22}})
    assert [step for _, step in capsule_acks.owed(4)] == [1, 7]
    assert capsule_acks.acknowledge(4, [(0, 1), (0, 7)]) == {0: report_of({1: SEALED, 7: SEALED, 999: VOID})}
    assert capsule_acks.digests_of(0) == {1: {0: 11}, 7: {0: 22}}


def test_the_oldest_step_of_all_ranks_goes_first_and_the_list_is_bounded():
    capsule_acks = CapsuleAcks((4,))
    capsule_acks.hear_rank(1, report_of({5: SEALED, 3: SEALED}))
    capsule_acks.hear_rank(0, report_of({5: SEALED}))
    assert capsule_acks.owed(4) == [(1, 3), (0, 5), (1, 5)]
    capsule_acks.hear_rank(0, report_of(dict.fromkeys(range(10, 90), SEALED)))
    assert len([pair for pair in capsule_acks.owed(4) if pair[0] == 0]) == UNDECIDED_MAX


@pytest.mark.parametrize("seed", range(30))
def test_an_answer_counts_only_if_all_holders_have_the_capsule(seed):
    chance = random.Random(seed)
    holders, ranks, steps = (1, 2, 3), range(3), range(6)
    capsule_acks = CapsuleAcks(holders)
    kept: dict[int, set[tuple[int, int]]] = {holder: set() for holder in holders}
    counted: set[tuple[int, int]] = set()
    for _ in range(300):
        rank, step, holder = chance.choice(ranks), chance.choice(steps), chance.choice(holders)
        if chance.random() < 0.3:
            counted |= {
                (rank, step) for step in capsule_acks.hear_rank(rank, StepReport(sealed=frozenset({step}))).sealed
            }
        sent = capsule_acks.owed(holder)[: chance.randrange(4)]
        if chance.random() < 0.5:  # else the message is lost
            kept[holder] |= set(sent)
            if chance.random() < 0.5:  # else the acknowledgement is
                due = capsule_acks.acknowledge(holder, sent)
                counted |= {(rank, step) for rank, report in due.items() for step in report.sealed}
        for pair in counted:
            assert all(pair in kept[each] for each in holders)
    for holder in holders:
        for rank, report in capsule_acks.acknowledge(holder, capsule_acks.owed(holder)).items():
            counted |= {(rank, step) for step in report.sealed}
    assert counted == {(rank, step) for rank in ranks for step in steps}


# Which capsules a holder drops


def at(step: int, epoch: Epoch = NOW) -> Version:
    return Version(epoch, step)


def test_a_holder_drops_versions_older_than_the_newest_whole_one():
    kept = [at(3), at(4), at(5), at(6)]
    assert capsules_to_drop(kept, Decision(NOW, None), Outcome()) == set()
    assert capsules_to_drop(kept, Decision(NOW, None), Outcome(Pins(whole=5), 5)) == {at(3), at(4)}
    assert capsules_to_drop([at(7, BEFORE), at(0)], Decision(NOW, at(7, BEFORE)), Outcome(Pins(whole=0), 0)) == {
        at(7, BEFORE)
    }


def test_a_holder_drops_void_versions():
    assert capsules_to_drop([at(3), at(4)], Decision(NOW, None), Outcome(Pins(), 4, frozenset({3}))) == {at(4)}


def test_the_base_stays_until_a_version_of_the_new_epoch_is_whole():
    decision = Decision(NOW, at(8, BEFORE))
    kept = [at(7, BEFORE), at(8, BEFORE), at(9)]
    assert capsules_to_drop(kept, decision, Outcome()) == set()
    assert (
        capsules_to_drop(kept, decision, Outcome(Pins(), 8)) == set()
    )  # a void of this epoch, not of the epoch of the base
    assert capsules_to_drop(kept, decision, Outcome(Pins(whole=9), 9)) == {at(7, BEFORE), at(8, BEFORE)}


def test_a_holder_drops_versions_of_superseded_histories():
    decision = Decision(NOW, at(8, BEFORE))
    kept = [at(9, BEFORE), at(8, OTHER), at(1, Epoch(3, b"l" * 16)), at(8, BEFORE), at(9)]
    assert capsules_to_drop(kept, decision, Outcome()) == set(kept[:3])
    assert capsules_to_drop(kept, Decision(NOW, None), Outcome()) == set(kept[:4])


def test_a_holder_limits_undecided_versions():
    base = at(50, BEFORE)
    kept = [base, *(at(step) for step in range(UNDECIDED_MAX + 3))]
    assert capsules_to_drop(kept, Decision(NOW, base), Outcome()) == {at(0), at(1), at(2)}
    whole = Outcome(Pins(whole=1), 1)
    assert capsules_to_drop(kept, Decision(NOW, base), whole) == {base, at(0), at(2)}  # step 1 is whole, and stays


def test_which_versions_count_under_a_decision():
    decision = Decision(NOW, at(8, BEFORE))
    assert counts(at(99), decision) and counts(at(8, BEFORE), decision) and counts(at(1, BEFORE), decision)
    assert not counts(at(9, BEFORE), decision) and not counts(at(8, OTHER), decision)
    assert not counts(at(8, BEFORE), Decision(NOW, None))
