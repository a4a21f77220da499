"""Hooks for waits for collectives outside of the actions of a pipeline schedule.

An action is a pass over one microbatch: forward or backward. Other hooks report the actions.
Without a pipeline there are no actions. Then every wait counts. Examples of such waits are the norm
of all gradients, a barrier, a reduced loss, FSDP2's gathers and reductions, and messages of a
pipeline that the loop itself sends.

How it works: whenever Python waits for a collective, it calls `torch.distributed.Work.wait`. That
method is wrapped for the whole process, while there is at least one follower. All followers share
one wrapper, and the last one puts the original back. Waits inside of C++ are not seen.
client/schedule/hooks/ddp.py reports the waits for DDP's buckets. Nothing reports the waits of
functional collectives.

Each wait becomes one phase: a part of the window in which training does one thing. The phase's tier
says beside what copies run. On the CPU a rank that waits is idle, so the tier is GAP. On a device
Python goes on and the stream waits for the collective, so the tier is COLLECTIVE.
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

    def gets_wait(self) -> bool:
        """Tells whether the profiler gets a call of `Work.wait` that begins now.

        True in the follower's thread, if the current phase is OTHER: neither an action of the
        schedule nor a wait. `profiler.name` is the name of the current phase.
        """
        return threading.get_ident() == self.thread and self.profiler.name == OTHER


class _SharedWrapper:
    """The wrapper of `Work.wait` for all followers.

    The wrapper's attribute `shared` is this object, so that `follow` finds the object again.
    """

    def __init__(self) -> None:
        self.followers: list[_Follower] = []
        self._call = call = dist.Work.wait

        @functools.wraps(call)
        def wrapped(work: Any, *args: Any, **kwargs: Any) -> Any:
            waiting = [each for each in self.followers if each.gets_wait()]
            for each in waiting:
                each.profiler.enter(each.tier, WAIT)
            try:
                return call(work, *args, **kwargs)
            finally:
                # An unknown phase counts as COMPUTE until a hook reports the next one.
                for each in waiting:
                    each.profiler.enter(Tier.COMPUTE, OTHER)

        wrapped.shared = self  # type: ignore[attr-defined]
        self._wrapped = dist.Work.wait = wrapped

    def remove(self, follower: _Follower) -> None:
        """Removes a follower; after the last one puts the original method back.

        If other code has wrapped the method again, this wrapper stays below the other one. Without
        followers this wrapper only calls the original.
        """
        if follower in self.followers:
            self.followers.remove(follower)
        if not self.followers and dist.Work.wait is self._wrapped:
            dist.Work.wait = self._call


def follow(profiler: IterationProfiler) -> Callable[[], None]:
    """Reports each wait of this thread, and returns a function that ends the reports."""
    # keeps_host_time is true on the CPU: work is done once Python has done the work.
    tier = Tier.GAP if profiler.keeps_host_time else Tier.COLLECTIVE
    follower = _Follower(profiler, tier, threading.get_ident())
    current = getattr(dist.Work.wait, "shared", None)
    shared = current if isinstance(current, _SharedWrapper) else _SharedWrapper()
    shared.followers.append(follower)
    return lambda: shared.remove(follower)
