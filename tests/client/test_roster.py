"""Which leaves are taken for replicas at attach, and which are each rank's own."""

from __future__ import annotations

import torch

from reft.client.roster import CONSTANT, combined, unequal, value_digests
from reft.client.state import Bindings

NAMES = ["model.0.w", "model.0.b", "model.0.v", "optimizer.0.exp_avg.model.0.w", "optimizer.0.exp_avg.model.0.v"]


def said(**tensors: torch.Tensor) -> dict[str, dict[str, str]]:
    bindings = Bindings({f"model.0.{name}": tensor for name, tensor in tensors.items()}, set())
    return {"values": value_digests(bindings)}


def test_equal_values_are_replicas():
    ranks = [said(w=torch.arange(6.0), b=torch.zeros(3)) for _ in range(3)]
    assert len({combined(rank["values"]) for rank in ranks}) == 1
    assert unequal(ranks, NAMES) == []


def test_what_differs_is_each_ranks_own_with_its_optimizer_state_and_what_constants_do_not_prove():
    same = torch.arange(6.0)
    ranks = [said(w=same + rank, v=same, b=torch.zeros(3)) for rank in range(2)]
    assert unequal(ranks, NAMES) == ["model.0.b", "model.0.w", "optimizer.0.exp_avg.model.0.w"]


def test_constants_are_marked_whatever_their_type_and_order():
    bindings = Bindings(
        {"a": torch.ones(4, 4).t(), "b": torch.arange(4), "c": torch.empty(0), "d": torch.ones(5)[::2]}, set()
    )
    found = value_digests(bindings)
    assert [name for name, digest in found.items() if digest.startswith(CONSTANT)] == ["a", "c", "d"]
