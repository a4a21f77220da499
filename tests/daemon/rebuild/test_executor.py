"""Makes lost slots with the daemon's driver, in memory, and compares them with the lost ones."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.coding.placement import Placement, Scheme, place
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery.plan import TransferPlan, TransferSizes
from reft.core.recovery.rebuild_plan import SIZES, chunk_sources, costs, rebuild_plan
from reft.core.recovery.stripes import NO_CELL, parity_number
from reft.errors import ConfigError
from reft_daemon.rebuild.executor import ReadBytes, made_slices
from tests.support.coded_slots import one_leaf, slots_of
from tests.support.guarded import GuardedJob
from tests.support.two_level import expected_parity

SMALL = TransferSizes(piece=4096, band=16 << 10, ahead=16 << 10)
TINY = TransferSizes(piece=512, band=8 << 10, ahead=8 << 10)  # packets of several slices
Slots = dict[int, np.ndarray]


class MadeSlot:
    """The data of a slot that is made, in memory."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)

    def write(self, begin: int, data: np.ndarray) -> None:
        self.data[begin : begin + data.nbytes] = data


def reads_of(slots: Slots, lost: Collection[int]) -> ReadBytes:
    """Returns a function that reads slots, but never lost ones."""

    async def read(rank: int, offset: int, into: np.ndarray) -> None:
        assert rank not in lost and offset + into.nbytes <= slots[rank].nbytes
        await asyncio.sleep(0)
        into[:] = slots[rank][offset : offset + into.nbytes]

    return read


async def remade(
    placement: Placement, slots: Slots, lost: Collection[int], read: ReadBytes, sizes: TransferSizes = SMALL,
    gone: Collection[int] = (),
) -> Slots:  # fmt: skip
    """Returns the slots of `lost`, made without the slots of `gone`."""
    plan = rebuild_plan(placement, set(slots) - {*lost, *gone}, lost, sizes)
    made: dict[int, Any] = {rank: SimpleNamespace(map=MadeSlot(slots[rank].nbytes)) for rank in lost}
    async for _ in made_slices(plan, read, made):
        pass
    return {rank: slot.map.data for rank, slot in made.items()}


def check(placement: Placement, slots: Slots, lost: Collection[int], sizes: TransferSizes = SMALL) -> None:
    made = asyncio.run(remade(placement, slots, lost, reads_of(slots, lost), sizes))
    assert all(np.array_equal(made[rank], slots[rank]) for rank in lost), f"lost {lost}"


@pytest.mark.parametrize("scheme", ["aec", "arc"])
@pytest.mark.parametrize(("D", "f"), [(D, f) for D in range(2, 9) for f in range(1, min(4, D))])
def test_every_loss_of_f_ranks_is_made_again(D, f, scheme):
    placement = one_leaf(D, f, 30_003, scheme)
    slots = slots_of(placement)
    for count in range(1, f + 1):
        for lost in itertools.combinations(range(D), count):
            check(placement, slots, lost)


@pytest.mark.parametrize(("D", "f", "each"), [(4, 1, 2), (7, 4, 1), (20, 2, 1)])
@pytest.mark.parametrize("sizes", [TINY, SIZES], ids=["slices", "whole"])
def test_lost_domains_of_wide_and_of_shared_lanes_are_made_again(D, f, each, sizes):
    placement = one_leaf(D, f, 30_003, "aec", each)
    slots = slots_of(placement)
    losses = list(itertools.combinations(range(D), f))
    for domains in losses[:: max(len(losses) // 3, 1)]:
        check(placement, slots, [rank for rank, domain in enumerate(placement.domains) if domain in domains], sizes)


@pytest.mark.parametrize(("D", "f"), [(5, 2), (7, 4)])
def test_one_of_several_lost_slots_is_made_alone(D, f):
    """Shards of the other lost slots are decoded on the way, but stored nowhere."""
    placement = one_leaf(D, f, 30_003)
    slots = slots_of(placement)
    for gone in list(itertools.combinations(range(D), f))[::3]:
        made = asyncio.run(remade(placement, slots, gone[:1], reads_of(slots, gone), gone=gone[1:]))
        assert np.array_equal(made[gone[0]], slots[gone[0]])


@pytest.mark.parametrize("D", range(2, 7))
@pytest.mark.parametrize("sizes", [SMALL, SIZES], ids=["slices", "whole"])
def test_lost_sections_are_made_again_from_guard_lanes(D, sizes):
    job = GuardedJob(D)
    slots = {rank: slot.data for rank, slot in enumerate(job.slots)}
    parity = {parity_number(job.placement, rank): slot.data for rank, slot in job.parity.items()}
    for lost in range(D):
        gone = {lost, parity_number(job.placement, lost)}
        plan = rebuild_plan(job.placement, {*slots, *parity} - gone, [lost], sizes, [lost])
        made: Any = {lost: SimpleNamespace(map=MadeSlot(slots[lost].nbytes))}

        async def run(plan: TransferPlan = plan, made: Any = made, gone: Collection[int] = gone) -> None:
            async for _ in made_slices(plan, reads_of({**slots, **parity}, gone), made):
                pass

        asyncio.run(run())
        assert np.array_equal(made[lost].map.data, slots[lost]), lost


DTYPES = {"bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "bool": 1, "float32": 4}
LEAVES = st.lists(
    st.tuples(st.sampled_from([0, 1, 3, 64, 65, 777, 4099]), st.sampled_from([*DTYPES])), min_size=1, max_size=40
)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(2, 12), st.integers(1, 3), LEAVES, st.sampled_from(["aec", "arc"]), st.randoms(use_true_random=False)
)
def test_any_leaves_are_made_again(D, f, rows, scheme, chance):
    """The leaves' bytes come back, with zeros between and behind the leaves."""
    leaves = [
        Leaf(f"leaf{i}", dtype, (count,), (1,), count * DTYPES[dtype], False, (count,), (0,))
        for i, (count, dtype) in enumerate([*rows, (5, "int8")])
    ]
    layout, f = pack(leaves), min(f, D - 1)
    placement = place(divide({layout.digest: layout}, [layout.digest] * D), list(range(D)), scheme, f, 64)
    (cell,) = placement.division.cells
    state = np.zeros(cell.nbytes, np.uint8)
    for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
        state[offset : offset + leaf.nbytes] = np.frombuffer(chance.randbytes(leaf.nbytes), np.uint8)
    check(placement, slots_of(placement, {0: state}), chance.sample(range(D), chance.randint(1, f)))


@pytest.mark.parametrize(("D", "f"), [(2, 1), (4, 1), (6, 2), (8, 3)])
def test_more_lost_ranks_than_f_are_refused(D, f):
    placement = one_leaf(D, f, 6400)
    slots = slots_of(placement)
    for lost in itertools.combinations(range(D), f + 1):
        with pytest.raises(ConfigError, match="shards are at hand"):
            asyncio.run(remade(placement, slots, lost, reads_of(slots, lost)))


@pytest.mark.parametrize("scheme", ["aec", "arc"])
def test_rows_take_four_bands_of_memory_at_most(scheme):
    placement = one_leaf(5, 2, 1 << 20, scheme)
    slots = slots_of(placement)
    read, alive, most = reads_of(slots, {3}), dict[int, int](), 0

    async def watched(rank: int, offset: int, into: np.ndarray) -> None:
        nonlocal most
        rows = into.base
        if id(rows) not in alive:
            alive[id(rows)] = rows.nbytes
            weakref.finalize(rows, alive.pop, id(rows))
        most = max(most, sum(alive.values()))
        await read(rank, offset, into)

    made = asyncio.run(remade(placement, slots, {3}, watched))
    assert np.array_equal(made[3], slots[3]) and SMALL.band < most <= 4 * SMALL.band


@pytest.mark.parametrize("failing_call", [0, 1, 7])
def test_a_failed_read_ends_all_others(failing_call):
    placement = one_leaf(6, 2, 1 << 16)
    slots, calls, under_way = slots_of(placement), itertools.count(), set[int]()

    async def read(rank: int, offset: int, into: np.ndarray) -> None:
        call = next(calls)
        if call == failing_call:
            raise OSError("gone")
        under_way.add(call)
        try:
            if call > failing_call:  # never ends by itself
                await asyncio.Event().wait()
            into[:] = slots[rank][offset : offset + into.nbytes]
        finally:
            under_way.discard(call)

    async def run() -> None:
        with pytest.raises(OSError, match="gone"):
            await remade(placement, slots, {1}, read)
        assert not under_way and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


# Unreplicated leaves, from guard lanes


def with_sections(D: int, f: int, scheme: Scheme = "aec") -> tuple[Placement, Slots]:
    """Returns slots of a leaf that all share and of one leaf a rank, and the parity slots."""
    chance = np.random.default_rng(D)
    shared = Leaf("w", "uint8", (30_003,), (1,), 30_003, False, (30_003,), (0,))
    sizes = [80_000 + 7777 * rank for rank in range(D)]
    own = [Leaf(f"own{rank}", "uint8", (n,), (1,), n, False, (n,), (0,)) for rank, n in enumerate(sizes)]
    layouts = [pack([shared, each]) for each in own]
    division = divide({each.digest: each for each in layouts}, [each.digest for each in layouts])
    placement = place(division, list(range(D)), scheme, f, 4096, slots=4)
    slots = slots_of(placement)
    for rank, size in enumerate(sizes):
        begin = placement.rank_placement(rank).unreplicated_offset
        slots[rank][begin : begin + size] = chance.integers(0, 256, size, np.uint8)
    (lane,) = placement.guard_lanes
    begins = [placement.rank_placement(rank).unreplicated_offset for rank in range(D)]
    sections = [slots[rank][begins[rank] :].tobytes() for rank in range(D)]
    for holder in range(D):
        slots[D + holder] = np.frombuffer(expected_parity(lane, sections, holder), np.uint8)
    return placement, slots


@pytest.mark.parametrize(("D", "f"), [(2, 1), (4, 1), (3, 2), (5, 2), (6, 2), (5, 3), (7, 3)])
@pytest.mark.parametrize("sizes", [SMALL, SIZES], ids=["slices", "whole"])
@pytest.mark.parametrize("scheme", ["aec", "aor"])
def test_lost_sections_are_made_again(D, f, sizes, scheme):
    placement, slots = with_sections(D, f, scheme)
    assert [lane.f for lane in placement.guard_lanes] == [f]
    losses = list(itertools.combinations(range(D), f))
    for lost in losses[:: max(len(losses) // 6, 1)]:
        gone = {*lost, *(D + rank for rank in lost)}
        for alone in (lost, lost[:1]):  # all on one daemon, or each on a node of its own
            plan = rebuild_plan(placement, set(slots) - gone, alone, sizes, sections=alone)
            made: dict[int, Any] = {rank: SimpleNamespace(map=MadeSlot(slots[rank].nbytes)) for rank in alone}
            asyncio.run(drained(made_slices(plan, reads_of(slots, gone), made)))
            assert all(np.array_equal(made[rank].map.data, slots[rank]) for rank in alone), (lost, alone)
            (cost,) = [each for each in costs(placement, set(slots) - gone, alone, alone) if each.cell == NO_CELL]
            own = sum(placement.guard_lanes[0].sizes[rank] for rank in alone)
            assert (cost.decoded, cost.copied, cost.parity) == (
                (0, own, 0) if D == 2 or scheme == "aor" else (own, 0, 0)
            )
            assert set(cost.read) <= set(slots) - gone
            for rank in alone:
                chunk = placement.rank_placement(rank).unreplicated_offset // 4096 + 3
                assert set(chunk_sources(plan, rank, chunk)[1]) <= set(cost.read)


async def drained(slices: Any) -> None:
    async for _ in slices:
        pass


def test_a_section_whose_lane_lost_too_much_is_refused():
    placement, _ = with_sections(5, 2)
    with pytest.raises(ValueError, match=r"members \(0, 1, 2\) of 5 are lost"):
        costs(placement, {3, 4, 8, 9}, [0], sections=[0])
    with pytest.raises(ValueError, match=r"parity of \(3, 4\) is at hand"):
        costs(placement, {1, 2, 3, 4, 8, 9}, [0], sections=[0])
