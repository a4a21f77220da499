"""Private names of other packages: a record of each, and whether an object has the name.

The tables are in `client/torch_internals.py` and `elastic/torch_internals.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateName:
    """One private name that reft reads.

    Attributes:
        owner: the class or module that has the name.
        name: the name itself.
        use: the feature that needs the name, or what reft can't do without the name.
        tried: the versions under which tests or jobs used the name.
    """

    owner: str
    name: str
    use: str
    tried: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


def has_name(holder: object, name: str) -> bool:
    """Returns whether an object has a name, or its class annotates the name.

    The class is asked first: torch's `_version` raises for a tensor made in inference mode.

    Args:
        holder: an instance, a class or a module.
        name: the private name.
    """
    kind = holder if isinstance(holder, type) else type(holder)
    if hasattr(kind, name) or hasattr(holder, name):
        return True
    return any(name in inspect.get_annotations(each) for each in kind.__mro__)


def short_version(version: str) -> str:
    """Returns the first two numbers of a version: "2.13" for "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def versions(names: Iterable[PrivateName]) -> list[str]:
    """Returns the versions under which every one of the names was tried, the oldest first."""
    common = set.intersection(*(set(each.tried) for each in names))
    return sorted(common, key=lambda version: [int(part) for part in version.split(".")])


def refusal(name: PrivateName, torch_version: str) -> tuple[str, str]:
    """Returns the message and the remedy if a name that the job needs is missing."""
    tried = " or ".join(name.tried)
    return (
        f"torch {torch_version} has no {name}, which reft needs for {name.use}. Tried with torch {tried}.",
        f"install torch {name.tried[-1]}, or a reft that was tried with torch {short_version(torch_version)}",
    )
