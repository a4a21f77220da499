"""Foresees the state of torch's own optimizers, which their first step creates.

    torch's own step   a copy of the optimizer steps `meta` copies of its parameters: shapes,
                       dtypes and placements, but no memory, arithmetic or communication
    LBFGS              needs a closure, and its lists grow: the whole history is foreseen
    any other step     nothing is foreseen: it may hand a pointer to a kernel, and the pointer of a
                       `meta` tensor is null

A step that reads a value fails on `meta`, mostly after it created its state, which suffices. If a
leaf is not foreseen, only time is lost: the leaf joins at the next review of the placement.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from reft.client.state.extract.dtensor import like
from reft.client.state.inner_tensors import has_inner_tensors
from reft.client.state.parameters import NamedParameter

# Options that select a kernel, not a result. Some refuse `meta`.
KERNEL_CHOICES = ("foreach", "fused", "capturable")


class ForeseenState(NamedTuple):
    """What `state[parameter]` will be after the first step, with tensors on `meta`."""

    parameter: NamedParameter
    values: Mapping[str, Any]


def can_foresee(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's step is one of torch's own."""
    return inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")


def foreseen_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Sequence[NamedParameter]]
) -> list[ForeseenState]:
    """Returns the state that the first step will create, in the order of the parameters.

    Args:
        optimizer: the optimizer that has the state.
        parameters: of each group, those that get a gradient.
    """
    if not can_foresee(optimizer):
        return []
    if isinstance(optimizer, torch.optim.LBFGS):
        return _history(optimizer, [named for group in parameters for named in group])
    # One twin for all parameters of a kind, because they get state of the same kind.
    twins: dict[int, torch.Tensor] = {}
    groups = []
    for group, of_group in zip(optimizer.param_groups, parameters, strict=True):
        twin_of_kind: dict[tuple[object, ...], torch.Tensor] = {}
        for named in of_group:
            # A class of tensors decides itself what its state is made of.
            if not optimizer.state.get(named.tensor) and not has_inner_tensors(named.local):
                kind = _kind(named)
                if kind not in twin_of_kind:
                    twin_of_kind[kind] = _twin(named, isinstance(optimizer, torch.optim.SparseAdam))
                twins[id(named.tensor)] = twin_of_kind[kind]
        plain = {key: copy.copy(each) for key, each in group.items() if key != "params"}
        choices = {key: False for key in KERNEL_CHOICES if key in group}
        groups.append({**plain, **choices, "params": list(twin_of_kind.values())})
    made = _state_after_step(optimizer, groups) if twins else {}
    foreseen = [named for of_group in parameters for named in of_group if id(named.tensor) in twins]
    return [ForeseenState(named, made.get(twins[id(named.tensor)], {})) for named in foreseen]


def _kind(named: NamedParameter) -> tuple[object, ...]:
    """Returns the properties that decide the kind of a parameter's state; not its region."""
    tensor, local = named.tensor, named.local
    placed = (tensor.device_mesh, tensor.placements, tensor.shape) if isinstance(tensor, DTensor) else ()
    return local.shape, local.stride(), local.dtype, placed


def _twin(named: NamedParameter, is_sparse: bool) -> torch.Tensor:
    """Returns the parameter on `meta`, with a gradient. SparseAdam refuses dense ones."""
    local = named.local
    with torch.no_grad():
        meta = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        twin = like(named.tensor, meta).requires_grad_()
    twin.grad = (
        torch.sparse_coo_tensor(size=twin.shape, dtype=twin.dtype, device="meta", check_invariants=False)
        if is_sparse
        else torch.empty_like(twin)
    )
    return twin


def _state_after_step(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> Mapping[torch.Tensor, dict[str, Any]]:
    """Returns the state of a copy of the optimizer after one step on these groups."""
    double = object.__new__(type(optimizer))
    vars(double).update(
        {key: copy.copy(value) if isinstance(value, (dict, list)) else value for key, value in vars(optimizer).items()}
    )
    vars(double).pop("step", None)  # a scheduler's wrapper would count this step
    for key in [key for key in vars(double) if key.endswith("_hooks")]:
        vars(double)[key] = OrderedDict()
    double.state, double.param_groups = defaultdict(dict), groups
    generator = torch.get_rng_state()
    # Any error of an optimizer will show up in its first real step.
    with torch.no_grad(), contextlib.suppress(Exception):
        inspect.unwrap(type(optimizer).step)(double)
    torch.set_rng_state(generator)
    return double.state


def _history(optimizer: torch.optim.LBFGS, parameters: Sequence[NamedParameter]) -> list[ForeseenState]:
    """Returns the state of LBFGS with a full history; without the tensors that exist already.

    All state lies under the first parameter. The lists grow up to `history_size`; entries that do
    not exist yet are zeros in a snapshot, so no step needs another layout.
    """
    group = optimizer.param_groups[0]
    dtypes = {named.local.dtype for named in parameters}
    is_plain = all(named.local is named.tensor and named.box is None for named in parameters)
    if not is_plain or len(dtypes) != 1 or len(parameters) != len(group["params"]):
        return []
    dtype = dtypes.pop()
    count = sum(math.prod(named.local.shape) for named in parameters) * (2 if dtype.is_complex else 1)
    flat, number = (torch.empty(shape, dtype=dtype.to_real(), device="meta") for shape in ((count,), ()))
    vectors, numbers = [flat] * group["history_size"], [number] * group["history_size"]
    full = {
        "d": flat,
        "prev_flat_grad": flat,
        "H_diag": number,
        "old_dirs": vectors,
        "old_stps": vectors,
        "ro": numbers,
    }
    full["al"] = numbers
    existing = optimizer.state.get(parameters[0].tensor, {})
    return [ForeseenState(parameters[0], {key: _without(value, existing.get(key)) for key, value in full.items()})]


def _without(foreseen: Any, existing: Any) -> Any:
    """Returns the tensors that do not exist; None stands for each that does."""
    if isinstance(foreseen, list):
        entries = existing if isinstance(existing, list) else []
        exist = [*entries, *[None] * (len(foreseen) - len(entries))]
        return [_without(each, one) for each, one in zip(foreseen, exist, strict=False)]
    return None if isinstance(existing, torch.Tensor) else foreseen
