"""Phrases for messages: a number and its noun, singular or plural."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns the number with its noun: "1 rank", "3 ranks".

    Args:
        number: how many.
        noun: the singular.
        plural: only for nouns whose plural is not noun + "s".
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def every(number: int, noun: str) -> str:
    """Returns a phrase for all items: "all 3 ranks", "the one rank"."""
    return f"the one {noun}" if number == 1 else f"all {number} {noun}s"


def more(number: int, noun: str, plural: str = "") -> str:
    """Returns the words after the first named item, as in " and 2 more cells".

    It returns "" if `number` is 0.
    """
    return f" and {number} more {noun if number == 1 else plural or noun + 's'}" if number else ""
