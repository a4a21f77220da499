"""Lanes that survive several lost members: pieces and parity straight from the codes' tables.

Nothing here uses `reft.core.coding.two_level`, which the tests compare with this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reft.core.coding.erasure import ErasureCode, code_for
from reft.core.coding.exchange import GuardLane


def parity_of_table(code: ErasureCode, parity: int, shards: Sequence[np.ndarray], block_bytes: int) -> np.ndarray:
    """Returns a parity shard, block by block, packet by packet."""
    size = block_bytes // code.w
    made = np.zeros_like(shards[0])
    for block in range(0, made.nbytes, block_bytes):
        for packet, terms in enumerate(code.parity[parity]):
            for shard, of in terms:
                begin = block + of * size
                made[block + packet * size :][:size] ^= shards[shard][begin : begin + size]
    return made


def all_pieces(lane: GuardLane, section: bytes) -> list[np.ndarray]:
    """Returns the D - 1 pieces of a section, the coded ones last."""
    k, size = lane.D - lane.code.f, lane.piece_bytes
    padded = np.zeros(k * size, np.uint8)
    padded[: len(section)] = np.frombuffer(section, np.uint8)
    plain = list(padded.reshape(k, size))
    inner = code_for(k, lane.code.f - 1)
    return plain + [parity_of_table(inner, i, plain, size // lane.blocks) for i in range(lane.code.f - 1)]


def expected_parity(lane: GuardLane, sections: Sequence[bytes], holder: int) -> bytes:
    """Computes what a holder keeps, end to end, by the drawings of `core/coding`."""
    D = lane.D
    if lane.is_copies:
        return b"".join(sections[(holder + 1 + n) % D].ljust(lane.piece_bytes, b"\0") for n in range(lane.f))
    sources = [(holder + 1 + column) % D for column in range(D - 1)]
    column = [all_pieces(lane, sections[source])[(holder - source - 1) % D] for source in sources]
    outer = code_for(D - 1, lane.code.f)
    parities = [parity_of_table(outer, i, column, lane.piece_bytes // lane.blocks) for i in range(outer.f)]
    return b"".join(each.tobytes() for each in parities)
