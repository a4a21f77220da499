"""Follows waits for collectives outside of a schedule's work: the norm of all gradients, a barrier, a reduced loss, FSDP2's
gathers and reductions, messages of a pipeline that the loop itself sends.

The seam is `torch.distributed.Work.wait`, the one method that every blocking collective and every asynchronous one ends
in when Python waits for it. It is wrapped for the whole process, but only while somebody follows: all followers share one
wrapper, which has the list of them, and the last one to stop puts the original back. What waits inside of C++ is not seen:
functional collectives, and the buckets of DDP, for which there is client/schedule/hooks/ddp.py.

Where the host's time is the device's, a thread that waits is idle, whatever the others do meanwhile: such a wait is a gap. On a
device the stretch is the collective itself.
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
    """One rhythm that is told of the waits of one thread.

    Args:
        tier: what a wait is.
        thread: the one that trains; others wait for their own sake.
    """

    profiler: IterationProfiler
    tier: Tier
    thread: int

    def is_waiting(self) -> bool:
        """Whether a wait that begins now is one of this thread, outside of the schedule's work."""
        return threading.get_ident() == self.thread and self.profiler.name == OTHER


class _SharedWrapper:
    """Wraps `Work.wait` for all followers; the wrapper has this object as its attribute `shared`."""

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
        """Takes a follower off; after the last one the original is back, unless somebody else wrapped it again."""
        if follower in self.followers:
            self.followers.remove(follower)
        if not self.followers and dist.Work.wait is self._wrapped:
            dist.Work.wait = self._call


def follow(profiler: IterationProfiler) -> Callable[[], None]:
    """Tells the rhythm of each wait of this thread, until the function that it returns is called."""
    tier = Tier.GAP if profiler.keeps_host_time else Tier.COLLECTIVE
    follower = _Follower(profiler, tier, threading.get_ident())
    found = getattr(dist.Work.wait, "shared", None)
    shared = found if isinstance(found, _SharedWrapper) else _SharedWrapper()
    shared.followers.append(follower)
    return lambda: shared.remove(follower)
