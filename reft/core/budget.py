"""Whether an arena fits, decided before a page is touched: a daemon that is killed for memory protects nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryLimit:
    """One bound on memory.

    Attributes:
        name: what sets it, e.g. "--memory" or "the container's memory limit".
        free_bytes: how much of it is still free.
        remedy: what a person can do about it.
    """

    name: str
    free_bytes: int
    remedy: str


def refusal(need_bytes: int, limits: Sequence[MemoryLimit], who: str = "the slots need") -> str | None:
    """Why `need_bytes` may not be reserved: value, limit and remedy of the tightest bound; None if they may."""
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    if tightest is None or need_bytes <= tightest.free_bytes:
        return None
    return (
        f"{who} {size(need_bytes)}, but {tightest.name} leaves {size(max(tightest.free_bytes, 0))}. "
        f"Fix: {tightest.remedy}"
    )


def size(nbytes: int) -> str:
    """Bytes as a person reads them: "1.4 GiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
