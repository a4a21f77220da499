"""Checks that a trainer has the parts that its adapter reads.

It also checks that no job restores itself.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from reft.errors import ConfigError, UnsupportedState
from reft.wire.process import mark_of

PERSISTENT_WORKERS = (
    "random draws in workers of the data loader: with persistent_workers=True they go on from epoch to epoch, and a "
    "restarted worker draws other numbers. Without it, each epoch's workers get their seed from the held generators."
)


@dataclass(frozen=True)
class Tested:
    """A trainer's package, and the version that was tested with the adapter.

    Attributes:
        package: its name on the package index.
        version: the version that `make test-trainers` installs.
        also: another version that was tested; empty if there is none.
    """

    package: str
    version: str
    also: str = ""

    def need_release(self, release: str) -> None:
        """Checks that the installed package is of this release, such as "4.57".

        Raises:
            UnsupportedState: it is of another one.
        """
        if not f"{self._installed()}.".startswith(f"{release}."):
            raise self._unsupported("the loop of training differs")

    def need(self, owner: object, *names: str) -> None:
        """Checks that `owner` has these attributes; a dotted name is a path of attributes.

        Raises:
            UnsupportedState: an attribute is missing.
        """
        for name in names:
            value = owner
            for part in name.split("."):
                if not hasattr(value, part):
                    raise self._unsupported(f"{type(value).__name__} has no {part!r}")
                value = getattr(value, part)

    def need_parameters(self, function: Callable[..., Any], names: Iterable[str]) -> None:
        """Checks that `function` has parameters with these names.

        Raises:
            UnsupportedState: a parameter is missing.
        """
        missing = set(names) - set(inspect.signature(function).parameters)
        if missing:
            raise self._unsupported(f"{function.__qualname__} does not take {sorted(missing)[0]!r}")

    def need_locals(self, function: Callable[..., Any], names: Iterable[str]) -> None:
        """Checks that `function` has local variables with these names.

        Raises:
            UnsupportedState: one is missing.
        """
        missing = set(names) - set(function.__code__.co_varnames)
        if missing:
            raise self._unsupported(f"{function.__qualname__} has no variable {sorted(missing)[0]!r}")

    def _installed(self) -> str:
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "of an unknown version"

    def _unsupported(self, problem: str) -> UnsupportedState:
        tested = f"{self.version} and {self.also}" if self.also else self.version
        return UnsupportedState(
            f"{problem} in {self.package} {self._installed()}; this adapter was tested with {tested}.",
            f"pip install {self.package}=={self.version}",
        )


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that holds the state.

    Accelerate's wrapper holds none, and calls the inner optimizer only when a step is due.
    """
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(optimizer).__mro__}
    return optimizer.optimizer if "accelerate.optimizer.AcceleratedOptimizer" in kinds else optimizer


def has_persistent_workers(loaders: Iterable[Any]) -> bool:
    """Returns whether a data loader keeps its workers from epoch to epoch."""
    return any(getattr(each, "num_workers", 0) and getattr(each, "persistent_workers", False) for each in loaders)


def this_process() -> str:
    """Returns a mark that identifies this process."""
    return mark_of(os.getpid())


def refuse_own(process: str) -> None:
    """Refuses to restore state that this same process has written.

    A restart runs in another process. So the state belongs to another training of this process,
    such as the previous cross-validation fold.

    Args:
        process: the process that wrote the state, as `this_process` names it.

    Raises:
        ConfigError: it is this process.
    """
    if process == this_process():
        raise ConfigError(
            "this process has trained under this job's name before: that state would replace the new model's state.",
            "give each training its own name: ReftCallback(job=...)",
        )
