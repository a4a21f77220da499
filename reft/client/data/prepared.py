"""Loaders that Accelerate has prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class PreparedLoader:
    """What Accelerate's loader has inside: looks like the user's loader, gives our batches.

    Accelerate goes on to move batches to their device and to count what the last batch lacks; for
    that it reads the sampler and the dataset of the user's loader.

    Args:
        base: the loader that Accelerate had inside.
        rebuilt: the loader to iterate.
    """

    def __init__(self, base: DataLoader[Any], rebuilt: DataLoader[Any]) -> None:
        self._base = base
        self._rebuilt = rebuilt

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the user's loader, which Accelerate's loader takes for its own."""
        return type(self._base)

    def __getattr__(self, name: str) -> Any:
        if name in ("_base", "_rebuilt"):
            raise AttributeError(name)  # not made yet
        return getattr(self._base, name)

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rebuilt)
