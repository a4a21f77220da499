"""Copy threads: busy ones share the cores with training, idle ones give way to all others.

In a gap, the trainer's thread sleeps until a message comes, and its core has nothing to do. An
ordinary copy thread on that core would delay the message: the thread that receives it wakes up, and
must wait for its time slice. Linux runs a thread of SCHED_IDLE only while no other thread wants the
core, and takes the core away at once. So idle threads copy in gaps. Where training computes on
every core, an idle thread would hardly run. So busy threads copy beside training and at the fence.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

log = logging.getLogger("reft")


def copy_cpus() -> list[int]:
    """Returns the CPUs to bind copy threads to.

    An empty list means one thread that the scheduler places. A copy thread on a core that also
    computes makes torch's other threads wait at their next barrier. Where torch has a thread for
    every core, two copy threads on two cores halve that wait. Where a core is free, the scheduler
    puts one thread there. Measured with bench/save.py.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 or torch.get_num_threads() < len(cpus):
        return []
    first = os.getpid() % len(cpus)  # so that trainers on one machine choose different CPUs
    return [cpus[first], cpus[(first + len(cpus) // 2) % len(cpus)]]


class ComputeThreads(NamedTuple):
    """How many threads a rank computes with, and the CPUs on which these may run."""

    threads: int
    cpus: frozenset[int]

    @classmethod
    def own(cls) -> ComputeThreads:
        return cls(torch.get_num_threads(), frozenset(os.sched_getaffinity(0)))


def has_idle_cores(own: ComputeThreads, node: Sequence[ComputeThreads]) -> bool:
    """Tells whether this rank's cores are ever idle while all ranks of its node compute.

    If the ranks have more threads than cores, an idle thread would stand still for long, perhaps
    with the interpreter's lock. Ranks that are bound to other cores do not count.

    Args:
        own: this rank's threads.
        node: the threads of all ranks of the node, this one included.
    """
    return sum(each.threads * len(each.cpus & own.cpus) / len(each.cpus) for each in node) <= len(own.cpus)


class TaskThread:
    """A thread that runs tasks one after the other.

    Args:
        name: the name of the thread.
        cpu: the only CPU that the thread runs on; None leaves the choice to the scheduler.
        is_idle: whether the thread gives way to all threads that are not idle ones.
    """

    def __init__(self, name: str, cpu: int | None, is_idle: bool = False) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._cpu, self._is_idle = cpu, is_idle
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._tasks.put((task, done))
        return done

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._cpu is not None:
            try:
                os.sched_setaffinity(0, {self._cpu})  # 0 is this thread alone, here and below
            except OSError as error:  # this process has lost the CPU since it chose it
                log.warning("copies run on any CPU: CPU %d is not available (%s).", self._cpu, error)
        if self._is_idle:
            try:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            except OSError as error:
                log.warning("copies in gaps may delay training: this process may not use SCHED_IDLE (%s).", error)
        while (item := self._tasks.get()) is not None:
            task, done = item
            try:
                task()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)


def run_all(own: Callable[[], None], others: Sequence[tuple[TaskThread, Callable[[], None]]]) -> None:
    """Runs `own` in the calling thread and each other task in its thread. It waits for all of them.

    Raises:
        Exception: the exception of a task that failed.
    """
    futures = [worker.submit(task) for worker, task in others]
    try:
        own()
    finally:
        # Even if `own` raised: no task may read the state once the fence is open.
        failures = [future.exception() for future in futures]
    for failure in filter(None, failures):
        raise failure
