"""What training has changed of the objects since the script built them.

A script freezes a backbone, and later unfreezes it and passes it to the optimizer as a new group of
parameters (gradual unfreezing, Lightning's BackboneFinetuning). A restarted script builds the
objects as at its start. So a restore first makes them like those of the snapshot, and only then the
layout is judged:

    frozen parameters   the snapshot says which parameters get gradients
    added groups        by the names of their parameters, in the snapshot's order
    tensors in groups   a learning rate that is a number in the snapshot becomes that number

What names of parameters can't bring back is not tried: groups of parameters that the model does not
have, other parameters in the groups that the script built, pruned or grown models, parameters of
another shape or dtype. `changed_beyond_repair` finds that when it happens. Buffers may change if no
state dict has them: a restore makes these (`ModuleExtractor.make`), but not those that a state dict
has, since there another shape means another model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from reft.client.state.extract.modules import ModuleExtractor
from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.inner_tensors import PLAIN_TYPES
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.serialization import from_plain
from reft.client.state.tensors import leaf_of, without_wrappers
from reft.client.state.tracked_objects import TrackedObjects
from reft.client.torch_internals import buffers_of, is_persistent
from reft.core.layout.layout import Leaf
from reft.core.text import counted

REQUIRES_GRAD = attrgetter("requires_grad")
# State of an optimizer, or a tensor in its groups; anything else is a parameter or a buffer.
OF_OPTIMIZER = re.compile(r"optimizer\.\d+\.(?!group\d+\.param\d+)")
NAMES_SHOWN = 3
Groups = Sequence[Mapping[str, Any]]


class BufferFacts(NamedTuple):
    """A buffer of a module.

    Attributes:
        form: its dtype, shape and order in memory, as text; empty if it is None.
        owner: the module, with the prefix.
        is_plain: whether a restore can make it, by its name and as a plain tensor.
        is_temporary: whether the module's state dict leaves it out.
    """

    form: str
    owner: str
    is_plain: bool
    is_temporary: bool


class StructureFacts(NamedTuple):
    """The parameters and buffers of the objects, and where they are.

    Attributes:
        parameters: dtype and shape of all parameters, as text, by name.
        groups: for each optimizer the names of the parameters in each of its groups, by prefix.
        buffers: all buffers, by name, also those that are None.
        modules: names of all modules, with their prefix.
    """

    parameters: Mapping[str, str]
    groups: Mapping[str, Sequence[Sequence[str]]]
    buffers: Mapping[str, BufferFacts] = MappingProxyType({})
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tracked: TrackedObjects, leaves: Iterable[Leaf], names: ParameterNames) -> StructureFacts:
        """Returns what is true now, by the leaves and names of a current tensor index."""
        groups = {
            prefix: _names_in(value, names)
            for prefix, value, extractor in tracked.items()
            if isinstance(extractor, OptimizerExtractor) and isinstance(value, torch.optim.Optimizer)
        }
        parts = [
            (".".join(filter(None, (prefix, without_wrappers(path)))), part)
            for prefix, value, extractor in tracked.items()
            if isinstance(extractor, ModuleExtractor) and isinstance(value, nn.Module)
            for path, part in value.named_modules()
        ]
        buffers = {
            tracked.identity(f"{owner}.{key}"): _buffer_facts(tracked, owner, part, key, tensor)
            for owner, part in parts
            for key, tensor in buffers_of(part).items()
        }
        return cls(parameter_forms(leaves), groups, buffers, frozenset(owner for owner, _ in parts))

    def first_groups(self, tracked: TrackedObjects, counts: Sequence[int]) -> StructureFacts:
        """Returns the same with only those groups that the script itself made."""
        prefixes = [prefix for prefix, _, _ in tracked.items()[len(tracked.modules) :]]
        count_of = dict(zip(prefixes, counts, strict=True))
        return self._replace(groups={prefix: each[: count_of[prefix]] for prefix, each in self.groups.items()})


def trainable(names: ParameterNames) -> bytes:
    """Returns which parameters get gradients: a bit for each, in the order of `names`."""
    tensors = names.once("tensors", lambda: [named.tensor for named in names.values()])
    return np.packbits(np.frombuffer(bytes(map(REQUIRES_GRAD, tensors)), bool)).tobytes()


def group_counts(tracked: TrackedObjects) -> Sequence[int]:
    """Returns how many groups each optimizer has."""
    return [len(getattr(each, "param_groups", ())) for each in tracked.optimizers]


def rebuild(tracked: TrackedObjects, counts: Sequence[int], tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Makes frozen parameters and groups like those of a snapshot, as far as names tell.

    Args:
        tracked: the objects.
        counts: the groups that the script itself made, as `group_counts` returned them.
        tree: the host state of the snapshot; empty if it can't be read.

    Returns:
        What is different now, as texts for the user.
    """
    names = tracked.names()
    thawed = _thaw([*names.values()], tree.get("trainable", b""))
    changes = [f"{counted(thawed, 'parameter')} frozen or unfrozen"] if thawed else []
    optimizers = tracked.items()[len(tracked.modules) :]
    for (prefix, value, extractor), count in zip(optimizers, counts, strict=True):
        if not isinstance(extractor, OptimizerExtractor) or extractor.owner(value) is not value:
            continue
        if earlier := value.param_groups[count:]:
            del value.param_groups[count:]  # an earlier try made them, for another version
            changes.append(f"{counted(len(earlier), 'group')} taken from {prefix}")
            names = tracked.names()
        saved_groups = tree.get("subjects", {}).get(prefix, {}).get("groups", ())
        if replaced := _replace_tensors(value.param_groups, saved_groups):
            changes.append(f"{counted(replaced, 'tensor')} in groups of {prefix} replaced")
        live = _names_in(value, names)
        by_name = {named.name: named.tensor for named in names.values() if not named.name.startswith("optimizer.")}
        missing = missing_groups(live, saved_groups, by_name)
        for group in missing:
            parameters = [by_name[name] for name in group["params"]]
            value.add_param_group({"params": parameters, **from_plain(group["values"])})
        if missing:
            changes.append(f"{counted(len(missing), 'group')} added to {prefix}")
            names = tracked.names()
    return tuple(changes)


def _replace_tensors(groups: Iterable[dict[str, Any]], saved: Groups) -> int:
    """Replaces tensors in groups of which training made numbers, such as learning rates.

    Returns how many these are.
    """
    replaced = 0
    for group, saved_group in zip(groups, saved, strict=False):
        values = saved_group.get("values", {})
        for key in [key for key, each in group.items() if isinstance(each, torch.Tensor) and key in values]:
            group[key] = from_plain(values[key])
            replaced += 1
    return replaced


def missing_groups(live: Sequence[Sequence[str]], saved: Groups, known: Collection[str]) -> Groups:
    """Returns the saved groups that an optimizer lacks; none if these can't be added.

    Args:
        live: for each group of the optimizer the names of its parameters.
        saved: the groups of the snapshot.
        known: names of the parameters that the models have.
    """
    if [group.get("params") for group in saved[: len(live)]] != [*map(list, live)]:
        return ()
    taken = {name for group in live for name in group}
    added = [name for group in saved[len(live) :] for name in group["params"]]
    return saved[len(live) :] if all(name in known and name not in taken for name in added) else ()


def _names_in(optimizer: torch.optim.Optimizer, names: ParameterNames) -> list[list[str]]:
    """Returns for each group of an optimizer the names of its parameters."""
    return [[names[id(parameter)].name for parameter in group["params"]] for group in optimizer.param_groups]


def _thaw(parameters: Sequence[NamedParameter], saved: bytes) -> int:
    """Gives each parameter the saved bit; returns how many differed."""
    bits = np.unpackbits(np.frombuffer(saved, np.uint8)).astype(bool)
    if len(bits) - len(parameters) not in range(8):
        return 0  # another model: the comparison of the leaves says so
    differing = [each.tensor for each, bit in zip(parameters, bits, strict=False) if each.tensor.requires_grad != bit]
    for tensor in differing:
        tensor.requires_grad_(not tensor.requires_grad)
    return len(differing)


def changed_beyond_repair(built: StructureFacts, now: StructureFacts) -> str:
    """Returns why a restarted script can't bring back the objects; empty if it can.

    Args:
        built: what the script had built when it called attach.
        now: what is true now.
    """
    joined, left, changed = _compared(built.parameters, now.parameters)
    parts = _lines(
        "parameter", (("joined", joined), ("left", left), ("got another shape, dtype or order in memory", changed))
    )
    buffers = _lines("buffer", _lasting(built, now))
    parts += [
        f"the groups of {prefix} got other parameters during this run, or another order"
        for prefix, groups in now.groups.items()
        if not joined and not _can_repeat(built.groups.get(prefix, ()), groups)
    ]
    parts += buffers
    if not parts:
        return ""
    return (
        f"{', and '.join(parts)}. A restarted script builds the model as at the start, so later steps could not be restored. "
        "Make this change before reft.attach"
        + (
            ", or register the buffer with persistent=False: such ones may join, and change their shape."
            if buffers
            else "."
        )
    )


def _lines(kind: str, changes: Iterable[tuple[str, Collection[str]]]) -> list[str]:
    """Returns a text for each kind of change that some tensors have seen."""
    return [
        f"{counted(len(names), kind)} {what} during this run, e.g. {', '.join(sorted(names)[:NAMES_SHOWN])}"
        for what, names in changes
        if names
    ]


def _compared(built: Mapping[str, str], now: Mapping[str, str]) -> tuple[set[str], set[str], set[str]]:
    """Returns the names that joined, those that left, and those whose form is another."""
    changed = {name for name, form in now.items() if built.get(name, form) != form}
    return {*now} - {*built}, {*built} - {*now}, changed


def _lasting(built: StructureFacts, now: StructureFacts) -> list[tuple[str, set[str]]]:
    """Returns what happened to buffers that a restore does not make as they are now.

    A buffer that was None joins if it has a value. `ModuleExtractor.make` gives it that value.
    """
    before, after = ({name: each.form for name, each in facts.buffers.items() if each.form} for facts in (built, now))
    joined, left, changed = _compared(before, after)
    made = {name for name, each in now.buffers.items() if each.is_plain and each.is_temporary}
    filled = {name for name in built.buffers if name in after and now.buffers[name].is_plain}
    known = {name for name in made if now.buffers[name].owner in built.modules}
    return [
        ("joined", joined - known - filled),
        ("left", left),
        ("got another shape, dtype or order in memory", changed - made),
    ]


def _buffer_facts(tracked: TrackedObjects, owner: str, part: nn.Module, key: str, tensor: Any) -> BufferFacts:
    name = f"{owner}.{key}"
    form = "" if tensor is None else leaf_of(name, tensor, True).describe()
    is_plain = type(tensor) in PLAIN_TYPES and tracked.identity(name) == name
    return BufferFacts(form, owner, is_plain, not is_persistent(part, key))


def _can_repeat(built: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> bool:
    """Returns whether `rebuild` makes these groups from those that the script builds."""
    if len(now) <= len(built):
        return [*now] == [*built]
    known = {name for group in now for name in group if not name.startswith("optimizer.")}
    return bool(missing_groups(built, [{"params": group} for group in now], known))


def parameter_forms(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Returns dtype and shape of the parameters among the leaves, as text, by name."""
    return {leaf.name: leaf.describe() for leaf in leaves if not leaf.staged and not OF_OPTIMIZER.match(leaf.name)}
