"""Which of the due steps a rank takes while agreeing on them lasts longer than they do: so few that all ranks meet in some.

    every step, 3 slots, and an answer that comes after 8 steps (nothing else is wrong):
      rank 0   takes 5 6 · · 9 10 ·  ·  13 14 …     it hears of others' voids at once, so its slots are free again first
      rank 1   takes · · 7 8 ·  · 11 12 ·  ·  …     no step is taken by both, for ever: each outcome frees slots, none is whole
    only multiples of 4:
      both     take  · · · 8 ·  ·  ·  12 ·  ·  …

A slot is held from its step to the outcome, so with `slots` of them (one holds the newest whole version) a rank can take one
of each lag ÷ (slots - 1) steps, where the lag is how far the newest whole step is behind. Which ones, follows from the number
of the step: the multiples of the next power of two.

Invariants
  1. Ranks that know of different lags share steps: a multiple of the larger power is one of the smaller.
  2. While nothing was sealed in vain, or outcomes come before the next step, every due step is taken: not to have heard of
     anything, because daemons are away, or to be the one whose snapshots work, is no reason to be out of step, and afterwards
     the next step counts.
  3. From any step the next that is taken is less than SPACING_MAX due steps away.

An outcome that is lost or late makes the lag look larger: fewer steps are taken, for as long. A repeated one changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

SPACING_MAX = 16  # also with longer lags ranks then meet: each attempt has that long for its outcome
RECENT = 8 * SPACING_MAX  # due steps for which a snapshot in vain counts
MEMORY = 4  # outcomes: where they come late by chance, one that comes at once says little


@dataclass
class OutcomeDelays:
    """What one rank has seen of how long outcomes take, in steps."""

    in_vain: int | None = None  # the newest step when it last heard that one that it had sealed never becomes whole
    _recent: tuple[int, ...] = ()

    def decided(self, step: int, now: int, is_void: bool) -> None:
        """Takes that a sealed step was decided when `now` was the newest."""
        self._recent = (*self._recent, now - step)[-MEMORY:]
        if is_void:
            self.in_vain = now

    def worst(self, step: int, oldest: int | None) -> int:
        """The longest of the last few, or of the one that is waited for.

        Args:
            step: the newest.
            oldest: the oldest sealed step that is not decided; None: there is none.
        """
        return max((0 if oldest is None else step - oldest, *self._recent))


def backoff_interval(lag: int, in_vain: int | None, delay: int, slots: int) -> int:
    """Each how many-th due step is to be taken: a power of two.

    Args:
        lag: due steps since the newest one that is known to be whole, or since the first one.
        in_vain: due steps since this rank heard of a snapshot that it had sealed and that never becomes whole; None: of none.
        delay: the longest that an outcome took lately, in due steps.
        slots: how many this rank has.
    """
    each = 1
    if in_vain is not None and in_vain <= RECENT and delay > 0:
        while each < SPACING_MAX and lag > 2 * max(slots - 1, 1) * each:
            each *= 2
    return each
