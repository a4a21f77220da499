"""What training has changed of the objects since the script built them.

A script freezes a backbone, and later unfreezes it and passes it to the optimizer as a new group of
parameters (gradual unfreezing, Lightning's BackboneFinetuning). A restarted script builds the
objects as at its start. So a restore first makes them like those of the snapshot, and only then the
layout is judged:

    frozen parameters   the snapshot says which parameters get gradients
    added groups        by the names of their parameters, in the snapshot's order

What names of parameters can't bring back is not tried: groups of parameters that the model does not
have, pruned or grown models. `changed_beyond_repair` finds that when it happens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.serialization import from_plain
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout.layout import Leaf
from reft.core.text import counted

REQUIRES_GRAD = attrgetter("requires_grad")
# State of an optimizer, or a tensor in its groups; anything else is a parameter or a buffer.
OF_OPTIMIZER = re.compile(r"optimizer\.\d+\.(?!group\d+\.param\d+)")
NAMES_SHOWN = 3
Groups = Sequence[Mapping[str, Any]]


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
        live = [[names[id(parameter)].name for parameter in group["params"]] for group in value.param_groups]
        by_name = {named.name: named.tensor for named in names.values() if not named.name.startswith("optimizer.")}
        missing = missing_groups(live, tree.get("subjects", {}).get(prefix, {}).get("groups", ()), by_name)
        for group in missing:
            parameters = [by_name[name] for name in group["params"]]
            value.add_param_group({"params": parameters, **from_plain(group["values"])})
        if missing:
            changes.append(f"{counted(len(missing), 'group')} added to {prefix}")
            names = tracked.names()
    return tuple(changes)


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


def _thaw(parameters: Sequence[NamedParameter], saved: bytes) -> int:
    """Gives each parameter the saved bit; returns how many differed."""
    bits = np.unpackbits(np.frombuffer(saved, np.uint8)).astype(bool)
    if len(bits) - len(parameters) not in range(8):
        return 0  # another model: the comparison of the leaves says so
    differing = [each.tensor for each, bit in zip(parameters, bits, strict=False) if each.tensor.requires_grad != bit]
    for tensor in differing:
        tensor.requires_grad_(not tensor.requires_grad)
    return len(differing)


def changed_beyond_repair(built: Collection[str], now: Collection[str]) -> str:
    """Returns why a restarted script can't bring back the objects; empty if it can.

    Args:
        built: names of all parameters when the script called attach.
        now: names of all parameters.
    """
    parts = [
        f"{counted(len(names), 'parameter')} {what} during this run, e.g. {', '.join(sorted(names)[:NAMES_SHOWN])}"
        for names, what in ((set(now) - set(built), "joined"), (set(built) - set(now), "left"))
        if names
    ]
    if not parts:
        return ""
    return (
        f"{', and '.join(parts)}. A restarted script builds the model as at the start, so later steps could not be restored. "
        "Make this change before reft.attach."
    )


def parameter_names(leaves: Iterable[Leaf]) -> frozenset[str]:
    """Returns the names of the parameters among the leaves."""
    return frozenset(leaf.name for leaf in leaves if not leaf.staged and not OF_OPTIMIZER.match(leaf.name))
