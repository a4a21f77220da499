"""Tests which optimizers and leaves protect="aor" refuses by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from reft.client.attach.arguments import AttachArguments
from reft.client.state.extract.recomputable import check_section, check_threads
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout.layout import Leaf
from reft.errors import ConfigError, UnsupportedState


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank: ZeroRedundancyOptimizer needs one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tracked(*optimizers: torch.optim.Optimizer, protect: str = "aor") -> TrackedObjects:
    return AttachArguments(MODEL, list(optimizers), None, {}, None, protect, 1).tracked()


MODEL = nn.Linear(3, 4)


def sharded(kind: type[torch.optim.Optimizer], **options: object) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(MODEL.parameters(), kind, lr=0.1, **options)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_torchs_own_element_wise_optimizers_under_zero_are_accepted(kind):
    tracked(sharded(kind))
    tracked(torch.optim.Adagrad([nn.Parameter(torch.zeros(1))]), sharded(kind))


class Changed(torch.optim.AdamW):
    """Could compute anything in its step."""


@pytest.mark.parametrize("kind", [Changed, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.LBFGS])
def test_other_classes_are_refused_by_name(kind):
    optimizer = sharded(torch.optim.SGD)
    optimizer.optim = kind(MODEL.parameters(), lr=0.1)
    with pytest.raises(
        UnsupportedState, match=rf"optimizer.0 is a ZeroRedundancyOptimizer of {kind.__name__}; .*AdamW"
    ):
        tracked(optimizer)
    tracked(optimizer, protect="auto")


def test_a_job_without_zero_is_refused():
    with pytest.raises(UnsupportedState, match="no optimizer is one"):
        tracked(torch.optim.AdamW(MODEL.parameters()))
    with pytest.raises(ConfigError, match="can be auto, arc, aec, aor, none"):
        tracked(torch.optim.AdamW(MODEL.parameters()), protect="raid")


def test_overlap_with_ddp_is_refused_with_any_protection():
    optimizer = sharded(torch.optim.SGD)
    optimizer._overlap_with_ddp = True
    for protect in ("aor", "auto"):
        with pytest.raises(UnsupportedState, match="overlap_with_ddp"):
            tracked(optimizer, protect=protect)


def leaf(name: str) -> Leaf:
    return Leaf(name, "float32", (4,), (1,), 16, False, (4,), (0,))


def test_a_section_holds_moments_of_zero_alone():
    objects = tracked(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]), sharded(torch.optim.Adam)).items()
    moments = ["exp_avg.model.0.weight", "exp_avg_sq.model.0.weight", "max_exp_avg_sq.model.0.bias"]
    check_section([leaf(f"optimizer.1.{each}") for each in moments], objects)
    check_section([], objects)
    others = [
        "model.0.weight", "optimizer.0.exp_avg.model.0.weight", "optimizer.1.step.model.0.weight",
        "optimizer.1.momentum_buffer.model.0.weight", "optimizer.10.exp_avg.model.0.weight",
    ]  # fmt: skip
    for other in others:
        with pytest.raises(UnsupportedState, match=f"only this rank holds {other};"):
            check_section([leaf(f"optimizer.1.{moments[0]}"), leaf(other)], objects)
    with pytest.raises(UnsupportedState, match=r"model\.0\.weight and 4 more leaves; with"):
        check_section(map(leaf, others), objects)


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "threads", "is_refused"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "bfloat16", 2, True),
        (torch.optim.Adam, {"weight_decay": 0.1}, "bfloat16", 2, True),
        (torch.optim.Adam, {}, "bfloat16", 2, False),
        (torch.optim.AdamW, {"weight_decay": 0.1}, "bfloat16", 2, False),
        (torch.optim.SGD, {"momentum": 0.9}, "bfloat16", 1, False),
        (torch.optim.SGD, {"momentum": 0.9}, "float32", 2, False),
    ],
)
def test_bits_that_depend_on_threads_are_refused(kind, options, dtype, threads, is_refused):
    objects = list(tracked(sharded(kind, **options)).items())
    leaf = Leaf("optimizer.0.moment.weight", dtype, (4, 3), (3, 1), 24, False, (4, 3), (0, 0))
    try:
        check_threads([leaf], objects, threads)
    except UnsupportedState as error:
        assert is_refused and "of bfloat16" in error.message
    else:
        assert not is_refused
