"""Follows waits for collectives outside of a schedule's work: the norm of all gradients, a barrier, a reduced loss, FSDP2's
gathers and reductions, messages of a pipeline that the loop itself sends.

The seam is `torch.distributed.Work.wait`, the one method that every blocking collective and every asynchronous one ends
in when Python waits for it; it is wrapped for the whole process, and put back. What waits inside of C++ is not seen:
functional collectives, and the buckets of DDP, for which there is client/schedule/hooks/ddp.py.

Where the host's time is the device's, whoever waits is idle, whatever the others do meanwhile: such a wait is a gap. On a
device the stretch is the collective itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from reft.client.schedule.iteration_profile import OTHER, WAIT, Rhythm
from reft.core.pipeline.pacing import Tier


def follow(rhythm: Rhythm) -> Callable[[], None]:
    """Wraps `Work.wait`; what it returns puts it back."""
    call = dist.Work.wait
    tier = Tier.GAP if rhythm.keeps_host_time else Tier.COLLECTIVE
    thread = threading.get_ident()  # of training; others wait for their own sake

    @functools.wraps(call)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or rhythm.name != OTHER:
            return call(self, *args, **kwargs)
        rhythm.enter(tier, WAIT)
        try:
            return call(self, *args, **kwargs)
        finally:
            rhythm.enter(Tier.COMPUTE, OTHER)

    dist.Work.wait = wrapped

    def undo() -> None:
        if dist.Work.wait is wrapped:
            dist.Work.wait = call

    return undo
