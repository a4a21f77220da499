"""Hooks for DeepSpeed's PipelineEngine: waits for neighbours between actions are gaps.

    train_batch ─► _exec_schedule ─► instruction: engine._INSTRUCTION_MAP[kind] ─► LoadMicroBatch, …

How it works: the engine reads the table `_INSTRUCTION_MAP` from itself for each instruction. A
table on the instance hides the table of the class, and wraps every instruction of this engine.
Nothing of DeepSpeed is changed. A stage waits for its neighbours while it sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reft.client.schedule.iteration_profile import OTHER, IterationProfiler
from reft.core.pipeline.actions import ActionKind
from reft.core.pipeline.pacing import Tier

IDLE = ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad")
WORK = {"ForwardPass": ActionKind.FORWARD, "BackwardPass": ActionKind.BACKWARD}
COLLECTIVE = ("ReduceGrads", "ReduceTiedGrads")


def is_engine(value: Any) -> bool:
    """Decides whether `follow` accepts a value: an engine with a table of instructions."""
    return callable(getattr(value, "_exec_schedule", None)) and isinstance(
        getattr(value, "_INSTRUCTION_MAP", None), dict
    )


def follow(engine: Any, profiler: IterationProfiler) -> Callable[[], None]:
    """Wraps the engine's schedule and instructions, and returns a function that undoes that."""
    done = 0
    counts: dict[str, int] = {}

    def idle() -> None:
        profiler.enter(Tier.GAP, f"gap {done}")

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def instruction(this_engine: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal done
            kind = WORK.get(name)
            if kind is None:
                profiler.enter(Tier.COLLECTIVE if name in COLLECTIVE else Tier.COMPUTE, name)
            else:
                profiler.enter(Tier.COMPUTE, f"{kind.value}{counts.get(name, 0)}", kind)
                counts[name] = counts.get(name, 0) + 1
                done += 1
            try:
                return call(this_engine, *args, **kwargs)
            finally:
                idle()

        return instruction

    execute = engine._exec_schedule

    def executed(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done = 0
        counts.clear()
        idle()
        try:
            return execute(*args, **kwargs)
        finally:
            profiler.enter(Tier.COMPUTE, OTHER)

    table = {
        kind: call if kind.__name__ in IDLE else wrapped(kind.__name__, call)
        for kind, call in engine._INSTRUCTION_MAP.items()
    }
    engine._exec_schedule, engine._INSTRUCTION_MAP = executed, table

    def stop() -> None:
        if vars(engine).get("_exec_schedule") is executed:
            del engine._exec_schedule
        if vars(engine).get("_INSTRUCTION_MAP") is table:
            del engine._INSTRUCTION_MAP

    return stop
