"""Tests of the digests of a rehearsal: tensors, generators, small state, parameter groups."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from reft.client.rehearsal.digests import generator_digests, group_values, plain_digest, tensor_digest
from reft.client.snapshot.replica_sums import PIECE_BYTES
from reft.client.state.tensors import flat_bytes


def digest_of(tensor):
    return xxhash.xxh3_64_hexdigest(flat_bytes(tensor).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_tensors_digest_is_that_of_its_bytes(dtype):
    tensor = torch.arange(30).reshape(5, 6).to(dtype)
    assert tensor_digest(nn.Parameter(tensor, requires_grad=False)) == digest_of(tensor)


def test_tensors_of_any_form_have_digests():
    table = torch.arange(24.0).reshape(4, 6)
    assert tensor_digest(table.T) == digest_of(table), "dense: the bytes as they lie in memory"
    assert tensor_digest(table[:, ::2]) == digest_of(table[:, ::2].contiguous())
    assert tensor_digest(torch.ones(2, 1).expand(2, 3)) == digest_of(torch.ones(2, 3))
    assert tensor_digest(torch.empty(0)) == xxhash.xxh3_64_hexdigest(b"")
    assert tensor_digest(torch.tensor(3)) == digest_of(torch.tensor([3]))


def test_one_bit_of_a_large_tensor_changes_its_digest():
    tensor = torch.zeros(3 * PIECE_BYTES + 5, dtype=torch.uint8)
    before = tensor_digest(tensor)
    tensor[-1] = 1
    assert tensor_digest(tensor) != before and tensor_digest(tensor) == digest_of(tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_digests_on_a_device():
    tensor = torch.arange(10_000.0, device="cuda")
    before = tensor_digest(tensor)
    assert before == tensor_digest(tensor.clone())
    tensor[5000] += 1
    assert tensor_digest(tensor) != before
    first = generator_digests()
    torch.rand(1, device="cuda")
    assert {name for name, digest in generator_digests().items() if digest != first[name]} == {"cuda:0"}


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("python", random.random),
        ("numpy", np.random.random),
        ("numpy", np.random.standard_normal),
        ("torch", lambda: torch.rand(1)),
    ],
)
def test_a_draw_changes_the_digest_of_its_generator_only(name, draw):
    before = generator_digests()
    draw()
    after = generator_digests()
    assert {each for each in after if after[each] != before[each]} == {name} <= {"python", "numpy", "torch"}


def test_a_second_normal_number_is_seen_although_it_was_drawn_with_the_first():
    np.random.standard_normal()
    before = generator_digests()
    np.random.standard_normal()
    assert generator_digests()["numpy"] != before["numpy"]


def test_the_order_of_keys_does_not_count_and_all_else_does():
    value = {"a": 1, "b": [{"x": 1.0, "y": (2, None)}]}
    assert plain_digest(value) == plain_digest({"b": [{"y": (2, None), "x": 1.0}], "a": 1})
    others = [{"a": 1, "b": [{"x": 1.0, "y": [2, None]}]}, {"a": True, "b": value["b"]}, {"a": 1}, {"a": 1, "b": []}]
    assert len({plain_digest(each) for each in (value, *others)}) == 5


def test_settings_of_a_group_are_json():
    group = {
        "params": [nn.Parameter(torch.zeros(2))], "lr": torch.tensor(0.5), "betas": (0.9, np.float64(0.99)), "fused": None,
        "name": "decay", "most": float("inf"), "closure": print, "table": torch.arange(3), "nesterov": True,
    }  # fmt: skip
    values = group_values(group)
    expected = {"lr": 0.5, "betas": [0.9, 0.99], "name": "decay", "most": "inf", "nesterov": True}
    assert values == {**expected, "table": tensor_digest(torch.arange(3))}
    assert json.loads(json.dumps(values)) == values
