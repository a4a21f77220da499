"""Decides which gradients this rank records: those of the ranks whose state its node copies.

    copy lane  ─► the ranks that this rank's node copies ─► the leaves of their sections
               ─► moments "optimizer.0.exp_avg.model.0.weight" ─► parameters of this process
               ─► a place for each gradient in a record (core/commit/gradient_records.py)

Under DDP each rank has the reduced gradients of all parameters. torch's ZeroRedundancyOptimizer
updates only some of them on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.tensors import is_dense
from reft.client.state.tracked_objects import TrackedObjects, required_extractor
from reft.core.coding.placement import Placement
from reft.core.commit.gradient_records import RecordItem, RecordLayout, lay_out
from reft.errors import UnsupportedState
from reft.wire.record_format import Scalar

MOMENT = re.compile(r"optimizer\.(\d+)\.([^.]+)\.(.+)", re.DOTALL)  # a leaf: optimizer, key of the state, parameter
NO_KEY = (-1, "")


@dataclass(frozen=True)
class GradientSource:
    """A parameter whose gradient is recorded.

    Attributes:
        parameter: the parameter.
        optimizer: index of the optimizer that updates the parameter.
        group: index of the parameter's group in the optimizer.
    """

    parameter: torch.Tensor
    optimizer: int
    group: int


@dataclass(frozen=True)
class RecordPlan:
    """What each record of an epoch holds.

    Attributes:
        optimizers: all optimizers that were passed to attach.
        layout: the gradients, and their places.
        sources: the parameter of each item of the layout.
        chunk_bytes: size of a chunk of the record slots.
    """

    optimizers: Sequence[Any]
    layout: RecordLayout
    sources: tuple[GradientSource, ...]
    chunk_bytes: int


def plan_records(placement: Placement, rank: int, owners: Sequence[int], tracked: TrackedObjects) -> RecordPlan:
    """Returns what this rank records.

    Args:
        placement: of the epoch.
        rank: this rank.
        owners: the ranks whose sections this rank's node copies.
        tracked: the objects passed to attach.

    Raises:
        UnsupportedState: a section holds something else than state of parameters of which this
            process has the gradient.
    """
    sources = _sources(tracked)
    items: dict[tuple[int, str], RecordItem] = {}
    for owner in owners:
        for leaf in placement.division.unreplicated[placement.division.layout_of[owner]].leaves:
            match = MOMENT.fullmatch(leaf.name)
            key = (int(match[1]), match[3]) if match else NO_KEY
            if key not in sources:
                raise UnsupportedState(
                    f"{leaf.name} of rank {owner} can't be recomputed from the gradients of rank {rank}.",
                    "protect='auto'",
                )
            items[key] = _item(owner, key, sources[key], tracked.optimizers[key[0]])
    layout = lay_out(list(items.values()), placement.chunk_bytes)
    ordered = tuple(sources[item.optimizer, item.name] for item in layout.items)
    return RecordPlan(tuple(tracked.optimizers), layout, ordered, placement.chunk_bytes)


def _sources(tracked: TrackedObjects) -> dict[tuple[int, str], GradientSource]:
    """Returns the parameters whose gradients can be recorded, by optimizer and name.

    A gradient has the bytes of its parameter's shape: so the parameter is a whole dense tensor.
    """
    names = tracked.names()
    return {
        (number, names[id(parameter)].name): GradientSource(parameter, number, group_number)
        for number, optimizer in enumerate(tracked.optimizers)
        if isinstance(required_extractor(optimizer), OptimizerExtractor)
        for group_number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if names[id(parameter)].local is parameter and names[id(parameter)].box is None and is_dense(parameter)
    }


def _item(owner: int, key: tuple[int, str], source: GradientSource, optimizer: Any) -> RecordItem:
    parameter, updating = source.parameter, updater(optimizer)
    return RecordItem(
        owner, key[0], key[1], str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), parameter.nbytes,
        reads_parameter(type(updating).__name__, optimizer.param_groups[source.group]),
    )  # fmt: skip


# What an update of the state reads


def updater(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer that updates the state: the inner one of a ZeroRedundancyOptimizer."""
    extractor = required_extractor(optimizer)
    assert isinstance(extractor, OptimizerExtractor), "only these have sources"
    return extractor.owner(optimizer)


def reads_parameter(kind: str, group: Mapping[str, Any]) -> bool:
    """Returns whether an update of the state reads the parameter: weight decay joins the gradient.

    Args:
        kind: name of the class that updates the state.
        group: values of the parameter's group.
    """
    is_decoupled = kind == "AdamW" or bool(group.get("decoupled_weight_decay"))
    return bool(group.get("weight_decay")) and not is_decoupled


def group_values(optimizer: Any) -> tuple[dict[str, Scalar], ...]:
    """Returns the values of all groups, as the next step uses them.

    Values that the updating class does not know are left out: no update reads them.

    Raises:
        UnsupportedState: a value is not plain, for example a tensor.
    """
    keys = updater(optimizer).defaults.keys()
    return tuple({key: _plain(key, group[key]) for key in keys if key in group} for group in optimizer.param_groups)


def _plain(key: str, value: Any) -> Scalar:
    values = value if type(value) in (tuple, list) else (value,)
    if not all(each is None or type(each) in (bool, int, float, str) for each in values):
        raise UnsupportedState(
            f"the value {key} of the optimizer's group is a {type(value).__name__}.", f"pass {key} as a number"
        )
    return tuple(value) if type(value) in (tuple, list) else value
