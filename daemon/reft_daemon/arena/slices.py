"""Keeps long work from holding up the event loop.

Work in slices is a generator that yields between them.

Work stays in the loop if it needs state that other work of the loop may change. The generator says
what others may see between its slices.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


async def run_in_slices(work: Generator[None, None, T]) -> T:
    """Returns the result of `work`; other work goes on between its slices.

    Nothing else runs between the last slice and the caller.
    """
    with contextlib.closing(work):
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            await asyncio.sleep(0)


def run_at_once(work: Generator[None, None, T]) -> T:
    """Returns the result of `work`, of all slices without a break."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pauses Python's collection of cyclic garbage, for work in a thread.

    A collection holds up all threads while it walks over all objects. Work that makes a million of
    them, without cycles, would cause several.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
