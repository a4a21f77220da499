"""The recovery plan: which version, from which slots, and what must be emptied before anyone writes."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from reft.core.recovery import Decision, Held, Plan, newest_decision, next_epoch, plan
from reft.core.slots import SlotState
from reft.core.version import Epoch, Version

ONE, TWO, THREE = (Epoch(n, bytes([n]) * 16) for n in (1, 2, 3))
EMPTY, WRITING, LANDED, SEALED = SlotState


def at(step: int, epoch: Epoch = ONE) -> Version:
    return Version(epoch, step)


def held(
    rank: int, step: int | None, state: SlotState = SEALED, epoch: Epoch = ONE, node: str = "a", n: int = 0
) -> Held:
    version = None if step is None else at(step, epoch)
    return Held(node, rank, f"rank-{rank}.slot-{n}", state, version)


def both(step: int, epoch: Epoch = ONE, n: int = 0) -> list[Held]:
    return [held(rank, step, epoch=epoch, n=n) for rank in (0, 1)]


FRESH = Decision(ONE, None)


def test_nothing_held_is_a_fresh_start():
    assert plan([], 2, None) == Plan(None)
    assert plan([held(0, None, EMPTY)], 2, FRESH) == Plan(None)


def test_the_newest_version_that_every_rank_sealed():
    found = plan([*both(3), *both(4, n=1)], 2, FRESH)
    assert found.base == at(4)
    assert {rank: slot.slot for rank, slot in found.sources.items()} == {0: "rank-0.slot-1", 1: "rank-1.slot-1"}
    assert found.dropped == () and found.partial == ()


def test_a_version_that_some_lack_is_named_with_them_and_dropped():
    slots = [*both(3), held(0, 4, n=1), held(1, 4, LANDED, n=1), held(0, 5, n=2)]
    found = plan(slots, 2, FRESH)
    assert found.base == at(3)
    assert found.partial == ((at(5), (1,)), (at(4), (1,)))
    assert {slot.slot for slot in found.dropped} == {"rank-0.slot-1", "rank-1.slot-1", "rank-0.slot-2"}


def test_at_least_is_not_exactly():
    """Rank 1 went on to step 5 without step 4."""
    found = plan([*both(3), held(0, 4, n=1), held(1, 5, n=1)], 2, FRESH)
    assert found.base == at(3)


def test_open_slots_are_dropped_whatever_their_age():
    slots = [*both(3), held(0, 1, WRITING, n=1), held(1, 2, LANDED, n=1)]
    assert plan(slots, 2, FRESH).dropped == (slots[2], slots[3])


def test_older_sealed_versions_are_kept():
    assert plan([*both(2), *both(3, n=1)], 2, FRESH).dropped == ()


def test_if_nothing_is_whole_everything_is_dropped():
    slots = [held(0, 3), held(1, 4)]
    found = plan(slots, 2, FRESH)
    assert found.base is None and found.sources == {} and found.dropped == tuple(slots)
    assert found.partial == ((at(4), (0,)), (at(3), (1,)))


def test_what_an_older_history_wrote_after_the_base_does_not_count():
    """An orphan, or a node that comes back, still holds steps of epoch 1 that were not chosen."""
    late = both(5, n=1)
    found = plan([*both(3), *late], 2, Decision(TWO, at(3)))
    assert found.base == at(3) and found.dropped == tuple(late)


def test_a_newer_epoch_counts_even_with_a_smaller_step():
    old, new = both(3), both(2, TWO, n=1)
    found = plan([*old, *new], 2, Decision(TWO, at(1)))
    assert found.base == at(2, TWO) and found.dropped == ()


def test_steps_of_two_histories_are_never_combined():
    slots = [held(0, 5), held(1, 5, epoch=TWO), *both(3, n=1)]
    found = plan(slots, 2, Decision(TWO, at(3)))
    assert found.base == at(3)
    same_counter = Epoch(2, b"x" * 16)
    slots = [held(0, 5, epoch=same_counter), held(1, 5, epoch=TWO), *both(3, n=1)]
    assert plan(slots, 2, None).base == at(3)


def test_the_base_stays_until_something_newer_is_whole():
    """Epoch 2 has begun, nothing of it is whole yet: the base of epoch 1 is found again, again and again."""
    slots = [*both(3), held(0, 4, epoch=TWO, n=1), held(1, 4, WRITING, TWO, n=1)]
    assert plan(slots, 2, Decision(TWO, at(3))).base == at(3)
    assert plan(both(3), 2, Decision(THREE, at(3))).base == at(3)


def test_after_a_fresh_start_nothing_older_counts():
    assert plan(both(3), 2, Decision(TWO, None)).base is None


def test_without_a_decision_every_epoch_counts():
    assert plan([*both(3), *both(2, TWO, n=1)], 2, None).base == at(2, TWO)


def test_a_damaged_slot_is_an_erasure():
    slots = [*both(2), *both(3, n=1)]
    bad = {("a", "rank-1.slot-1", at(3))}
    found = plan(slots, 2, FRESH, bad)
    assert found.base == at(2) and found.partial == ((at(3), (1,)),)
    assert {slot.slot for slot in found.dropped} == {"rank-0.slot-1", "rank-1.slot-1"}
    other_version = {("a", "rank-1.slot-1", at(9))}
    assert plan(slots, 2, FRESH, other_version).base == at(3)
    all_bad = {(slot.node, slot.slot, slot.version) for slot in slots}
    assert plan(slots, 2, FRESH, all_bad) == Plan(
        None, {}, tuple(sorted(slots, key=lambda s: s.slot)), plan([], 2, None).partial
    )


def test_a_rank_that_moved_is_found_on_its_old_node():
    slots = [held(0, 3, node="a"), held(1, 3, node="b")]
    found = plan(slots, 2, FRESH)
    assert {rank: slot.node for rank, slot in found.sources.items()} == {0: "a", 1: "b"}


def test_ranks_beyond_the_world_are_no_sources():
    found = plan([*both(3), held(2, 3)], 2, FRESH)
    assert sorted(found.sources) == [0, 1]


def test_the_decision_with_the_greatest_counter_holds():
    assert newest_decision([None, FRESH, Decision(TWO, at(3)), None]) == Decision(TWO, at(3))
    assert newest_decision([]) is None and newest_decision([None]) is None


def test_a_new_epoch_is_above_everything_that_was_seen():
    assert next_epoch([], [], b"i" * 16) == Epoch(1, b"i" * 16)
    assert next_epoch([FRESH, None], [held(0, 3, epoch=THREE), held(0, None, EMPTY)], b"i" * 16).counter == 4
    assert next_epoch([Decision(THREE, None)], [held(0, 3)], b"i" * 16).counter == 4


EPOCHS = st.sampled_from([ONE, TWO, Epoch(2, b"x" * 16)])
HELD = st.builds(
    held, st.integers(0, 2), st.integers(0, 4), st.sampled_from([WRITING, LANDED, SEALED, SEALED, SEALED]), EPOCHS,
    st.sampled_from(["a", "b"]), st.integers(0, 3),
)  # fmt: skip
HELDS = st.lists(HELD, max_size=14, unique_by=lambda slot: (slot.node, slot.slot))
DECISIONS = st.one_of(
    st.none(), st.builds(Decision, EPOCHS, st.one_of(st.none(), st.builds(at, st.integers(0, 4), EPOCHS)))
)


@given(HELDS, DECISIONS, st.integers(0, 1 << 32))
def test_the_order_of_the_inputs_does_not_matter(slots, decision, seed):
    shuffled = random.Random(seed).sample(slots, len(slots))
    assert plan(slots, 2, decision) == plan(shuffled, 2, decision)


@given(HELDS, DECISIONS, st.integers(1, 3))
def test_against_a_dumb_twin(slots, decision, world):
    """Try every version; count it only if its history is the decision's; take the newest that all ranks have."""
    whole = []
    for version in {slot.version for slot in slots}:
        if decision and version.epoch != decision.epoch:
            base = decision.base
            if base is None or version.epoch != base.epoch or version.step > base.step:
                continue
        if all(
            any(s.rank == rank and s.version == version and s.state is SEALED for s in slots) for rank in range(world)
        ):
            whole.append((version.epoch.counter, version.step, version.epoch.ident))
    found = plan(slots, world, decision)
    base = None if found.base is None else (found.base.epoch.counter, found.base.step, found.base.epoch.ident)
    assert base == max(whole, default=None)
    for rank, slot in found.sources.items():
        assert slot.rank == rank and slot.version == found.base and slot.state is SEALED
    assert sorted(found.sources) == (list(range(world)) if base else [])
    kept = [slot for slot in slots if slot not in found.dropped]
    assert all(slot.state is SEALED for slot in kept)
    assert all(slot.version == found.base or slot.version.is_older_than(found.base) for slot in kept)
