"""The restored states of the default generators, put back before the next step draws.

    attach      restores the generators, and tells the objects in state= that ask for them
    then        the script may draw: `iter(loader)` draws a seed
    put_back    restores them once more, before anything of the next step is drawn

`put_back` is called by whatever comes first: the first `next()` of `session.steps`, or the first
`next()` on an epoch of reft's loader. A loop with neither keeps what it has drawn since attach.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from reft.client.state import random_state


class RestoredGenerators:
    """Puts the generators of the restored mark back, once.

    Args:
        saved: the states, as a capsule holds them.

    Attributes:
        is_handed_out: an object in `state=`, such as reft's loader, has these generators.
        at_epoch_end: what follows the last batch of an epoch runs first, and may draw. A run
            without a restart drew there, too.
    """

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._saved: Mapping[str, Any] | None = saved
        self.is_handed_out = False
        self.at_epoch_end = False

    def end_of_epoch(self) -> None:
        """Notes that the restored position is the end of an epoch."""
        self.at_epoch_end = True

    def put_back(self) -> None:
        """Restores the states at the first call; later calls do nothing."""
        saved, self._saved = self._saved, None
        if saved is not None:
            random_state.restore(saved)


def restore_generators(saved: Mapping[str, Any], when: str, values: Iterable[Any]) -> RestoredGenerators | None:
    """Restores the generators at attach, as REFT_GENERATORS says.

    Args:
        saved: the states, as a capsule holds them.
        when: "auto", "attach" or "user".
        values: the objects in `state=`.

    Returns:
        What puts them back once more; None if nothing shall.
    """
    if when == "user":
        return None
    random_state.restore(saved)
    if when == "attach":
        return None
    generators = RestoredGenerators(saved)
    hand_out(generators, values)
    return generators


def hand_out(generators: RestoredGenerators, values: Iterable[Any]) -> None:
    """Calls `restored(generators)` of each object whose class has such a method.

    A method of this name with other parameters is not reft's, and is left alone.
    """
    for value in values:
        method = getattr(type(value), "restored", None)
        if inspect.isfunction(method) and list(inspect.signature(method).parameters)[1:] == ["generators"]:
            generators.is_handed_out = True
            value.restored(generators)
