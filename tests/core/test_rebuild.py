"""Slots made again from others, without a daemon: against what the lost ranks had."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from reft.core.cells import divide
from reft.core.coding import encode_program, run
from reft.core.layout import Leaf, pack
from reft.core.placement import Placement, place
from reft.core.rebuild import RANGE_UNIT, Maker, bands, cost, lane_at, stripes


def placed(D: int, f: int, nbytes: int, scheme: str = "aec", each: int = 1) -> Placement:
    layout = pack([Leaf("w", "uint8", (nbytes,), (1,), nbytes, False, (nbytes,), (0,))])
    division = divide({layout.digest: layout}, [layout.digest] * (D * each))
    return place(division, [rank // each for rank in range(D * each)], scheme, f, 64)  # type: ignore[arg-type]


def slots_of(placement: Placement, seed: int = 0) -> dict[int, np.ndarray]:
    """The data of every rank's slot."""
    cells = [np.random.default_rng(seed).integers(0, 256, cell.nbytes, np.uint8) for cell in placement.division.cells]
    found = {}
    for rank in range(len(placement.domains)):
        part = placement.part(rank)
        found[rank] = np.zeros(part.data_bytes, np.uint8)
        for block in part.blocks:
            lane = placement.lanes[block.lane]
            padded = np.zeros(lane.begin + lane.padded_bytes, np.uint8)
            padded[: lane.begin + lane.nbytes] = cells[lane.cell][: lane.begin + lane.nbytes]
            shards = [padded[slice(*lane.data_range(block.stripe, shard))] for shard in range(lane.code.k)]
            packets = [shard.reshape(lane.code.w, -1) for shard in shards]
            target = found[rank][block.offset : block.offset + block.nbytes].reshape(lane.code.w, -1)
            if block.shard < lane.code.k:
                target[:] = packets[block.shard]
                continue
            program = encode_program(lane.code, block.shard - lane.code.k)
            scratch = list(np.zeros((program.scratch, lane.packet_bytes), np.uint8))
            run(program, [packets[s][r] for s, r in program.inputs], list(target), scratch)
    return found


def made(
    placement: Placement, slots: dict[int, np.ndarray], lost: tuple[int, ...], limit: int
) -> dict[int, np.ndarray]:
    have = {rank: data for rank, data in slots.items() if rank not in lost}
    found = {rank: np.zeros_like(slots[rank]) for rank in lost}
    maker = Maker(placement)
    for stripe in stripes(placement, have, lost):
        lane = placement.lanes[stripe.lane]
        for band in bands(placement, stripe, limit):
            assert band.end - band.begin <= max(limit // (lane.code.w * (lane.code.k + 1)), RANGE_UNIT)

            def columns(data: np.ndarray, offset: int, lane=lane, band=band) -> list[np.ndarray]:
                starts = (offset + packet * lane.packet_bytes for packet in range(lane.code.w))
                return [data[start + band.begin : start + band.end] for start in starts]

            read = {
                (p.shard, r): row for p in stripe.read for r, row in enumerate(columns(have[p.rank], p.offset))
            }  # fmt: skip
            into = {(p.shard, r): row for p in stripe.made for r, row in enumerate(columns(found[p.rank], p.offset))}
            maker.make(band, read, into)
    return found


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
def test_any_f_lost_domains_are_made_again(D, f, scheme, each, limit):
    placement = placed(D, f, 30_003, scheme, each)
    slots = slots_of(placement)
    losses = list(itertools.combinations(range(D), f))
    for domains in losses[:: max(len(losses) // 3, 1)]:
        lost = tuple(rank for rank, domain in enumerate(placement.domains) if domain in domains)
        found = made(placement, slots, lost, limit)
        assert all(np.array_equal(found[rank], slots[rank]) for rank in lost)


def test_what_it_costs():
    placement = placed(4, 1, 3 * 4 * 64 * 10)
    shard = placement.lanes[0].shard_bytes
    found = cost(placement, {0, 1, 3}, {2})
    assert (found.copied, found.decoded, found.parity) == (0, 3 * shard, shard)
    assert found.read == {0: 4 * shard, 1: 4 * shard, 3: 4 * shard} and found.data_bytes == 4 * shard
    copies = cost(placed(4, 1, 6400, "arc"), {0, 1, 3}, {2})
    assert (copies.decoded, copies.parity) == (0, 0) and copies.copied == sum(copies.read.values()) == copies.data_bytes


def test_only_what_the_lost_rank_had_is_read():
    """With declustering a rank takes part in few stripes."""
    placement = placed(70, 2, 1 << 20)
    lane = placement.lanes[0]
    mine = list(stripes(placement, set(range(70)) - {5}, {5}))
    assert len(mine) == lane.code.k + lane.code.f == 64
    assert all(len(stripe.read) == lane.code.k and len(stripe.made) == 1 for stripe in mine)


def test_more_than_f_are_refused():
    placement = placed(4, 1, 6400)
    with pytest.raises(ValueError, match="it takes 3"):
        list(stripes(placement, {0, 1}, {2, 3}))


def test_the_lane_of_an_offset():
    placement = placed(4, 1, 6400, each=2)
    part = placement.part(1)
    assert lane_at(part, 0) == lane_at(part, part.parity_offset) == 1 and lane_at(part, part.data_bytes) is None
