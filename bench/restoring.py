"""Times the steps of restores; has the restores of bench/save.py.

bench/restore.py uses only `timed_steps`. bench/save.py restores in fresh processes, from slots of
an earlier trainer.

Before its first step an optimizer has no state, so a restore allocates fresh pages for that state.
Where a hypervisor backs pages anew, they cost more than the copy into them. So there are three
kinds of restores, a third each. One kind fills existing state, like frameworks with their own
optimizers (Megatron, DeepSpeed). One fills fresh pages. One fills fresh pages that the host backs
already, like on a machine without a hypervisor. For the latter two, the same process also measures
the necessary cost: as many fresh pages in two threads, and then the memcpy.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import reft
from bench import common
from bench.common import Goal, Mapped, Training, median

STEPS = ("open", "match", "make", "load", "finish")  # of reft.client.restore.restore.run_restore

INTO = {
    "existing": "restore in a fresh process, state exists",
    "fresh": "restore in a fresh process, fresh pages",
    "backed": "restore in a fresh process, fresh pages that the host backs",
}


class TimedSteps:
    """The steps of one restore, with the seconds of each step added up.

    Args:
        restore: the steps, as `run_restore` takes them.
        seconds: step → its seconds so far.
    """

    def __init__(self, restore: Any, seconds: dict[str, float]) -> None:
        self._restore, self._seconds = restore, seconds

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._restore, name)
        if name not in STEPS:
            return value

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return value(*arguments)
            finally:
                self._seconds[name] += time.perf_counter() - began

        return call


@contextmanager
def timed_steps() -> Iterator[dict[str, float]]:
    """Yields step → its seconds; they are complete at the end of the block.

    Raises:
        RuntimeError: nothing was restored in the block.
    """
    from reft.client.attach import restore as attach_restore

    run, seconds = attach_restore.run_restore, dict.fromkeys(STEPS, 0.0)

    def run_timed(restore: Any, *arguments: Any) -> Any:
        timed: Any = TimedSteps(restore, seconds)
        return run(timed, *arguments)

    with mock.patch.object(attach_restore, "run_restore", run_timed):
        yield seconds
    if not seconds["load"]:
        raise RuntimeError("nothing was restored")


def restore(options: argparse.Namespace, job: str) -> dict[str, Any]:
    """Attaches, and times the way from the slot into live tensors.

    Then times the memcpy, and fresh pages alone.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    training = Training(common.QUICK if options.quick else common.FULL)
    missing = 2 * sum(parameter.nbytes for parameter in training.model.parameters())
    if options.into == "existing":
        training.step()
    elif options.into == "backed":
        common.backed(missing)
    with timed_steps() as seconds:
        began = time.perf_counter()
        session = reft.attach(training.model, training.optimizer, job=job, daemon=options.daemon)
        attach_s = time.perf_counter() - began
    if session.restored_from != "memory" or session.step < 1:
        raise RuntimeError("nothing was restored")
    mapped = Mapped(training.tensors())
    mapped.copy()
    memcpy = {threads: [mapped.copy_back(threads) for _ in range(7)] for threads in (1, 2)}
    session.close()
    return {
        "into": options.into, "load_s": sum(seconds.values()), "attach_s": attach_s, "memcpy_1_s": median(memcpy[1]),
        "memcpy_2_s": median(memcpy[2]), "fresh_s": common.fresh(missing), "fresh_backed_s": common.fresh(missing),
    }  # fmt: skip


def goals(restores: Sequence[dict[str, Any]]) -> list[Goal]:
    """Returns the goals of restores, with the measurements."""
    made = []
    for into, name in INTO.items():
        some = [each for each in restores if each["into"] == into]
        if some:
            ratio = median([each["load_s"] / each["memcpy_2_s"] for each in some])
            made.append(Goal(name, ratio, 1.6, "memcpy", "slot to live tensors, digests checked / memcpy with two threads"
                             + _pages_first(into, some)))  # fmt: skip
    return made


def _pages_first(into: str, some: Sequence[dict[str, Any]]) -> str:
    """Returns the cost of allocating as many fresh pages and then of the memcpy.

    Returns nothing for restores into existing state.
    """
    if into == "existing":
        return ""
    pages = "fresh_backed_s" if into == "backed" else "fresh_s"
    return f"; fresh pages, then memcpy: {median([1 + each[pages] / each['memcpy_2_s'] for each in some]):.2f}"
