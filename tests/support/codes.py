"""Programs of erasure codes, as tests ask for them: by what is lost and which parity is left."""

from __future__ import annotations

from collections.abc import Collection

from reft.core.coding.erasure import ErasureCode, XorProgram, make_program


def decode_program(code: ErasureCode, lost: Collection[int], have: Collection[int]) -> XorProgram:
    """Returns the program that makes lost data shards from the lowest parities at hand."""
    parities = sorted(set(have))[: len(set(lost))]
    return make_program(code, [*(set(range(code.k)) - set(lost)), *(code.k + parity for parity in parities)], lost)
