"""Looks at open descriptors, such as those that a test leaves open in its own process."""

from __future__ import annotations

import contextlib
import os

from tests.support.daemons import until


def descriptors_of(pid: int) -> set[tuple[str, str]]:
    """Returns number and target of each open descriptor of a process."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the one that listed them, or one that was closed meanwhile
            found.add((number, os.readlink(f"/proc/{pid}/fd/{number}")))
    return found


def own_descriptors() -> set[tuple[str, str]]:
    return descriptors_of(os.getpid())


def await_closed(before: set[tuple[str, str]]) -> None:
    """Fails if descriptors stay open that were not in `before`.

    Their count tells less: Python may collect garbage of earlier tests in between, and close its
    descriptors.
    """
    until(lambda: own_descriptors() <= before, what="the end of all new descriptors")
