"""Decides whether an arena fits into memory, before the first page is touched.

A daemon that the kernel kills for lack of memory protects no snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryLimit:
    """One limit on memory.

    Attributes:
        name: the origin of the limit, e.g. "--memory" or "the container's memory limit".
        free_bytes: bytes that this limit still permits to reserve.
        remedy: what the user can do to raise the limit.
    """

    name: str
    free_bytes: int
    remedy: str


def refusal(need_bytes: int, limits: Sequence[MemoryLimit], who: str = "the slots need") -> str | None:
    """Returns why `need_bytes` can't be reserved; None if they can.

    The text has the value, the tightest limit and the remedy.

    Args:
        need_bytes: bytes to reserve.
        limits: all limits that apply.
        who: subject and verb of the message.
    """
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    if tightest is None or need_bytes <= tightest.free_bytes:
        return None
    return (
        f"{who} {format_bytes(need_bytes)}, but {tightest.name} leaves {format_bytes(max(tightest.free_bytes, 0))}.\n"
        f"Fix: {tightest.remedy}"
    )


def format_bytes(nbytes: int) -> str:
    """Returns a number of bytes as text, such as "1.4 GiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
