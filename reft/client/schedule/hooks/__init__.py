"""Hooks that report the phases of an iteration to the profiler. The user's loop does not change.

    pipelining    torch.distributed.pipelining, all schedules
    deepspeed     DeepSpeed's PipelineEngine
    waits         waits for collectives outside of the schedule's actions, also those of FSDP2
    ddp           waits for DDP's buckets
    megatron      Megatron-core's timers; `reft.integrations.megatron` puts them into the config

Other loops have two ways. They mark their gaps with `session.idle()`, or pass
`schedule=reft.schedules.Custom()`, and reft follows their waits for collectives. The second way
works only on the CPU, where a rank that waits is idle. On a device the stream waits and Python does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from reft.client.schedule.hooks import ddp, deepspeed, pipelining, waits
from reft.client.schedule.iteration_profile import Closed, IterationProfiler
from reft.client.torch_internals import is_schedule
from reft.errors import ConfigError
from reft.schedules import Custom, GPipe, Interleaved, OneFOneB, ZeroBubbleH1, ZeroBubbleV

PIPELINES = (GPipe, Interleaved, OneFOneB, ZeroBubbleH1, ZeroBubbleV)


def check(schedule: Any) -> None:
    """Checks at attach that reft can use a schedule.

    Raises:
        ConfigError: the schedule is of an unknown kind.
    """
    is_known = schedule is None or isinstance(schedule, (Custom, *PIPELINES)) or _follower(schedule) is not None
    if not is_known:
        raise ConfigError(
            f"schedule is a {type(schedule).__name__}; it must be a schedule of torch.distributed.pipelining or of "
            "reft.schedules, or DeepSpeed's PipelineEngine.",
            _remedy(schedule),
        )


def _remedy(schedule: Any) -> str:
    """Returns what to do about a schedule of an unknown kind."""
    if isinstance(schedule, LRScheduler):
        return 'schedule= is for pipelines; a learning rate scheduler goes into state={"lr": schedule}'
    return "schedule=None, and mark idle times with session.idle()"


def closed(schedule: Any) -> Closed | None:
    """Returns the function that computes a schedule's gaps from the times of its actions.

    None if reft knows no description of the schedule.
    """
    described = pipelining.description(schedule) if is_schedule(schedule) else schedule
    if isinstance(described, PIPELINES):
        return described.gaps
    return None


def follow(schedule: Any, profiler: IterationProfiler, models: Iterable[Any] = ()) -> Callable[[], None]:
    """Installs the hooks for a schedule, and returns a function that removes them.

    For a description (`reft.schedules`) on the CPU, the hooks follow waits for collectives.

    Args:
        schedule: the schedule; None installs nothing.
        profiler: gets the reports.
        models: modules in which DDP is searched.
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
    """Returns the function that hooks a schedule; None for a description or an unknown kind."""
    if is_schedule(schedule):
        return pipelining.follow
    return deepspeed.follow if deepspeed.is_engine(schedule) else None
