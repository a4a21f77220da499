"""State that is made, replaced, shared or shaped in unusual ways: held as it is, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reft.client.extract.optimizers import OptimizerExtractor
from reft.client.extract.registry import Named
from reft.client.room import Room
from reft.core.layout import Leaf


def scalar(key):
    return Leaf(f"optimizer.0.{key}.model.0.w", "float32", (), (), 4, False, (), ())


@pytest.mark.parametrize(
    ("flags", "step_device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")], ids=str
)
def test_a_step_is_made_where_the_kernels_of_its_group_read_it(flags, step_device):
    parameter = nn.Parameter(torch.empty(4, 4, device="meta"))  # stands for a device
    optimizer = torch.optim.ASGD([parameter])
    optimizer.param_groups[0].update(flags)
    names = {id(parameter): Named("model.0.w", parameter, parameter, None)}
    leaves = [scalar("step"), scalar("eta"), scalar("mu")]
    OptimizerExtractor().make("optimizer.0", optimizer, leaves, names, Room(0))
    made = optimizer.state[parameter]
    assert {key: each.device.type for key, each in made.items()} == {"step": step_device, "eta": "meta", "mu": "meta"}
