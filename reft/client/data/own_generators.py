"""Random generators that objects keep for themselves, such as a sampler or a transform."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

LEVELS = 4  # attributes and items on the way to a generator
ITEMS = 32  # of one list, tuple or dict
OBJECTS = 1000

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def find(root: Any, name: str, without: Collection[Any] = ()) -> dict[str, Any]:
    """Returns path → generator, for all that the object's attributes and items lead to.

    No property is read and nothing is called. The default generators do not count.

    Args:
        root: where the search begins.
        name: the name of `root`, which each path begins with.
        without: objects that are not searched.
    """
    seen = {id(each) for each in (*without, *_defaults())}
    found: dict[str, Any] = {}
    level = [(name, root)]
    for _ in range(LEVELS + 1):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in seen or len(seen) > OBJECTS:
                continue
            seen.add(id(value))
            if isinstance(value, KINDS):
                found[path] = value
            else:
                below += _parts(path, value)
        level = below
    return found


def _defaults() -> Iterator[Any]:
    """Yields the default generators as objects, which user code can hold, too."""
    yield torch.default_generator
    yield getattr(np.random.get_state, "__self__", None)
    yield getattr(random.getstate, "__self__", None)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the items of a container, or the attributes of another object."""
    if isinstance(value, (list, tuple)):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value[:ITEMS]))
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", value[key]) for key in list(value)[:ITEMS])
    elif not isinstance(value, (type, torch.Tensor)):
        yield from ((f"{path}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())


def take(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of all generators, as values that a capsule can hold."""
    return {path: _state_of(generator) for path, generator in generators.items()}


def put(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Sets the states that `take` returned."""
    for path, generator in generators.items():
        _set_state(generator, states[path])


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return list(generator.get_state())
    kind, keys, gauss = generator.getstate()
    return [kind, np.array(keys, np.uint32), gauss]


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(tuple(state))
    else:
        kind, keys, gauss = state
        generator.setstate((kind, tuple(keys.tolist()), gauss))
