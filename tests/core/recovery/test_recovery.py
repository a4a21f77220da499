"""Tests the recovery plan: the version, its slots and capsules, and the slots to empty first."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.coding.placement import Placement, Scheme, place
from reft.core.commit.decision import Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery import recovery
from reft.core.recovery.recovery import HeldCapsule, HeldParity, HeldSlot, RecoveryPlan, Shortfall, describe

ONE, TWO, THREE = (Epoch(n, bytes([n]) * 16) for n in (1, 2, 3))
TWIN = Epoch(2, b"x" * 16)
EPOCHS = (ONE, TWO, TWIN, THREE)
EMPTY, WRITING, LANDED, SEALED = SlotState


def at(step: int, epoch: Epoch = ONE) -> Version:
    return Version(epoch, step)


def held(
    rank: int, step: int | None, state: SlotState = SEALED, epoch: Epoch = ONE, node: str = "a", n: int = 0
) -> HeldSlot:
    version = None if step is None else at(step, epoch)
    return HeldSlot(node, rank, f"rank-{rank}.slot-{n}", state, version)


def both(step: int, epoch: Epoch = ONE, n: int = 0) -> list[HeldSlot]:
    return [held(rank, step, epoch=epoch, n=n) for rank in (0, 1)]


FRESH = Decision(ONE, None)


def placed(domains: Collection[int], f: int = 0, scheme: str = "none", leaves: int = 1, kb: int = 256) -> Placement:
    """Returns a placement of ranks that all hold the same leaves of so many KiB."""
    shape = (kb << 8,)
    layout = pack(Leaf(f"w{i}", "float32", shape, (1,), kb << 10, False, shape, (0,)) for i in range(leaves))
    division = divide({b"l": layout}, [b"l"] * len(domains))
    return place(division, list(domains), scheme, f, 64)


def plan(
    slots: Collection[HeldSlot],
    world: int,
    decision: Decision | None,
    erased: Collection[tuple[str, str, Version]] = (),
    copies: Collection[HeldCapsule] = (),
) -> RecoveryPlan:
    """Plans where nothing is shared: each rank needs its own slot, or its capsule."""
    alone = placed([0] * world, leaves=0)
    return recovery.plan(slots, copies, dict.fromkeys(EPOCHS, alone), decision, erased)


def lacking(
    step: int, *ranks: int, lanes: Collection[int] = (), bare: Collection[int] | None = None, kept=()
) -> Shortfall:
    return Shortfall(at(step), ranks, tuple(lanes), ranks if bare is None else tuple(bare), tuple(kept))


def test_nothing_held_is_a_fresh_start():
    assert plan([], 2, None) == RecoveryPlan(None)
    assert plan([held(0, None, EMPTY)], 2, FRESH) == RecoveryPlan(None)


def test_the_newest_version_that_every_rank_sealed():
    recovery_plan = plan([*both(3), *both(4, n=1)], 2, FRESH)
    assert recovery_plan.base == at(4)
    assert {rank: slot.slot for rank, slot in recovery_plan.sources.items()} == {0: "rank-0.slot-1", 1: "rank-1.slot-1"}
    assert recovery_plan.dropped == () and recovery_plan.partial == ()


def test_an_incomplete_version_is_reported_with_its_ranks_and_dropped():
    slots = [*both(3), held(0, 4, n=1), held(1, 4, LANDED, n=1), held(0, 5, n=2)]
    recovery_plan = plan(slots, 2, FRESH)
    assert recovery_plan.base == at(3)
    assert recovery_plan.partial == (lacking(5, 1), lacking(4, 1))
    assert {slot.slot for slot in recovery_plan.dropped} == {"rank-0.slot-1", "rank-1.slot-1", "rank-0.slot-2"}


def test_a_later_step_does_not_replace_a_missing_one():
    """Rank 1 continued to step 5 without step 4."""
    recovery_plan = plan([*both(3), held(0, 4, n=1), held(1, 5, n=1)], 2, FRESH)
    assert recovery_plan.base == at(3)


def test_open_slots_are_dropped_whatever_their_age():
    slots = [*both(3), held(0, 1, WRITING, n=1), held(1, 2, LANDED, n=1)]
    assert plan(slots, 2, FRESH).dropped == (slots[2], slots[3])


def test_older_sealed_versions_are_kept():
    assert plan([*both(2), *both(3, n=1)], 2, FRESH).dropped == ()


def test_if_nothing_is_whole_everything_is_dropped():
    slots = [held(0, 3), held(1, 4)]
    recovery_plan = plan(slots, 2, FRESH)
    assert recovery_plan.base is None and recovery_plan.sources == {} and recovery_plan.dropped == tuple(slots)
    assert recovery_plan.partial == (lacking(4, 0), lacking(3, 1))


def test_versions_that_an_older_history_wrote_after_the_base_do_not_count():
    """An orphan, or a node that comes back, still holds steps not chosen. They are of epoch 1."""
    late = both(5, n=1)
    recovery_plan = plan([*both(3), *late], 2, Decision(TWO, at(3)))
    assert recovery_plan.base == at(3) and recovery_plan.dropped == tuple(late)


def test_versions_before_an_older_base_do_not_count():
    """Epoch 2 gave up step 7 of epoch 1 and began at 5. Epoch 3 begins at step 8 of epoch 2."""
    dead, base = both(7), both(8, TWO, n=1)
    decision = Decision(THREE, at(8, TWO))
    assert plan([*dead, *base], 2, decision).base == at(8, TWO)
    recovery_plan = plan([*dead, base[0]], 2, decision)
    assert recovery_plan.base is None and set(recovery_plan.dropped) == {*dead, base[0]}


def test_a_newer_epoch_counts_even_with_a_smaller_step():
    old, new = both(3), both(2, TWO, n=1)
    recovery_plan = plan([*old, *new], 2, Decision(TWO, at(1)))
    assert recovery_plan.base == at(2, TWO) and recovery_plan.dropped == ()


def test_steps_of_two_histories_are_never_combined():
    slots = [held(0, 5), held(1, 5, epoch=TWO), *both(3, n=1)]
    recovery_plan = plan(slots, 2, Decision(TWO, at(3)))
    assert recovery_plan.base == at(3)
    slots = [held(0, 5, epoch=TWIN), held(1, 5, epoch=TWO), *both(3, n=1)]
    assert plan(slots, 2, None).base == at(3)


def test_the_base_stays_until_something_newer_is_whole():
    """Epoch 2 has begun, but has no whole version: each plan finds the base of epoch 1 again."""
    slots = [*both(3), held(0, 4, epoch=TWO, n=1), held(1, 4, WRITING, TWO, n=1)]
    assert plan(slots, 2, Decision(TWO, at(3))).base == at(3)
    assert plan(both(3), 2, Decision(THREE, at(3))).base == at(3)


def test_after_a_fresh_start_nothing_older_counts():
    assert plan(both(3), 2, Decision(TWO, None)).base is None


def test_without_a_decision_every_epoch_counts():
    assert plan([*both(3), *both(2, TWO, n=1)], 2, None).base == at(2, TWO)


def test_earlier_steps_of_the_base_epoch_are_returned():
    """A slot is preferred to a capsule. Damaged ones, other epochs and the base are left out."""
    slots = [*both(3, n=1), held(0, 2, n=2), held(1, 2, WRITING, n=2), *both(1, epoch=TWO, n=3)]
    copies = [HeldCapsule("b", rank, at(step), 0) for rank in (0, 1) for step in (1, 2, 3)]
    recovery_plan = plan(slots, 2, FRESH, {("b", "capsule-1", at(1))}, copies)
    assert recovery_plan.base == at(3)
    assert recovery_plan.earlier == {0: ((at(1), "b"), (at(2), "a")), 1: ((at(2), "b"),)}


def test_a_damaged_slot_is_an_erasure():
    slots = [*both(2), *both(3, n=1)]
    bad = {("a", "rank-1.slot-1", at(3))}
    recovery_plan = plan(slots, 2, FRESH, bad)
    assert recovery_plan.base == at(2) and recovery_plan.partial == (lacking(3, 1),)
    assert {slot.slot for slot in recovery_plan.dropped} == {"rank-0.slot-1", "rank-1.slot-1"}
    other_version = {("a", "rank-1.slot-1", at(9))}
    assert plan(slots, 2, FRESH, other_version).base == at(3)
    all_bad = {(slot.node, slot.slot, slot.version) for slot in slots}
    assert plan(slots, 2, FRESH, all_bad) == RecoveryPlan(None, dropped=tuple(sorted(slots, key=lambda s: s.slot)))


def test_a_rank_that_moved_is_found_on_its_old_node():
    slots = [held(0, 3, node="a"), held(1, 3, node="b")]
    recovery_plan = plan(slots, 2, FRESH)
    assert {rank: slot.node for rank, slot in recovery_plan.sources.items()} == {0: "a", 1: "b"}


def test_ranks_beyond_the_world_are_no_sources():
    recovery_plan = plan([*both(3), held(2, 3)], 2, FRESH)
    assert sorted(recovery_plan.sources) == [0, 1]


EPOCH = st.sampled_from([ONE, TWO, TWIN])
HELD = st.builds(
    held, st.integers(0, 2), st.integers(0, 4), st.sampled_from([WRITING, LANDED, SEALED, SEALED, SEALED]), EPOCH,
    st.sampled_from(["a", "b"]), st.integers(0, 3),
)  # fmt: skip
HELDS = st.lists(HELD, max_size=14, unique_by=lambda slot: (slot.node, slot.slot))
DECISIONS = st.one_of(
    st.none(), st.builds(Decision, EPOCH, st.one_of(st.none(), st.builds(at, st.integers(0, 4), EPOCH)))
)


COPIES = st.lists(
    st.builds(
        HeldCapsule, st.sampled_from(["a", "b", "c"]), st.integers(0, 2), st.builds(at, st.integers(0, 4), EPOCH),
        st.sampled_from([0, 0, 0, 9]),
    ),
    max_size=8, unique_by=lambda copy: (copy.node, copy.rank, copy.version),
)  # fmt: skip
# Three placements: nothing shared; copies on every rank; a code that survives one loss of three.
# They belong to three epochs, of which one may be unknown.
PLACEMENTS = st.sampled_from(
    [placed([0] * 3, leaves=0), placed([0, 1, 2], f=2, scheme="arc"), placed([0, 1, 2], f=1, scheme="aec")]
).flatmap(lambda each: st.sampled_from([dict.fromkeys([ONE, TWO, TWIN], each), {ONE: each, TWO: each}]))


@given(HELDS, COPIES, PLACEMENTS, DECISIONS, st.integers(0, 1 << 32))
def test_the_order_of_the_inputs_does_not_matter(slots, copies, placements, decision, seed):
    erased = [(slot.node, slot.slot, slot.version) for slot in slots[:2]]
    straight = recovery.plan(slots, copies, placements, decision, erased)
    shuffle = random.Random(seed)
    mixed = [shuffle.sample(each, len(each)) for each in (slots, copies, list(placements.items()), erased)]
    assert recovery.plan(mixed[0], mixed[1], dict(mixed[2]), decision, mixed[3]) == straight


@given(HELDS, COPIES, PLACEMENTS, DECISIONS, st.integers(0, 22))
def test_one_more_slot_or_capsule_never_gives_an_older_base(slots, copies, placements, decision, without):
    def order(found):
        return () if found.base is None else (*found.base.order, found.base.epoch.ident)

    full = recovery.plan(slots, copies, placements, decision)
    fewer = slots[:without] + slots[without + 1 :], copies[: max(without - 14, 0)]
    assert order(recovery.plan(*fewer, placements, decision)) <= order(full)


@given(HELDS, COPIES, PLACEMENTS, DECISIONS)
def test_the_plan_equals_a_brute_force_search(slots, copies, placements, decision):
    """Tries every version of the decision's history, stripe by stripe and rank by rank."""
    whole = []
    for version in {each.version for each in [*slots, *copies]}:
        if decision and version.epoch != decision.epoch:
            base = decision.base
            if base is None or version.epoch != base.epoch or version.step > base.step:
                continue
        have = {slot.rank for slot in slots if slot.version == version and slot.state is SEALED}
        small = {copy.rank for copy in copies if copy.version == version and not copy.unreplicated_bytes}
        if version.epoch in placements and {0, 1, 2} <= have | small and decodable(placements[version.epoch], have):
            whole.append((version.epoch.counter, version.step, version.epoch.ident))
    recovery_plan = recovery.plan(slots, copies, placements, decision)
    base = (
        None
        if recovery_plan.base is None
        else (recovery_plan.base.epoch.counter, recovery_plan.base.step, recovery_plan.base.epoch.ident)
    )
    assert base == max(whole, default=None)
    for rank, slot in recovery_plan.sources.items():
        assert slot.rank == rank and slot.version == recovery_plan.base and slot.state is SEALED
    for rank, copy in recovery_plan.capsules.items():
        assert copy.rank == rank and copy.version == recovery_plan.base and not copy.unreplicated_bytes
    assert sorted([*recovery_plan.sources, *recovery_plan.capsules]) == ([0, 1, 2] if base else [])
    kept = [slot for slot in slots if slot not in recovery_plan.dropped]
    assert all(slot.state is SEALED for slot in kept)
    assert all(slot.version == recovery_plan.base or slot.version.is_older_than(recovery_plan.base) for slot in kept)


def decodable(placement: Placement, have: Collection[int]) -> bool:
    return all(
        sum(lane.members[lane.member_of(stripe, c)] in have for c in range(lane.code.k + lane.code.f)) >= lane.code.k
        for lane in placement.lanes
        for stripe in range(lane.D)
    )


# Losses of nodes


def ring(placement: Placement, f: int, step: int = 1, lost: Collection[int] = (), kept: int = 0):
    """Returns slots of one rank a node and capsules on the next f nodes.

    Lost nodes have neither.
    """
    world = len(placement.domains)
    slots = [held(rank, step, node=f"n{rank}") for rank in range(world) if rank not in lost]
    holders = [(rank, (rank + i) % world) for rank in range(world) for i in range(1, f + 1)]
    return slots, [HeldCapsule(f"n{node}", rank, at(step), kept) for rank, node in holders if node not in lost]


CODED = [(scheme, D, f) for scheme in ("aec", "arc") for D in range(2, 9) for f in range(1, min(D, 4))]


@pytest.mark.parametrize(("scheme", "D", "f"), CODED)
def test_any_f_lost_nodes_are_survived_and_f_plus_one_are_refused_by_name(scheme, D, f):
    placement = placed(range(D), f, scheme, leaves=3)
    assert {lane.code.f for lane in placement.lanes} == {f}
    for count in range(f + 2):
        for lost in itertools.combinations(range(D), count):
            recovery_plan = recovery.plan(*ring(placement, f, lost=lost), {ONE: placement}, FRESH)
            if count <= f:
                assert recovery_plan.base == at(1) and recovery_plan.partial == ()
                assert sorted(recovery_plan.capsules) == list(lost) and len(recovery_plan.sources) == D - count
            elif count == D:
                assert recovery_plan == RecoveryPlan(None)
            else:
                # A copy lies on f + 1 neighbouring members. So f + 1 losses apart from each other
                # may be survived.
                apart = scheme == "arc" and decodable(placement, set(range(D)) - set(lost))
                bare = [rank for rank in lost if all((rank + i) % D in lost for i in range(1, f + 1))]
                if apart and not bare:
                    assert recovery_plan.base == at(1)
                    continue
                assert recovery_plan.base is None
                assert recovery_plan.partial == (lacking(1, *lost, lanes=() if apart else (0,), bare=bare),)
                text = " ".join(describe(recovery_plan.partial[0], placement, {rank: f"n{rank}" for rank in range(D)}))
                assert apart or "w0 and 2 more leaves can't be decoded" in text
                assert all(f"n{rank}" in text for rank in lost)


def test_a_torn_stale_or_damaged_slot_counts_as_lost():
    placement = placed(range(4), 1, "aec")
    slots, copies = ring(placement, 1)
    for bad in (held(2, 1, WRITING, node="n2"), held(2, 0, node="n2"), held(2, 1, LANDED, node="n2")):
        recovery_plan = recovery.plan([*slots[:2], bad, slots[3]], copies, {ONE: placement}, FRESH)
        assert recovery_plan.base == at(1) and recovery_plan.capsules == {2: HeldCapsule("n3", 2, at(1), 0)}
    erased = {("n2", slots[2].slot, at(1))}
    recovery_plan = recovery.plan(slots, copies, {ONE: placement}, FRESH, erased)
    assert (
        recovery_plan.base == at(1)
        and sorted(recovery_plan.sources) == [0, 1, 3]
        and recovery_plan.dropped == (slots[2],)
    )
    erased.add(("n3", copies[2].slot, at(1)))
    assert recovery.plan(slots, copies, {ONE: placement}, FRESH, erased).partial == (lacking(1, 2),)


def test_unreplicated_leaves_are_lost_with_their_slot():
    placement = placed(range(4), 1, "aec")
    recovery_plan = recovery.plan(*ring(placement, 1, lost=[2], kept=9), {ONE: placement}, FRESH)
    assert recovery_plan.base is None and recovery_plan.partial == (lacking(1, 2, kept=[2]),)
    assert recovery.plan(*ring(placement, 1, kept=9), {ONE: placement}, FRESH).base == at(1)
    lines = describe(recovery_plan.partial[0], placement, {2: "n2"})
    assert lines == [
        "step 1 (epoch 1): no sealed slot of rank 2 (on n2).",
        "The slots of rank 2 held leaves that no other rank has.",
    ]


def test_a_version_is_read_by_the_placement_of_its_epoch():
    """Epoch 1 copied to all ranks, epoch 2 codes: the remaining slots suffice only for copies."""
    copied, coded = placed(range(4), 3, "arc"), placed(range(4), 1, "aec")
    slots, copies = ring(copied, 3, lost=[1, 2])
    decision = Decision(TWO, at(1))
    assert recovery.plan(slots, copies, {ONE: copied, TWO: coded}, decision).base == at(1)
    assert recovery.plan(slots, copies, {ONE: coded, TWO: coded}, decision).base is None
    recovery_plan = recovery.plan(slots, copies, {TWO: coded}, decision)
    assert recovery_plan.base is None and recovery_plan.partial == (Shortfall(at(1), is_placed=False),)
    assert describe(recovery_plan.partial[0], None, {}) == [
        "step 1 (epoch 1): no daemon that answers knows how its bytes were placed."
    ]


def test_capsules_of_a_dead_history_do_not_count():
    placement = placed(range(2), 1, "arc")
    slots, copies = ring(placement, 1, step=6, lost=[0])
    slots += [held(rank, 5, node=f"n{rank}", n=1) for rank in (0, 1)]
    both_known = {ONE: placement, TWO: placement}
    assert recovery.plan(slots, copies, both_known, None).base == at(6)
    recovery_plan = recovery.plan(slots, copies, both_known, Decision(TWO, at(5)))
    assert recovery_plan.base == at(5) and recovery_plan.partial == () and recovery_plan.dropped == (slots[0],)


def test_nodes_may_have_other_names_and_a_rank_two_slots():
    placement = placed(range(3), 1, "aec")
    slots = [held(0, 1, node="x"), held(1, 1, node="z"), held(1, 1, node="y", n=1), held(1, 1, node="y", n=0)]
    copies = [
        HeldCapsule("z", 2, at(1), 0),
        HeldCapsule("x", 2, at(1), 0),
        HeldCapsule("a", 2, at(1), 9),
    ]  # the last capsule can't replace a slot
    for given_slots, given_copies in itertools.product(itertools.permutations(slots), itertools.permutations(copies)):
        recovery_plan = recovery.plan(given_slots, given_copies, {ONE: placement}, FRESH)
        assert recovery_plan.sources == {0: slots[0], 1: slots[3]} and recovery_plan.capsules == {2: copies[1]}


def test_the_newest_decodable_version_beats_an_older_complete_one():
    placement = placed(range(3), 1, "aec")
    old, _ = ring(placement, 1, step=1)
    new, copies = ring(placement, 1, step=2, lost=[1])
    recovery_plan = recovery.plan(
        [*old, *(held(slot.rank, 2, node=slot.node, n=1) for slot in new)], copies, {ONE: placement}, FRESH
    )
    assert recovery_plan.base == at(2) and sorted(recovery_plan.capsules) == [1] and recovery_plan.dropped == ()


def test_a_loss_is_described_in_few_words():
    placement = placed([rank // 2 for rank in range(64)], 1, "aec", leaves=2)
    shortfall = Shortfall(at(7), tuple(range(0, 64, 2)), (0,), (0, 2, 4, 5), (4, 5))
    nodes = {rank: f"n{rank // 2}" for rank in range(64)}
    assert describe(shortfall, placement, nodes) == [
        "step 7 (epoch 1): no sealed slot of ranks 0, 2, 4, 6, 8, 10, 12, 14 and 24 more "
        "(on n0, n1, n2, n3, n4, n5, n6, n7 and 24 more).",
        "the cell of w0 and 1 more leaf can't be decoded: 32 of 32 slots are gone, "
        "with more than 1 of the 32 shards of a stripe.",
        "No capsule of ranks 0, 2 is left.",
        "The slots of ranks 4-5 held leaves that no other rank has.",
    ]


# Unreplicated leaves and their parity

OWN = 1 << 17  # bytes of the leaf that only one rank has


def guarded(world: int, f: int = 1, scheme: Scheme = "auto") -> Placement:
    """Returns a placement in which each rank has a leaf of its own, and all share another one."""
    shared = Leaf("shared", "uint8", (4096,), (1,), 4096, False, (4096,), (0,))
    own = [Leaf(f"own{rank}", "uint8", (OWN,), (1,), OWN, False, (OWN,), (0,)) for rank in range(world)]
    layouts = {bytes([rank]): pack([shared, own[rank]]) for rank in range(world)}
    return place(divide(layouts, list(layouts)), list(range(world)), scheme, f, 4096, slots=4)


def parity(placement: Placement, step: int, epoch: Epoch = ONE, lost: Collection[int] = ()) -> list[HeldParity]:
    """Returns the parity slots of a step, one on each node that is not lost."""
    (lane,) = placement.guard_lanes
    names = {rank: f"parity-{rank}.slot-{step % 2}" for rank in lane.members if rank not in lost}
    return [HeldParity(f"n{r}", r, name, SEALED, at(step, epoch), lane.digest) for r, name in names.items()]


def exchanged(
    placement: Placement, protected: int = 1, whole: int = 2, lost: Collection[int] = ()
) -> tuple[list[HeldSlot], list[HeldCapsule], list[HeldParity]]:
    """Returns what is held of a job: all of two steps, and parity of the older one."""
    old, new = (ring(placement, 1, step, lost, OWN) for step in (protected, whole))
    slots = [*old[0], *(replace(slot, slot=f"{slot.slot}-new") for slot in new[0])]
    return slots, [*old[1], *new[1]], parity(placement, protected, lost=lost)


@pytest.mark.parametrize("D", range(2, 7))
def test_a_lost_node_costs_the_steps_after_the_protected_one_and_two_are_refused_by_name(D):
    placement = guarded(D)
    for lost in range(D):
        slots, copies, parities = exchanged(placement, lost=[lost])
        found = recovery.plan(slots, copies, {ONE: placement}, FRESH, parity=parities)
        assert found.base == at(1) and found.sections == (lost,) and sorted(found.capsules) == [lost]
        assert found.parity == {each.rank: each for each in parities}
        assert found.partial == (lacking(2, lost, kept=[lost]),) and found.guard is None
        assert describe(found.partial[0], placement, {}) == [
            f"step 2 (epoch 1): no sealed slot of rank {lost}.",
            f"The slots of rank {lost} held leaves that no other rank has, and their guard lane has no complete parity "
            "of this step.",
        ]
    for lost in itertools.combinations(range(D), 2):
        slots, copies, parities = exchanged(placement, lost=lost)
        found = recovery.plan(slots, copies, {ONE: placement}, FRESH, parity=parities)
        assert found.base is None
        if D > 2 and (last := found.partial[-1]).unreplicated:
            assert "guard lane gives back 1 lost rank at most, and lost 2" in " ".join(describe(last, placement, {}))


@pytest.mark.parametrize(("D", "f"), [(D, f) for D in range(3, 8) for f in (2, 3) if f < D])
def test_any_f_lost_nodes_of_an_exchange_are_survived_and_f_plus_one_are_refused_by_name(D, f):
    placement = guarded(D, f)
    for count in range(1, min(f + 1, D - 1) + 1):
        for lost in itertools.combinations(range(D), count):
            slots, copies = ring(placement, f, lost=lost, kept=OWN)
            parities = parity(placement, 1, lost=lost)
            found = recovery.plan(slots, copies, {ONE: placement}, FRESH, parity=parities)
            if count <= f:
                assert found.base == at(1) and found.sections == lost
                assert found.guard == (at(1) if count < f else None), "any one node more"
                assert found.parity == {each.rank: each for each in parities}
                assert found.numbers(D) == {*found.sources, *(D + each.rank for each in parities)}
            elif found.partial[-1].unreplicated:
                text = f"their guard lane gives back {f} lost ranks at most, and lost {count}."
                assert found.base is None and text in " ".join(describe(found.partial[-1], placement, {}))


def test_lost_slots_need_as_many_parity_slots_as_there_are_pieces():
    """f = 2 of five: a lost rank needs parity slots of three other members."""
    placement = guarded(5, 2)

    def is_restorable(lost: Collection[int], without: Collection[int]) -> bool:
        slots, copies = ring(placement, 2, kept=OWN)
        left = [slot for slot in slots if slot.rank not in lost]
        parities = parity(placement, 1, lost=without)
        return recovery.plan(left, copies, {ONE: placement}, FRESH, parity=parities).base is not None

    assert is_restorable([0], []) and is_restorable([0], [0]) and is_restorable([0], [3])
    assert is_restorable([0], [0, 3]) and not is_restorable([0], [1, 3])
    assert is_restorable([0, 1], []) and is_restorable([0, 1], [0, 1]) and is_restorable([0, 1], [2])
    assert not is_restorable([0, 1], [0, 2]), "rank 1 has only the parity of 3 and 4"
    assert not is_restorable([0, 1, 2], [])


def test_only_complete_sealed_parity_of_the_same_lane_and_version_counts():
    """Else the older protected step is restored."""
    placement = guarded(3)
    slots, copies, parities = exchanged(placement, lost=[1])
    fresh = parity(placement, 2, lost=[1])
    placements = {ONE: placement, TWO: placement}

    def base(*newer: HeldParity, erased: Collection[tuple[str, str, Version]] = ()) -> Version | None:
        return recovery.plan(slots, copies, placements, FRESH, erased, [*parities, *newer]).base

    assert base(*fresh) == at(2)
    first = fresh[0]
    bad = [
        [], [replace(first, state=WRITING)], [replace(first, state=LANDED)], [replace(first, layout=b"other")],
        [replace(first, version=at(2, TWO))], [replace(first, version=at(3))], [replace(first, rank=1)],
    ]  # fmt: skip
    for each in bad:
        assert base(fresh[1], *each) == at(1), each
    assert base(*fresh, erased={(first.node, first.slot, at(2))}) == at(1)
    assert base(*fresh, erased={(first.node, first.slot, at(1))}) == at(2), "another version lies in that slot now"


def test_lost_leaves_need_a_capsule_and_must_have_been_foreseen():
    placement = guarded(3)
    slots, copies, parities = exchanged(placement, lost=[1])
    others = [copy for copy in copies if copy.rank != 1]
    assert recovery.plan(slots, others, {ONE: placement}, FRESH, parity=parities).base is None
    more = [replace(copy, unreplicated_bytes=OWN + 1) for copy in copies]
    assert recovery.plan(slots, more, {ONE: placement}, FRESH, parity=parities).base is None
    none = [replace(copy, unreplicated_bytes=0) for copy in copies]
    found = recovery.plan(slots, none, {ONE: placement}, FRESH)
    assert found.base == at(2) and found.sections == () and found.parity == {}, "all such leaves were absent"


def test_parity_of_a_dropped_history_does_not_count():
    """Step 6 of epoch 1 was given up for step 5. A node comes back with all of step 6."""
    placement = guarded(2)
    slots, copies, parities = exchanged(placement, 5, 6, lost=[0])
    parities += parity(placement, 6, lost=[0])
    placements = {ONE: placement, TWO: placement}
    assert recovery.plan(slots, copies, placements, None, parity=parities).base == at(6)
    found = recovery.plan(slots, copies, placements, Decision(TWO, at(5)), parity=parities)
    assert found.base == at(5) and found.parity == {1: parities[0]}
    assert {slot.slot for slot in found.dropped} == {"rank-1.slot-0-new", "parity-1.slot-0"}
    assert recovery.plan(slots, copies, placements, Decision(TWO, at(4)), parity=parities).base is None


# The guard


def guard(placement: Placement, slots, copies, parities, decision: Decision = FRESH, **changes) -> Version | None:
    return recovery.plan(slots, copies, dict.fromkeys(EPOCHS, placement), decision, parity=parities, **changes).guard


def test_the_guard_is_the_newest_version_that_survives_any_node():
    placement = guarded(3)
    slots, copies, parities = exchanged(placement)
    assert guard(placement, slots, copies, parities) == at(1)
    assert guard(placement, slots, copies, [*parities, *parity(placement, 2)]) == at(2)
    assert guard(placement, slots, copies, parities[1:]) is None, "parity of one node is gone"
    assert guard(placement, slots[1:], copies, parities) is None, "a slot of step 1 is gone"
    assert guard(placement, slots, copies[1:], parities) is None, "a capsule of step 1 is gone"
    assert guard(placement, slots, copies, parities, erased={("n1", "parity-1.slot-1", at(1))}) is None
    own = [replace(copy, node=f"n{copy.rank}") for copy in copies]
    assert guard(placement, slots, own, parities) is None, "capsules on the node of their slot"
    together = [replace(slot, node="n0") if slot.rank == 1 else slot for slot in slots]
    assert guard(placement, together, copies, parities) is None, "two members on one node"
    moved = [replace(each, node="n0") if each.rank == 1 else each for each in parities]
    assert guard(placement, slots, copies, moved) is None, "parity on the node of another member"


@pytest.mark.parametrize(("D", "f"), [(3, 1), (3, 2), (4, 2), (5, 2), (5, 3)])
@pytest.mark.parametrize("is_exchanged", [True, False])
def test_the_guard_is_what_recovery_finds_without_any_one_node_more(D, f, is_exchanged):
    """All sets of lost nodes; beside them a slot, parity or a capsule is gone."""
    placement = guarded(D, f) if is_exchanged else placed(range(D), f, "aec")

    def found(lost: Collection[int], gone: tuple[str, int]) -> recovery.RecoveryPlan:
        slots, copies = ring(placement, f, lost=lost, kept=OWN if is_exchanged else 0)
        parities = parity(placement, 1, lost=lost) if is_exchanged else []
        left = [
            [each for each in kind if gone != (name, each.rank)]
            for name, kind in (("slot", slots), ("parity", parities))
        ]
        copies = [each for each in copies if gone != ("capsule", each.rank) or each.node != f"n{(each.rank + 1) % D}"]
        return recovery.plan(left[0], copies, {ONE: placement}, FRESH, parity=left[1])

    things = ("", 0), *itertools.product(("slot", "parity", "capsule"), range(D))
    for count, gone in itertools.product(range(f + 1), things):
        for lost in itertools.combinations(range(D), count):
            survives = all(found({*lost, node}, gone).base == at(1) for node in range(D) if node not in lost)
            assert found(lost, gone).guard == (at(1) if survives else None), (lost, gone)


def test_a_guard_older_than_the_base_survives_a_lost_node_if_it_may_lose_another():
    """A process died after step 2; then a node is lost, before anything is protected again."""
    placement = guarded(4, 2)
    slots, copies, parities = exchanged(placement, lost=[3])
    copies += ring(placement, 2, 1, [3], OWN)[1]
    newer = parity(placement, 2, lost=[3])
    found = recovery.plan(slots, copies, {ONE: placement}, FRESH, parity=[*parities, *newer[:2]])
    assert (found.base, found.guard) == (at(2), at(1))
    assert guard(guarded(4), *exchanged(guarded(4), lost=[3])) is None, "f = 1: no further node"


def test_the_guard_is_never_newer_than_the_base_and_is_carried_over_attaches():
    """Epoch 2 began from step 2, which is unprotected; epoch 3 from step 8 of epoch 2."""
    placement = guarded(3)
    slots, copies, parities = exchanged(placement)
    assert guard(placement, slots, copies, parities, Decision(TWO, at(2), (), at(1))) == at(1)
    late_slots, late_copies = ring(placement, 1, 8, kept=OWN)
    late = [replace(slot, slot=f"{slot.slot}-late", version=at(8, TWO)) for slot in late_slots]
    late_copies = [replace(copy, version=at(8, TWO)) for copy in late_copies]
    for decision in (Decision(TWO, at(2), (), at(1)), Decision(THREE, at(8, TWO), (), at(1))):
        assert guard(placement, [*slots, *late], [*copies, *late_copies], parities, decision) == at(1)
        lost = [slot for slot in (*slots, *late) if slot.node != "n2"]
        left = [copy for copy in (*copies, *late_copies) if copy.node != "n2"]
        parity_left = [each for each in parities if each.node != "n2"]
        placements = dict.fromkeys(EPOCHS, placement)
        assert recovery.plan(lost, left, placements, decision, parity=parity_left).base == at(1)
    assert guard(placement, [*slots, *late], [*copies, *late_copies], parities, Decision(THREE, at(8, TWO))) is None
    newer = [*parities, *parity(placement, 2)]
    assert guard(placement, slots, copies, newer, Decision(TWO, at(1), (), at(1))) == at(1), "step 2 was given up"


def test_replicated_state_is_its_own_guard():
    placement = placed(range(3), 1, "aec")
    slots, copies = ring(placement, 1)
    assert recovery.plan(slots, copies, {ONE: placement}, FRESH).guard == at(1)
    assert recovery.plan(slots, copies[1:], {ONE: placement}, FRESH).guard is None
    once = placed(range(3), 0)
    assert recovery.plan(slots, copies, {ONE: once}, FRESH).guard is None


@given(
    st.sets(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=4),
    st.sets(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=2),
    st.sets(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=2),
    st.integers(0, 8),
)
def test_the_plan_with_parity_equals_a_brute_force_search(has_slot, has_capsule, has_parity, without):
    """And one more parity slot never gives an older base."""
    placement = GUARDED
    slots = [held(rank, step, node=f"n{rank}", n=step) for rank, step in sorted(has_slot)]
    copies = [HeldCapsule(f"n{(rank + 1) % 3}", rank, at(step), OWN) for rank, step in sorted(has_capsule)]
    parities = [each for step in (1, 2, 3) for each in parity(placement, step) if (each.rank, step) in has_parity]
    found = recovery.plan(slots, copies, {ONE: placement}, FRESH, parity=parities)
    whole = []
    for step in (1, 2, 3):
        lost = [rank for rank in range(3) if (rank, step) not in has_slot]
        others = [rank for rank in range(3) if rank not in lost]
        if not lost or (
            len(lost) == 1 and (lost[0], step) in has_capsule and all((rank, step) in has_parity for rank in others)
        ):
            whole.append(step)
    assert (found.base and found.base.step) == max(whole, default=None)
    fewer = recovery.plan(slots, copies, {ONE: placement}, FRESH, parity=parities[:without] + parities[without + 1 :])
    assert (fewer.base.step if fewer.base else 0) <= (found.base.step if found.base else 0)


GUARDED = guarded(3)


@pytest.mark.parametrize(("D", "f"), [(D, f) for D in range(2, 7) for f in (1, 2) if f < D])
def test_a_section_comes_back_if_one_of_its_copies_does_and_else_is_refused_by_name(D, f):
    """Of all sets of lost nodes, also of more than f."""
    placement = guarded(D, f, "aor")
    for lost in (lost for count in range(1, D) for lost in itertools.combinations(range(D), count)):
        slots, _ = ring(placement, f, lost=lost, kept=OWN)
        _, copies = ring(placement, D - 1, lost=lost, kept=OWN)
        parities = parity(placement, 1, lost=lost)
        found = recovery.plan(slots, copies, {ONE: placement}, FRESH, parity=parities)
        copying = {rank: {(rank - 1 - n) % D for n in range(f)} for rank in lost}
        gone = [rank for rank in lost if copying[rank] <= set(lost)]
        if not gone and not placement.lanes:
            assert found.base == at(1)
        if found.base is not None:
            assert not gone and found.sections == lost
            assert set(found.parity) == set().union(*copying.values()).difference(lost)
            assert found.numbers(D) == {*found.sources, *(D + rank for rank in found.parity)}
        else:
            assert len(lost) > f
        if gone and found.partial[-1].unreplicated:
            assert found.partial[-1].unreplicated == tuple(gone)
            text = " ".join(describe(found.partial[-1], placement, {}))
            assert "no node at hand keeps a complete copy of them" in text
