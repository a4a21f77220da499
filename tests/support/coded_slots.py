"""Slots of a job as plain arrays, encoded from their cells without a snapshot."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reft.core.coding.erasure import encode_program, run
from reft.core.coding.placement import Lane, Placement, place
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack


def one_leaf(D: int, f: int, nbytes: int, scheme: str = "aec", each: int = 1) -> Placement:
    """Returns the placement of one leaf that all ranks hold; each domain has `each` ranks."""
    layout = pack([Leaf("w", "uint8", (nbytes,), (1,), nbytes, False, (nbytes,), (0,))])
    division = divide({layout.digest: layout}, [layout.digest] * (D * each))
    return place(division, [rank // each for rank in range(D * each)], scheme, f, 64)  # type: ignore[arg-type]


def slots_of(placement: Placement, cells: Mapping[int, np.ndarray] | None = None) -> dict[int, np.ndarray]:
    """Returns the data of every rank's slot; without `cells`, their bytes are random."""
    chance = np.random.default_rng(0)
    if cells is None:
        cells = {i: chance.integers(0, 256, cell.nbytes, np.uint8) for i, cell in enumerate(placement.division.cells)}
    slots = {}
    for rank in range(len(placement.domains)):
        part = placement.rank_placement(rank)
        slots[rank] = np.zeros(part.data_bytes, np.uint8)
        for block in part.blocks:
            lane = placement.lanes[block.lane]
            shard = shard_of(lane, block.stripe, block.shard, cells[lane.cell])
            slots[rank][block.offset : block.offset + block.nbytes] = shard.reshape(-1)
    return slots


def shard_of(lane: Lane, stripe: int, shard: int, cell: np.ndarray) -> np.ndarray:
    """Returns a shard as [packet, byte]."""
    padded = np.zeros(lane.begin + lane.D * lane.code.k * lane.shard_bytes, np.uint8)
    padded[: lane.begin + lane.nbytes] = cell[: lane.begin + lane.nbytes]
    data = [padded[slice(*lane.data_range(stripe, each))].reshape(lane.code.w, -1) for each in range(lane.code.k)]
    if shard < lane.code.k:
        return data[shard]
    program = encode_program(lane.code, shard - lane.code.k)
    packets = np.zeros((lane.code.w, lane.packet_bytes), np.uint8)
    scratch = np.zeros((program.scratch, lane.packet_bytes), np.uint8)
    run(program, [data[s][r] for s, r in program.inputs], list(packets), list(scratch))
    return packets
