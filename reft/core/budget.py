"""Decides whether an arena fits into memory, before the first page is touched.

A daemon that the kernel kills for lack of memory protects no snapshot.

A change of shape needs new slots beside the base, which must stay until a newer version is whole:

    old slots ──lease──► base + two new slots ──a version of the new slots is whole──► all new slots

Two slots are safe (core/commit/slots.py). More slots only let snapshots overlap. So a rank that
was to have three slots has, at each moment, at most as many as without the change.

Where state is exchanged (core/coding/exchange.py), a node needs more:

    Σ over its ranks:  slots × slot  +  2 buffers × f / (D - f) × the longest section of the lane
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOTS_BESIDE_BASE = 2  # slots that a rank begins with while older slots must be held
SLOTS = 3  # slots of a rank, if the user asked for no number
SLOTS_EXCHANGE = 4  # the same where state is exchanged: the protected version and the next one stay


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


def default_slots(is_exchanged: bool, is_persisted: bool = False) -> int:
    """Returns the number of slots of a rank, if the user asked for no number.

    Args:
        is_exchanged: whether nodes exchange parity of state that only one rank has.
        is_persisted: whether daemons write checkpoints to storage. A slot stays meanwhile.
    """
    return (SLOTS_EXCHANGE if is_exchanged else SLOTS) + is_persisted


def slots_to_make(wanted: int, fitting: int, holds_older: bool) -> int:
    """Returns how many slots a lease makes for one rank.

    Args:
        wanted: the number of slots that the user asked for.
        fitting: the number of the rank's slots that serve the lease already.
        holds_older: whether older slots must be held beside the new ones.
    """
    return max((min(wanted, SLOTS_BESIDE_BASE) if holds_older else wanted) - fitting, 0)


def peak_bytes(slot_bytes: int, wanted: int) -> int:
    """Returns the most that one rank's slots take in a change of shape.

    Args:
        slot_bytes: size of one slot; the new slots count as equally large.
        wanted: the number of slots that the user asked for.
    """
    return slot_bytes * max(1 + SLOTS_BESIDE_BASE, wanted)


def format_bytes(nbytes: int) -> str:
    """Returns a number of bytes as text, such as "1.4 GiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
