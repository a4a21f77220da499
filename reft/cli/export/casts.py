"""Casts floating point numbers as torch does, without torch.

numpy has no bfloat16: a bfloat16 is the upper half of a float32. All casts go through float32.
"""

from __future__ import annotations

import numpy as np

from reft.core.layout.regions import ByteRuns
from reft.wire.slot_format import Bytes

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"} | {
    name: name for name in ITEM_BYTES
}
NAN = 0x7FC0


def cast(data: Bytes, old: str, new: str) -> Bytes:
    """Returns numbers in another dtype; to the nearest, halves to the even one.

    Args:
        data: whole numbers.
        old: their dtype, a key of ITEM_BYTES.
        new: the wanted dtype, likewise.
    """
    if old == new:
        return data
    with np.errstate(over="ignore", invalid="ignore"):
        if old == "bfloat16":
            numbers = (data.view("<u2").astype("<u4") << 16).view("<f4")
        else:
            numbers = data.view(f"<f{ITEM_BYTES[old]}").astype("<f4")
        if new != "bfloat16":
            return numbers.astype(f"<f{ITEM_BYTES[new]}").view(np.uint8)
    bits = numbers.view("<u4")
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype("<u2")
    rounded[np.isnan(numbers)] = NAN
    return rounded.view(np.uint8)


def cast_runs(runs: ByteRuns, old: str, new: str) -> ByteRuns:
    """Returns the same runs of numbers, in bytes of the new dtype."""
    before, after = ITEM_BYTES[old], ITEM_BYTES[new]
    return ByteRuns(*(each // before * after for each in runs))
