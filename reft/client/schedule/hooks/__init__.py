"""Hooks that tell the rhythm what training does, without a change of the user's loop; one file each.

    pipelining    torch.distributed.pipelining, all of its schedules
    deepspeed     DeepSpeed's PipelineEngine
    waits         waiting for a collective, outside of the schedule's work; FSDP2's
    buckets       waiting for DDP's
    megatron      Megatron-core's timers; `reft.integrations.megatron` puts them into its config

Other loops with an engine of their own mark their idle times with `session.idle()`, or have their waits followed
(`schedule=reft.schedules.Custom()`) where a thread that waits is idle: where the host's time is the device's. On a device the
stream waits and Python does not, so there nothing is followed without an engine's own hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from reft.client.schedule.hooks import ddp, deepspeed, pipelining, waits
from reft.client.schedule.iteration_profile import Closed, IterationProfiler
from reft.errors import ConfigError
from reft.schedules import Custom, GPipe, Interleaved, OneFOneB, ZeroBubbleH1, ZeroBubbleV

PIPELINES = (GPipe, Interleaved, OneFOneB, ZeroBubbleH1, ZeroBubbleV)


def check(schedule: Any) -> None:
    """Says at attach whether `follow` will understand a schedule.

    Raises:
        ConfigError: it is of no known kind.
    """
    is_known = schedule is None or isinstance(schedule, (Custom, *PIPELINES)) or _follower(schedule) is not None
    if not is_known:
        raise ConfigError(
            f"schedule is a {type(schedule).__name__}; a schedule of torch.distributed.pipelining or of reft.schedules, "
            "or DeepSpeed's PipelineEngine, is expected.",
            "schedule=None, and mark idle times with session.idle()",
        )


def closed(schedule: Any) -> Closed | None:
    """The idle times that a schedule should have, given the times of its actions; None if nobody knows."""
    described = pipelining.description(schedule) if pipelining.is_schedule(schedule) else schedule
    if isinstance(described, PIPELINES):
        return described.gaps
    return None


def follow(schedule: Any, profiler: IterationProfiler, models: Iterable[Any] = ()) -> Callable[[], None]:
    """Follows a schedule; what it returns takes the hooks off again.

    Of a description the waits are followed, beside the idle times that the loop marks itself.

    Args:
        models: where DDP is looked for.
    """
    undo: list[Callable[[], None]] = []
    follower = _follower(schedule)
    if follower is not None:
        undo = [follower(schedule, profiler), waits.follow(profiler)]
    elif schedule is not None and profiler.keeps_host_time:
        undo = [waits.follow(profiler), ddp.follow(models, profiler)]

    def stop() -> None:
        for each in undo:
            each()

    return stop


def _follower(schedule: Any) -> Callable[[Any, IterationProfiler], Callable[[], None]] | None:
    """What hooks it; None of a description, and of what is unknown."""
    if pipelining.is_schedule(schedule):
        return pipelining.follow
    return deepspeed.follow if deepspeed.is_engine(schedule) else None
