"""Whether a trainer has what its adapter reads, and what adapters tell the person who started the job."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from reft.errors import ConfigError, UnsupportedState
from reft.wire.process import mark_of


@dataclass(frozen=True)
class Tested:
    """A trainer's package, and the version with which its adapter was run.

    Attributes:
        package: its name on the package index.
        version: what `make test-trainers` installs.
    """

    package: str
    version: str

    def need(self, owner: object, *names: str) -> None:
        """Raises UnsupportedState unless `owner` has all attributes; a dotted name goes on from each one found."""
        for name in names:
            found = owner
            for part in name.split("."):
                if not hasattr(found, part):
                    raise self._mismatched(f"{type(found).__name__} has no {part!r}")
                found = getattr(found, part)

    def need_parameters(self, function: Callable[..., Any], names: Iterable[str]) -> None:
        """Raises UnsupportedState unless `function` takes parameters of all these names."""
        missing = set(names) - set(inspect.signature(function).parameters)
        if missing:
            raise self._mismatched(f"{function.__qualname__} does not take {sorted(missing)[0]!r}")

    def _mismatched(self, what: str) -> UnsupportedState:
        try:
            installed = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            installed = "of an unknown version"
        return UnsupportedState(
            f"{what} in {self.package} {installed}; this adapter was tested with {self.version}.",
            f"pip install {self.package}=={self.version}",
        )


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that holds the state: Accelerate's wrapper has none, and calls it only when a step is due."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(optimizer).__mro__}
    return optimizer.optimizer if "accelerate.optimizer.AcceleratedOptimizer" in kinds else optimizer


def this_process() -> str:
    """What tells this process from every other one."""
    return mark_of(os.getpid())


def refuse_own(process: str) -> None:
    """A restart comes in another process: what this one has left is of another training, such as the fold before.

    Args:
        process: that wrote the state, as `this_process` called it.

    Raises:
        ConfigError: it is this one.
    """
    if process == this_process():
        raise ConfigError(
            "this process has trained under this job's name before: its state would take the place of the new model's.",
            "a name for each training: ReftCallback(job=...)",
        )
