"""Hooks for waits for collectives outside of a schedule's actions.

Examples are the norm of all gradients, a barrier, a reduced loss, FSDP2's gathers and reductions,
and messages of a pipeline that the loop itself sends.

How it works: whenever Python waits for a collective, it calls `torch.distributed.Work.wait`. That
method is wrapped for the whole process, while there is at least one follower. All followers share
one wrapper, and the last one puts the original back. Waits inside of C++ are not seen: functional
collectives, and the buckets of DDP, which client/schedule/hooks/ddp.py reports.

On the CPU a rank that waits is idle, so the wait is a gap. On a device the phase is the collective
itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from reft.client.schedule.iteration_profile import OTHER, WAIT, IterationProfiler
from reft.core.pipeline.pacing import Tier


@dataclass(frozen=True, eq=False)
class _Follower:
    """One profiler that gets the waits of one thread.

    Attributes:
        profiler: gets the reports.
        tier: the tier of a wait.
        thread: id of the thread that trains; waits of other threads do not matter.
    """

    profiler: IterationProfiler
    tier: Tier
    thread: int

    def is_waiting(self) -> bool:
        """Decides whether to report a wait that begins now.

        True in the follower's thread, outside of the schedule's actions.
        """
        return threading.get_ident() == self.thread and self.profiler.name == OTHER


class _SharedWrapper:
    """The wrapper of `Work.wait` for all followers; its attribute `shared` is this object."""

    def __init__(self) -> None:
        self.followers: list[_Follower] = []
        self._call = call = dist.Work.wait

        @functools.wraps(call)
        def wrapped(work: Any, *args: Any, **kwargs: Any) -> Any:
            waiting = [each for each in self.followers if each.is_waiting()]
            for each in waiting:
                each.profiler.enter(each.tier, WAIT)
            try:
                return call(work, *args, **kwargs)
            finally:
                for each in waiting:
                    each.profiler.enter(Tier.COMPUTE, OTHER)

        wrapped.shared = self  # type: ignore[attr-defined]
        self._wrapped = dist.Work.wait = wrapped

    def remove(self, follower: _Follower) -> None:
        """Removes a follower; after the last one puts the original method back.

        The original stays wrapped if other code has wrapped the method again.
        """
        if follower in self.followers:
            self.followers.remove(follower)
        if not self.followers and dist.Work.wait is self._wrapped:
            dist.Work.wait = self._call


def follow(profiler: IterationProfiler) -> Callable[[], None]:
    """Reports each wait of this thread, and returns a function that ends the reports."""
    tier = Tier.GAP if profiler.keeps_host_time else Tier.COLLECTIVE
    follower = _Follower(profiler, tier, threading.get_ident())
    current = getattr(dist.Work.wait, "shared", None)
    shared = current if isinstance(current, _SharedWrapper) else _SharedWrapper()
    shared.followers.append(follower)
    return lambda: shared.remove(follower)
