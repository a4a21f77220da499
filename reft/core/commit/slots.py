"""The life of a slot, and the rule by which it may be written again.

                     trainer                trainer, or the daemon            trainer
    EMPTY ──begin──► WRITING ──last byte──► LANDED ──digests──► SEALED ──reuse rule──► WRITING …
      ▲                 │                                          │
      └────decision─────┴──── dropped: open, or newer than the base ┘

Invariants
  1. A slot is WRITING before the first byte of a new version is written, LANDED after the last.
  2. A slot is begun only if it is empty, or holds a version older than one that this rank *knows* to be whole, or one
     that is known to be void. The newest version known to be whole is never touched.
  3. So at any moment some version is sealed on every rank (tests/core/model shows it, and that it fails without the rule).

A lost announcement of a whole version makes a rank skip, never overwrite. A late one permits reuse later. A repeated one
changes nothing. If no slot may be begun, the rank says void for that step and goes on: there is no waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from reft.core.commit.version import Version


class SlotState(IntEnum):
    """The number is what the slot's header stores."""

    EMPTY = 0  # holds nothing; its bytes mean nothing
    WRITING = 1  # the trainer writes it; torn if the trainer is dead
    LANDED = 2  # every byte is there, the digests are not; any process that lives may seal it
    SEALED = 3  # complete, with digests; only the reuse rule opens it again


@dataclass(frozen=True)
class Slot:
    """What one rank knows of one of its slots. `version` is None only if the slot is EMPTY."""

    index: int
    state: SlotState
    version: Version | None


def may_reuse(slot: Slot, whole: Version | None, voids: Collection[Version]) -> bool:
    """The reuse rule.

    Args:
        slot: the slot that would be written again; nothing may be writing it now.
        whole: the newest version that this rank knows to be whole, None if it knows of none.
        voids: versions known never to become whole.
    """
    if slot.version is None or slot.version in voids:
        return True
    return whole is not None and slot.version.is_older_than(whole)


def choose(slots: Sequence[Slot], whole: Version | None, voids: Collection[Version]) -> Slot | None:
    """The slot to write next: an empty one, else the oldest that may be reused; None means skip this snapshot."""
    usable = [slot for slot in slots if may_reuse(slot, whole, voids)]
    return min(usable, key=lambda slot: slot.version.order if slot.version else (-1, -1), default=None)
