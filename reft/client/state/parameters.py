"""The name and place of each parameter in the whole job, for all extractors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from reft.client.state.extract.dtensor import Region

T = TypeVar("T")


class FlatSlice(NamedTuple):
    """The elements of one tensor inside a flat parameter.

    A flat parameter holds several tensors end to end.

    Attributes:
        name: the tensor's name; the same on every rank that has elements of this tensor.
        box: the region of the flattened tensor that this slice covers.
        at, size: position and number of elements in the flat parameter. Elements in no slice are
            padding and are not saved.
    """

    name: str
    box: Region
    at: int
    size: int


class NamedParameter(NamedTuple):
    """One parameter with its name and place in the whole job.

    Attributes:
        name: e.g. "model.0.layers.1.weight"; the same on every rank that has elements of this
            parameter.
        tensor: the object that modules and optimizers refer to.
        local: plain memory with this rank's piece; the tensor itself, if that is plain and whole.
        box: the region of the whole tensor that the piece covers; None: the piece is the whole
            tensor.
        runs: the slices of a flat parameter. The leaves are then these slices, also of optimizer
            state with the flat parameter's shape.
        shape: shape of the whole tensor, if `box` is a region of the flattened tensor.
    """

    name: str
    tensor: torch.Tensor
    local: torch.Tensor
    box: Region | None
    runs: tuple[FlatSlice, ...] = ()
    shape: tuple[int, ...] | None = None


class ParameterNames(dict[int, NamedParameter]):
    """Id of a parameter object → its name and place.

    Valid while the tensor index is current that was built with these names.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Returns the result of `find`, which runs only once for each key.

        Only for results that cannot change while the tensor index is current.
        """
        if key not in self._results:
            self._results[key] = find()
        result: T = self._results[key]
        return result
