"""Checks the options of the benchmarks before they measure.

A wrong option must not measure something else for an hour, or nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def listed(known: Iterable[str]) -> Callable[[str], str]:
    """Returns an argparse type: some of these words, with commas between them."""
    words = tuple(known)

    def check(text: str) -> str:
        unknown = [each for each in text.split(",") if each not in words]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(words)}")
        return text

    return check


def count(text: str) -> int:
    """Converts an argparse value into a whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def output(text: str) -> Path:
    """Converts an argparse value into a file that can be written at the end."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be written: it is a folder, or its folder is missing or read-only"
        )
    return path
