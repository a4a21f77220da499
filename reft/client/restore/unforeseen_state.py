"""Optimizer state that attach could not foresee, in a job of another shape.

    held by the old job             wanted by a new rank that has the parameter
    as large as its parameter       the piece that the rank has of the parameter
    whole: a count, a statistic     the whole
tensor in a group, whole        the whole; every rank has the group
    anything else                   nothing; the restore refuses it by its name

Only the step of a foreign optimizer knows what state it makes. So the rule follows from the leaves
that the old job held, and from the parameters of the new job. It is the same on every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from reft.client.state.extract.state_forms import EntryWrapper, StateForm
from reft.core.layout.layout import Leaf
from reft.core.recovery.shard_matching import OPTIMIZER

GROUP_TENSOR = re.compile(r"optimizer\.\d+\.(\d+\.)?group\d+\.(?!param\d+)[^/]+", re.DOTALL)


def with_unforeseen_state(foreseen: Sequence[Sequence[Leaf]], held: Iterable[Leaf]) -> list[Sequence[Leaf]]:
    """Returns the leaves of each new rank, with held state that nobody foresaw.

    Args:
        foreseen: for each new rank the leaves that attach foresaw; one object for ranks that have
            the same.
        held: the pieces that the old job held.
    """
    known = {leaf.name for leaves in {id(each): each for each in foreseen}.values() for leaf in leaves}
    unforeseen = {leaf.name: leaf for leaf in held if leaf.name.startswith(OPTIMIZER) and leaf.name not in known}
    if not unforeseen:
        return list(foreseen)
    joined: dict[int, Sequence[Leaf]] = {}
    for leaves in foreseen:
        if id(leaves) not in joined:
            parameters = {leaf.name: leaf for leaf in leaves}
            added = (_wanted(unforeseen[name], parameters) for name in sorted(unforeseen))
            joined[id(leaves)] = (*leaves, *(leaf for leaf in added if leaf is not None))
    return [joined[id(leaves)] for leaves in foreseen]


def _wanted(leaf: Leaf, parameters: Mapping[str, Leaf]) -> Leaf | None:
    """Returns what a new rank wants of a held leaf; None if it wants nothing.

    Args:
        leaf: any piece of the held tensor.
        parameters: the rank's leaves, by name.
    """
    form = StateForm.of(leaf)
    if form.tag or not all(isinstance(each, EntryWrapper) for each in form.wrappers):
        return None  # the leaf's meaning depends on the pieces of the old job
    parameter = next((parameters[name] for name in _endings(form.name(leaf)) if name in parameters), None)
    if parameter is None:
        return leaf if GROUP_TENSOR.fullmatch(leaf.name) and leaf.shape == leaf.global_shape else None
    if leaf.global_shape == parameter.global_shape:
        item_bytes = leaf.nbytes // max(1, math.prod(leaf.shape))
        return replace(
            leaf,
            shape=parameter.shape,
            stride=parameter.stride,
            nbytes=item_bytes * math.prod(parameter.shape),
            global_offset=parameter.global_offset,
        )
    return leaf if leaf.shape == leaf.global_shape else None


def _endings(name: str) -> Iterator[str]:
    """Yields what follows each dot of a name, the longest first."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
