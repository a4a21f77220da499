"""Parameters: what each one is in the whole job, found once for all extractors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from reft.client.state.extract.dtensor import Region

T = TypeVar("T")


class FlatSlice(NamedTuple):
    """A run of elements of a flat parameter, which lays those of several tensors end to end.

    Attributes:
        name: of the tensor that the run belongs to, the same on every rank that holds any of it.
        box: where the run lies in that tensor, flattened.
        at, size: its elements in the flat parameter; what lies in no run is padding, and is not held.
    """

    name: str
    box: Region
    at: int
    size: int


class NamedParameter(NamedTuple):
    """A parameter.

    Attributes:
        name: what it is in the whole job, e.g. "model.0.layers.1.weight"; the same on every rank that holds any of it.
        tensor: the object that modules and optimizers hold.
        local: plain memory that holds this rank's piece; the tensor itself, if that is plain and whole.
        box: where the piece lies in the whole; None: it is the whole.
        runs: of a flat parameter, what it consists of: leaves are its runs, and those of optimizer state of its shape.
    """

    name: str
    tensor: torch.Tensor
    local: torch.Tensor
    box: Region | None
    runs: tuple[FlatSlice, ...] = ()


class ParameterNames(dict[int, NamedParameter]):
    """Id of the parameter object → what it is. Good for as long as the bindings hold that were found with it."""

    def __init__(self) -> None:
        self._followed: dict[Hashable, Any] = {}

    def once(self, what: Hashable, find: Callable[[], T]) -> T:
        """What `find` finds, or has found for this before: for what can't change while the bindings hold."""
        if what not in self._followed:
            self._followed[what] = find()
        found: T = self._followed[what]
        return found
