"""Finds processes by their command lines."""

from __future__ import annotations

import contextlib

import psutil


def children_with(pid: int, words: str) -> list[psutil.Process]:
    """Returns the children of a process with these words in their command lines.

    A child that ends meanwhile, or that is a zombie, is none of them: it has no command line.
    """
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if words in " ".join(child.cmdline()):
                found.append(child)
    return found
