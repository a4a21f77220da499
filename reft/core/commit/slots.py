"""The life of a slot, and the rule for writing it again.

                     trainer                trainer, or the daemon            trainer
    EMPTY ──begin──► WRITING ──last byte──► LANDED ──digests──► SEALED ──reuse rule──► WRITING …
      ▲                 │                                          │
      └──first lease────┴── dropped: WRITING, or newer than the base ┘

Invariants
  1. A slot is WRITING before the first byte of a new version is written, and LANDED after the last
     byte.
  2. A rank may write a slot in three cases: the slot is empty; its version is older than one that
     this rank *knows* to be whole; its version is known to be void. The newest version known to be
     whole is never overwritten.
  3. A rank never writes a slot whose version is pinned (core/commit/pins.py), by the same message
     that told it what is whole.
  4. So at any moment some version is sealed on every rank, and another one may be protected against
     the loss of nodes. tests/core/model shows this, and shows that it fails without the rules.

If the message "whole" is lost, the rank skips snapshots; it never overwrites. A late message
permits reuse later. A repeated message changes nothing. If no slot may be reused, the rank answers
void for that step and continues. No rank waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from reft.core.commit.version import Version


class SlotState(IntEnum):
    """The state of a slot, as the number that its header stores."""

    EMPTY = 0  # holds no version; the bytes have no meaning
    WRITING = 1  # the trainer is writing; incomplete if the trainer is dead
    LANDED = 2  # all bytes are there, the digests are missing; the trainer or the daemon may seal the slot
    SEALED = 3  # complete, with digests; only the reuse rule permits to write it again


@dataclass(frozen=True)
class Slot:
    """One rank's knowledge of one of its slots. `version` is None only if the slot is EMPTY."""

    index: int
    state: SlotState
    version: Version | None


def may_reuse(slot: Slot, whole: Version | None, voids: Collection[Version], pinned: Collection[Version] = ()) -> bool:
    """Whether the slot may be written again: the reuse rule.

    Args:
        slot: the slot to write again. Nothing may be writing it now.
        whole: the newest version that this rank knows to be whole; None if the rank knows of none.
        voids: versions that are known never to become whole.
        pinned: versions that stay; see `pinned_versions`.
    """
    if slot.version in pinned:
        return False
    if slot.version is None or slot.version in voids:
        return True
    return whole is not None and slot.version.is_older_than(whole)


def choose_slot(
    slots: Sequence[Slot], whole: Version | None, voids: Collection[Version], pinned: Collection[Version] = ()
) -> Slot | None:
    """Returns the slot to write next: an empty one, else the oldest reusable one.

    None means: skip this snapshot.
    """
    usable = [slot for slot in slots if may_reuse(slot, whole, voids, pinned)]
    return min(usable, key=lambda slot: slot.version.order if slot.version else (-1, -1), default=None)
