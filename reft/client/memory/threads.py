"""Threads that copy: those that share the cores with training, and idle ones, which give way to whatever wants to run.

A gap begins with a wait: the trainer's thread sleeps until a message comes, and its core rests. A copy thread on that core
stands in the message's way: the thread that takes it in wakes up, and waits for a slice of the scheduler's time. Linux lets
a thread of SCHED_IDLE run only while nobody else wants to, and takes the core from it at once. Beside training, and at the
fence, such a thread would come last where training computes on every core: that is for the others.
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
    """The CPUs to bind copy threads to; empty: one thread, left to the scheduler.

    A copy thread on a core that also computes makes the other threads of torch's team wait at their next barrier. Where
    torch has a thread for every core, two copy threads on two cores halve that wait; where a core is free, one thread
    finds it. Measured with bench/save.py.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 or torch.get_num_threads() < len(cpus):
        return []
    first = os.getpid() % len(cpus)  # trainers that share the machine should not choose the same two
    return [cpus[first], cpus[(first + len(cpus) // 2) % len(cpus)]]


class ComputeThreads(NamedTuple):
    """The threads with which a rank computes, and the CPUs on which they may run."""

    threads: int
    cpus: frozenset[int]

    @classmethod
    def own(cls) -> ComputeThreads:
        return cls(torch.get_num_threads(), frozenset(os.sched_getaffinity(0)))


def has_idle_cores(own: ComputeThreads, node: Sequence[ComputeThreads]) -> bool:
    """Whether this rank's cores ever rest while all ranks of its node, itself among them, compute.

    Where these have more threads than cores, a thread that gives way to all others would stand still for long, perhaps with
    the interpreter's lock. Ranks that are bound to cores of their own don't count.
    """
    return sum(each.threads * len(each.cpus & own.cpus) / len(each.cpus) for each in node) <= len(own.cpus)


class TaskThread:
    """A thread that runs tasks one after the other.

    Args:
        cpu: the only CPU that it runs on; None leaves it to the scheduler.
        is_idle: whether it gives way to all threads that are not.
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
                os.sched_setaffinity(0, {self._cpu})  # of this thread alone, as below
            except OSError as error:  # it was taken from this process since
                log.warning("copies run on any CPU: CPU %d is not to be had (%s).", self._cpu, error)
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
    """Runs each task in its thread, and the first in the caller's; returns when all have ended, and raises what one raised."""
    running = [worker.submit(task) for worker, task in others]
    try:
        own()
    finally:
        # Whatever happened here, nothing may read the state once the fence is open.
        failures = [each.exception() for each in running]
    for failure in filter(None, failures):
        raise failure
