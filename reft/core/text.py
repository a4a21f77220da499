"""Nouns that follow a number, as a person writes them."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number with its noun: "1 rank", "3 ranks"; `plural` where an s does not make it."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def every(number: int, noun: str) -> str:
    """All of them: "all 3 ranks", "the one rank"."""
    return f"the one {noun}" if number == 1 else f"all {number} {noun}s"


def more(number: int, noun: str, plural: str = "") -> str:
    """What follows the one that was named: " and 2 more cells", or nothing if there is no other."""
    return f" and {number} more {noun if number == 1 else plural or noun + 's'}" if number else ""
