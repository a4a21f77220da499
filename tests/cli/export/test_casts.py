"""Casts are those of torch, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from reft.cli.export.casts import ITEM_BYTES, NAMES, cast, cast_runs
from reft.core.layout.regions import ByteRuns

SPECIAL = [0.0, -0.0, 1.0, -1.5, 65504.0, 65520.0, 1e39, -1e39, 1e-45, 6e-8, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(ITEM_BYTES, 2)))
def test_cast_is_that_of_torch(old: str, new: str) -> None:
    random = torch.randn(4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    halves = torch.arange(4096, dtype=torch.float64) / 4096 + 1  # many lie between two bfloat16
    values = torch.cat([random, random * 1e30, halves, torch.tensor(SPECIAL, dtype=torch.float64)])
    values = values.to(getattr(torch, old))
    done = torch.frombuffer(bytearray(cast(values.view(torch.uint8).numpy(), old, new)), dtype=getattr(torch, new))
    expected = values.to(getattr(torch, new))
    assert torch.equal(done.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(done[kept].view(torch.uint8), expected[kept].view(torch.uint8))


def test_same_dtype_is_not_touched() -> None:
    data = np.arange(8, dtype=np.uint8)
    assert cast(data, "float32", "float32") is data


def test_runs_count_in_bytes_of_the_new_dtype() -> None:
    runs = ByteRuns(*(np.array(each) for each in ([0, 8], [16, 0], [8, 8])))
    assert [each.tolist() for each in cast_runs(runs, "float32", "bfloat16")] == [[0, 4], [8, 0], [4, 4]]


def test_short_names() -> None:
    assert [NAMES[name] for name in ("bf16", "fp16", "fp32", "float64")] == [
        "bfloat16", "float16", "float32", "float64",
    ]  # fmt: skip


def test_nan_of_any_bits_stays_one() -> None:
    """Rounded like a number, the first becomes infinite and the last zero."""
    bits = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], "<u4")
    done = cast(bits.view(np.uint8), "float32", "bfloat16")
    assert torch.frombuffer(bytearray(done), dtype=torch.bfloat16).isnan().all()
