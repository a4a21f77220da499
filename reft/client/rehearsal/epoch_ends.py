"""Sees at each mark whether an epoch has ended since the mark before.

reft's loader in state=     its epoch is another one
else, found at mark 1:
    DataLoader's iterator   gave batches from mark to mark, and now is gone, or begins again
    DistributedSampler      its epoch is another one

A pass over validation data begins and ends between two marks, so it is no epoch.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from torch.utils.data import DistributedSampler

from reft.client.data.loader import ResumableLoader
from reft.client.torch_internals import batches_given

LOADER: Final = "torch.utils.data.dataloader"  # defines the iterators, and bases of torchdata's


class PassState(NamedTuple):
    """One pass over a DataLoader.

    Attributes:
        iterator: of the loader.
        given: how many batches the iterator had given at the last mark.
        trains: whether the iterator has given batches on both sides of a mark.
    """

    iterator: weakref.ref[Any]
    given: int
    trains: bool


class EpochProgress:
    """Looks at loaders and samplers at each mark; see the module.

    Args:
        loaders: reft's loaders in state=.
    """

    def __init__(self, loaders: Sequence[ResumableLoader]) -> None:
        self._loaders = loaders
        self._epochs: list[int] = []
        self._passes: list[PassState] = []
        self._samplers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._marks = 0

    def start(self) -> None:
        """Begins, when the loaders have their restored epochs."""
        self._epochs = [each.epoch for each in self._loaders]

    def at_mark(self) -> list[str] | None:
        """Returns how an epoch has ended; None if no loader is known that trains."""
        self._marks += 1
        if self._loaders:
            before, self._epochs = self._epochs, [each.epoch for each in self._loaders]
            pairs = zip(before, self._epochs, strict=True)
            return [f"epoch {old} of a ResumableLoader" for old, new in pairs if new != old]
        if self._marks == 1:
            self._find()
            return None
        ends = [*self._ended_passes(), *self._moved_samplers()]
        return ends if ends or any(each.trains for each in self._passes) else None

    def _find(self) -> None:
        """Finds the loaders' iterators and the samplers of this process."""
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if is_iterator(kind) or issubclass(kind, DistributedSampler)}
        for each in (each for each in objects if type(each) in kinds):
            if isinstance(each, DistributedSampler):
                self._samplers[each] = each.epoch
            elif (given := batches_given(each)) is not None:
                self._passes.append(PassState(weakref.ref(each), given, trains=False))

    def _ended_passes(self) -> list[str]:
        ends: list[str] = []
        passes, self._passes = self._passes, []
        for each in passes:
            given = batches_given(each.iterator())  # None: the iterator is gone
            if given is not None and given >= each.given:
                self._passes.append(PassState(each.iterator, given, each.trains or given > each.given))
            elif each.trains:
                ends.append("a pass over a DataLoader")
        return ends

    def _moved_samplers(self) -> list[str]:
        before, now = dict(self._samplers), {each: each.epoch for each in self._samplers}
        self._samplers.update(now)
        return ["set_epoch of a DistributedSampler" for each, epoch in now.items() if epoch != before[each]]


def is_iterator(kind: type) -> bool:
    """Returns whether a class is that of a DataLoader's iterators."""
    return any(base.__module__ == LOADER and "__next__" in vars(base) for base in kind.__mro__)
