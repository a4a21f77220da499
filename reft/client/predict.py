"""Predicts what an optimizer's state will be before its first step, so that slots are ready when that step ends.

A copy of the optimizer takes one step on `meta` copies of its parameters: shapes and dtypes, no memory, no arithmetic.
An optimizer that reads a value fails there, mostly after it has made its state, which is all that is wanted. If it made
none, or made another than it will, nothing is lost but time: slots of the right size are made after the first step.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

import torch

from reft.client.state import Bindings, Subjects, leaf_of
from reft.core.layout import Leaf

KERNEL_CHOICES = ("foreach", "fused", "capturable")  # they change how, not what; some refuse `meta`


def predicted_leaves(subjects: Subjects, bindings: Bindings) -> list[Leaf]:
    """All leaves as they will be after the first step, as far as that can be told.

    Args:
        subjects: models and optimizers.
        bindings: what they hold now.
    """
    leaves = [leaf_of(name, tensor, name in bindings.staged) for name, tensor in bindings.tensors.items()]
    names = {id(parameter): name for name, parameter in subjects.parameter_names()}
    for i, optimizer in enumerate(subjects.optimizers):
        leaves += _predict(f"optimizer.{i}", optimizer, names)
    return leaves


def _predict(prefix: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[Leaf]:
    twins: dict[torch.Tensor, str] = {}
    groups = []
    for group in optimizer.param_groups:
        parameters = []
        for parameter in group["params"]:
            twin = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            twin.requires_grad_(parameter.requires_grad)
            if parameter.requires_grad and not optimizer.state.get(parameter):
                twin.grad = torch.empty_like(twin)
                twins[twin] = names[id(parameter)]
            parameters.append(twin)
        plain = {key: copy.copy(value) for key, value in group.items() if key != "params"}
        groups.append({**plain, **{key: False for key in KERNEL_CHOICES if key in group}, "params": parameters})
    if not twins:
        return []
    double = object.__new__(type(optimizer))
    vars(double).update(
        {key: copy.copy(value) if isinstance(value, (dict, list)) else value for key, value in vars(optimizer).items()}
    )
    vars(double).pop("step", None)  # a scheduler's wrapper would count this as a step
    for key in [key for key in vars(double) if key.endswith("_hooks")]:
        vars(double)[key] = OrderedDict()
    double.state, double.param_groups = defaultdict(dict), groups
    generator = torch.get_rng_state()
    # Whatever a foreign optimizer raises here, its first real step will tell.
    with torch.no_grad(), contextlib.suppress(Exception):
        inspect.unwrap(type(optimizer).step)(double)
    torch.set_rng_state(generator)
    return [
        leaf_of(f"{prefix}.{key}.{name}", value, staged=False)
        for twin, name in twins.items()
        for key, value in double.state.get(twin, {}).items()
        if isinstance(value, torch.Tensor)
    ]
