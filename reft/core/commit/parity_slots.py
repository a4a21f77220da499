"""The two parity slots of a rank, and the rule for writing one again.

    slot 0   parity of P ──── stays while P is protected ────► written by the turn after T
    slot 1   empty ──turn T──► WRITING ──all ranges──► SEALED ──► stays once T is protected

A parity slot goes from WRITING to SEALED; nothing else writes it, so LANDED does not occur. Parity
is folded by XOR, so a slot that a dead mover left WRITING is begun anew from zeros.

Invariants
  1. The parity of the protected version, or of the guard while nothing is protected, stays until
     a newer version is protected.
  2. A slot never goes back to an older version. A turn that comes late writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from reft.core.commit.version import Version


def choose_buffer(held: Sequence[Version | None], protected: Version | None, turn: Version) -> int | None:
    """Returns the index of the parity slot that a turn writes; None: none may be written.

    Args:
        held: the version in each slot, sealed or not; None: the slot is empty.
        protected: the protected version, else the guard; None: there is neither.
        turn: the version of the turn.
    """
    if any(version is not None and version != turn and not version.is_older_than(turn) for version in held):
        return None
    usable = [index for index, version in enumerate(held) if version is None or version != protected]

    def preference(index: int) -> tuple[bool, tuple[int, int]]:
        version = held[index]
        return version != turn, version.order if version is not None else (-1, -1)

    return min(usable, key=preference, default=None)
