"""Hooks for schedules of torch.distributed.pipelining: the time between two actions is a gap.

    schedule.step ─► gap 0 │ F0 │ gap 1 │ F1 │ gap 2 │ B0 │ … │ gap 2M ─► returns

How it works: every schedule looks up its stages' `forward_one_chunk`, `backward_one_chunk` and
`backward_weight_one_chunk` on the instance, for each call. Attributes of the instance therefore
wrap these methods, and nothing of torch is changed. The number of a gap is the number of actions
done before, as in reft.core.pipeline.bubbles. The loss and the reduction of gradients also compute
between actions, so they are wrapped, too, if the schedule has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from reft.client.schedule.iteration_profile import OTHER, IterationProfiler
from reft.client.state.extract.modules import is_a
from reft.client.torch_internals import LOSS, microbatches_of, stages_of
from reft.core.pipeline.actions import ActionKind
from reft.core.pipeline.pacing import Tier
from reft.schedules import GPipe, Interleaved, OneFOneB, ZeroBubbleV

Pipeline = OneFOneB | GPipe | Interleaved | ZeroBubbleV

WORK = {
    "forward_one_chunk": ActionKind.FORWARD,
    "backward_one_chunk": ActionKind.BACKWARD,
    "backward_weight_one_chunk": ActionKind.WEIGHT,
}


def description(schedule: Any) -> Pipeline | None:
    """Returns the description of a schedule in `reft.schedules`.

    None for an unknown schedule, or if this torch does not tell the number of microbatches.
    """
    stages, microbatches = stages_of(schedule), microbatches_of(schedule)
    if microbatches is None:
        return None
    first = stages[0]
    if is_a(schedule, "Schedule1F1B"):
        return OneFOneB(first.stage_index, first.num_stages, microbatches)
    if is_a(schedule, "ScheduleGPipe"):
        return GPipe(first.stage_index, first.num_stages, microbatches)
    if is_a(schedule, "ScheduleInterleaved1F1B"):
        return Interleaved(schedule.rank, schedule.pp_group_size, microbatches, len(stages))
    if is_a(schedule, "ScheduleZBVZeroBubble"):
        return ZeroBubbleV(schedule.rank, schedule.pp_group_size, microbatches)
    return None


def follow(schedule: Any, profiler: IterationProfiler) -> Callable[[], None]:
    """Wraps the methods of the schedule and its stages. It returns a function that undoes that."""
    stages = stages_of(schedule)
    counted = _Counted(profiler)
    undo = [_wrap(schedule, "step", counted.step), _wrap(schedule, LOSS.name, counted.beside("loss"))]
    for stage in stages:
        part = f".{stage.stage_index}" if len(stages) > 1 else ""
        undo += [_wrap(stage, method, counted.work(kind, part)) for method, kind in WORK.items()]
        shards = any(is_a(module, "FSDPModule") for module in stage.submod.modules())
        tier = Tier.COLLECTIVE if shards else Tier.COMPUTE
        undo.append(_wrap(stage, "perform_reduce_grad", counted.beside("reduce", tier)))

    def stop() -> None:
        for each in undo:
            each()

    return stop


class _Counted:
    """The wrappers of one schedule; they count the actions done in a step."""

    def __init__(self, profiler: IterationProfiler) -> None:
        self._profiler = profiler
        self._done = 0

    def step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a whole step of the schedule."""
        self._done = 0
        self._idle()
        try:
            return call(*args, **kwargs)
        finally:
            self._profiler.enter(Tier.COMPUTE, OTHER)

    def work(self, usual: ActionKind, part: str) -> Callable[..., Any]:
        """Returns the wrapper for one microbatch's forward or backward pass."""

        def wrapper(call: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any) -> Any:
            kind = usual if kwargs.get("full_backward", True) else ActionKind.INPUT
            self._profiler.enter(Tier.COMPUTE, f"{kind.value}{microbatch}{part}", kind)
            try:
                return call(microbatch, *args, **kwargs)
            finally:
                self._done += 1
                self._idle()

        return wrapper

    def beside(self, name: str, tier: Tier = Tier.COMPUTE) -> Callable[..., Any]:
        """Returns the wrapper for other work that the schedule does between actions."""

        def wrapper(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._profiler.enter(tier, name)
            try:
                return call(*args, **kwargs)
            finally:
                self._idle()

        return wrapper

    def _idle(self) -> None:
        self._profiler.enter(Tier.GAP, f"gap {self._done}")


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method on one instance, and returns a function that undoes that."""
    if not hasattr(owner, name):
        return lambda: None
    own = vars(owner).get(name)  # a wrapper of other code, if there is one
    call = getattr(owner, name)

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(call, *args, **kwargs)

    setattr(owner, name, wrapped)

    def undo() -> None:
        if vars(owner).get(name) is not wrapped:
            # Other code has wrapped the method since, and calls this wrapper. The wrapper stays,
            # and reports to a profiler that is no longer used.
            return
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo
