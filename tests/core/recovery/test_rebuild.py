"""Compares slots that are rebuilt from other slots with the lost ones, without a daemon."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.coding.erasure import encode_program, run
from reft.core.coding.placement import Lane, Placement, place
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery.rebuild import RANGE_UNIT, ShardRebuilder, costs, lane_at, rebuild_slices, stripes


def placed(D: int, f: int, nbytes: int, scheme: str = "aec", each: int = 1) -> Placement:
    layout = pack([Leaf("w", "uint8", (nbytes,), (1,), nbytes, False, (nbytes,), (0,))])
    division = divide({layout.digest: layout}, [layout.digest] * (D * each))
    return place(division, [rank // each for rank in range(D * each)], scheme, f, 64)  # type: ignore[arg-type]


def slots_of(placement: Placement, seed: int = 0) -> dict[int, np.ndarray]:
    """Returns the data of every rank's slot."""
    cells = [np.random.default_rng(seed).integers(0, 256, cell.nbytes, np.uint8) for cell in placement.division.cells]
    slots = {}
    for rank in range(len(placement.domains)):
        part = placement.rank_placement(rank)
        slots[rank] = np.zeros(part.data_bytes, np.uint8)
        for block in part.blocks:
            lane = placement.lanes[block.lane]
            padded = np.zeros(lane.begin + lane.D * lane.code.k * lane.shard_bytes, np.uint8)
            padded[: lane.begin + lane.nbytes] = cells[lane.cell][: lane.begin + lane.nbytes]
            shards = [padded[slice(*lane.data_range(block.stripe, shard))] for shard in range(lane.code.k)]
            packets = [shard.reshape(lane.code.w, -1) for shard in shards]
            target = slots[rank][block.offset : block.offset + block.nbytes].reshape(lane.code.w, -1)
            if block.shard < lane.code.k:
                target[:] = packets[block.shard]
                continue
            program = encode_program(lane.code, block.shard - lane.code.k)
            scratch = list(np.zeros((program.scratch, lane.packet_bytes), np.uint8))
            run(program, [packets[s][r] for s, r in program.inputs], list(target), scratch)
    return slots


def made(
    placement: Placement, slots: dict[int, np.ndarray], lost: tuple[int, ...], limit: int, gone: tuple[int, ...] = ()
) -> dict[int, np.ndarray]:
    """Returns the rebuilt slots of `lost`, without reading the slots of `gone`."""
    have = {rank: data for rank, data in slots.items() if rank not in (*lost, *gone)}
    rebuilt = {rank: np.zeros_like(slots[rank]) for rank in lost}
    maker = ShardRebuilder(placement)
    for stripe in stripes(placement, have, lost):
        lane = placement.lanes[stripe.lane]
        for band in rebuild_slices(placement, stripe, limit):
            assert band.end - band.begin <= max(limit // (lane.code.w * (lane.code.k + 1)), RANGE_UNIT)

            def columns(data: np.ndarray, offset: int, lane=lane, band=band) -> list[np.ndarray]:
                starts = (offset + packet * lane.packet_bytes for packet in range(lane.code.w))
                return [data[start + band.begin : start + band.end] for start in starts]

            read = {
                (p.shard, r): row for p in stripe.read for r, row in enumerate(columns(have[p.rank], p.offset))
            }  # fmt: skip
            into = {(p.shard, r): row for p in stripe.made for r, row in enumerate(columns(rebuilt[p.rank], p.offset))}
            maker.make(band, read, into)
    return rebuilt


@pytest.mark.parametrize(
    ("D", "f", "scheme", "each"),
    [
        (2, 1, "aec", 1),
        (4, 1, "aec", 2),
        (5, 2, "aec", 1),
        (6, 2, "arc", 1),
        (6, 3, "aec", 1),
        (7, 4, "aec", 1),
        (20, 2, "aec", 1),
    ],
)
@pytest.mark.parametrize("limit", [1 << 12, 1 << 27])
def test_any_f_lost_domains_are_rebuilt(D, f, scheme, each, limit):
    placement = placed(D, f, 30_003, scheme, each)
    slots = slots_of(placement)
    losses = list(itertools.combinations(range(D), f))
    for domains in losses[:: max(len(losses) // 3, 1)]:
        lost = tuple(rank for rank, domain in enumerate(placement.domains) if domain in domains)
        rebuilt = made(placement, slots, lost, limit)
        assert all(np.array_equal(rebuilt[rank], slots[rank]) for rank in lost)


@pytest.mark.parametrize(("D", "f"), [(5, 2), (7, 4)])
def test_one_of_several_lost_slots_is_rebuilt_alone(D, f):
    """Shards of the other lost slots are decoded on the way, but stored nowhere."""
    placement = placed(D, f, 30_003)
    slots = slots_of(placement)
    for gone in list(itertools.combinations(range(D), f))[::3]:
        rebuilt = made(placement, slots, gone[:1], 1 << 12, gone[1:])
        assert np.array_equal(rebuilt[gone[0]], slots[gone[0]])


DTYPES = {"bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "bool": 1, "float32": 4}
LEAVES = st.lists(
    st.tuples(st.sampled_from([0, 1, 3, 64, 65, 777, 4099]), st.sampled_from([*DTYPES])), min_size=1, max_size=40
)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(2, 64), st.integers(1, 3), LEAVES, st.sampled_from(["aec", "arc"]), st.randoms(use_true_random=False)
)
def test_any_leaves_in_groups_of_up_to_64_ranks_are_rebuilt(D, f, rows, scheme, chance):
    """Checks some stripes of a loss: each leaf's bytes, and zeros between and after them."""
    leaves = [
        Leaf(f"leaf{i}", dtype, (count,), (1,), count * DTYPES[dtype], False, (count,), (0,))
        for i, (count, dtype) in enumerate([*rows, (5, "int8")])
    ]
    layout = pack(leaves)
    placement = place(divide({layout.digest: layout}, [layout.digest] * D), list(range(D)), scheme, min(f, D - 1), 64)  # type: ignore[arg-type]
    (cell,) = placement.division.cells
    state = np.zeros(cell.nbytes, np.uint8)
    for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
        state[offset : offset + leaf.nbytes] = np.frombuffer(chance.randbytes(leaf.nbytes), np.uint8)
    assert sum(leaf.nbytes for leaf in cell.leaves) == sum(leaf.nbytes for leaf in leaves)
    lost = chance.sample(range(D), chance.randint(1, min(f, D - 1)))
    every = list(stripes(placement, set(range(D)) - set(lost), lost))
    maker = ShardRebuilder(placement)
    for stripe in chance.sample(every, min(2, len(every))):
        lane = placement.lanes[stripe.lane]
        whole = {
            piece.shard: shard_of(lane, stripe.stripe, piece.shard, state) for piece in (*stripe.read, *stripe.made)
        }
        rebuilt = {piece.shard: np.full_like(whole[piece.shard], 0xA5) for piece in stripe.made}
        for band in rebuild_slices(placement, stripe):
            here = slice(band.begin, band.end)
            read = {(p.shard, r): row[here] for p in stripe.read for r, row in enumerate(whole[p.shard])}
            maker.make(
                band, read, {(p.shard, r): row[here] for p in stripe.made for r, row in enumerate(rebuilt[p.shard])}
            )
        assert all(np.array_equal(rebuilt[shard], whole[shard]) for shard in rebuilt), (D, f, lost, stripe)


def shard_of(lane: Lane, stripe: int, shard: int, state: np.ndarray) -> np.ndarray:
    """Returns a shard as [packet, byte]."""
    padded = np.zeros(lane.begin + lane.D * lane.code.k * lane.shard_bytes, np.uint8)
    padded[: lane.begin + lane.nbytes] = state[: lane.begin + lane.nbytes]
    data = [padded[slice(*lane.data_range(stripe, each))].reshape(lane.code.w, -1) for each in range(lane.code.k)]
    if shard < lane.code.k:
        return data[shard]
    program = encode_program(lane.code, shard - lane.code.k)
    packets = np.zeros((lane.code.w, lane.packet_bytes), np.uint8)
    run(
        program,
        [data[s][r] for s, r in program.inputs],
        list(packets),
        list(np.zeros((program.scratch, lane.packet_bytes), np.uint8)),
    )
    return packets


def test_the_cost_counts_bytes_read_copied_and_computed():
    placement = placed(4, 1, 3 * 4 * 64 * 10)
    shard = placement.lanes[0].shard_bytes
    (rebuilt,) = costs(placement, {0, 1, 3}, {2})
    assert (rebuilt.cell, rebuilt.copied, rebuilt.decoded, rebuilt.parity) == (0, 0, 3 * shard, shard)
    assert rebuilt.read == {0: 4 * shard, 1: 4 * shard, 3: 4 * shard}
    assert 4 * shard == placement.rank_placement(2).data_bytes
    in_copies = placed(4, 1, 6400, "arc")
    (copies,) = costs(in_copies, {0, 1, 3}, {2})
    assert (copies.decoded, copies.parity) == (0, 0)
    assert copies.copied == sum(copies.read.values()) == in_copies.rank_placement(2).data_bytes


def test_only_stripes_of_the_lost_rank_are_read():
    """With declustering a rank takes part in few stripes."""
    placement = placed(70, 2, 1 << 20)
    lane = placement.lanes[0]
    mine = list(stripes(placement, set(range(70)) - {5}, {5}))
    assert len(mine) == lane.code.k + lane.code.f == 64
    assert all(len(stripe.read) == lane.code.k and len(stripe.made) == 1 for stripe in mine)


def test_more_than_f_lost_ranks_are_refused():
    placement = placed(4, 1, 6400)
    with pytest.raises(ValueError, match="it takes 3"):
        list(stripes(placement, {0, 1}, {2, 3}))


def test_the_lane_of_an_offset():
    placement = placed(4, 1, 6400, each=2)
    part = placement.rank_placement(1)
    assert lane_at(part, 0) == lane_at(part, part.parity_offset) == 1 and lane_at(part, part.data_bytes) is None
