"""Tests of torch's pipeline schedules: order of actions and gaps, durations, and copied bytes.

The stages are scripted (tests/support/stages.py), so the loops are torch's and the times are exact.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from reft import schedules
from reft.client.schedule import hooks
from reft.client.schedule.iteration_profile import OTHER, IterationProfiler
from reft.client.snapshot.cpu_engine import CpuCopyEngine
from reft.core.pipeline import actions
from reft.core.pipeline.actions import ActionKind, Times
from reft.core.pipeline.course import Priority
from reft.core.pipeline.pacing import Tier
from reft.errors import ConfigError
from tests.support.daemons import until
from tests.support.snapshot import Taken
from tests.support.stages import Clock, ScriptedStage

P, M = 4, 8
TIMES = Times(1.0, 2.0)
KINDS = {"1F1B": (Schedule1F1B, actions.one_f_one_b), "GPipe": (ScheduleGPipe, actions.gpipe)}


class Played:
    """One stage of a simulated pipeline, followed by a profiler."""

    def __init__(self, kind: str, stage: int, doing=lambda action: None) -> None:
        torch_schedule, order = KINDS[kind]
        spans = actions.simulate([order(s, P, M) for s in range(P)], TIMES)
        self.ends = max(each[-1].end for each in spans)
        self.clock = Clock()
        self.stage = ScriptedStage(stage, P, spans[stage], self.clock, doing)
        self.schedule = torch_schedule(self.stage, M)
        self.copy_engine = CpuCopyEngine([], self.clock)
        self.profiler = IterationProfiler(self.copy_engine, hooks.closed(self.schedule))
        self.stop = hooks.follow(self.schedule, self.profiler)
        self.steps = 0

    def mark(self):
        self.steps += 1
        return self.profiler.mark(self.steps)

    def train(self) -> None:
        """Runs one window, from a mark to the fence; at the end all stages meet."""
        began = self.clock.now
        self.schedule.step(return_outputs=False)
        self.profiler.enter(Tier.GAP, "wait")
        if self.clock.now < began + self.ends:
            self.stage.waiting()
        self.clock.now = began + self.ends
        self.profiler.enter(Tier.COMPUTE, OTHER)
        self.profiler.fence()

    def close(self) -> None:
        self.stop()
        self.copy_engine.close()


@pytest.mark.parametrize("stage", range(P))
@pytest.mark.parametrize("kind", KINDS)
def test_gaps_of_torchs_schedules_are_those_of_the_closed_form(kind, stage):
    seen = []
    played = Played(kind, stage, lambda action: seen.append((action, played.profiler.name)))
    for _ in range(3):
        played.mark()
        played.train()
    played.mark()
    comparison = played.profiler.comparison()
    assert comparison.differences and comparison.worst == comparison.total == 0.0
    assert sum(each.measured for each in comparison.differences) == (P - 1) * (TIMES.forward + TIMES.backward)
    order = KINDS[kind][1](stage, P, M)
    names = [f"{action.kind.value}{action.microbatch}" for action in order]
    assert seen == 3 * list(zip(order, names, strict=True)), "each action runs in a stretch of its own name"
    events = [
        e for e in played.copy_engine.copy_stats.timeline.events() if e.track == "training" and e.end_s > e.begin_s
    ]
    gaps = [(e.name, e.end_s - e.begin_s) for e in events if e.name.startswith("gap")][: len(comparison.differences)]
    expected = [(f"gap {each.place}", each.foreseen) for each in comparison.differences if each.place < 2 * M]
    assert gaps[: len(expected)] == expected
    played.close()


@pytest.mark.parametrize("stage", range(P))
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_go_into_gaps_only_if_these_suffice(kind, stage):
    tensors = {"w": torch.randn(300, 300)}

    def doing(action) -> None:
        at_gate()
        beside.append(len(taken.chunks))

    def at_gate() -> None:
        until(lambda: taken.ended.is_set() or played.copy_engine._throttle._changed[Priority.IDLE]._waiters)

    played = Played(kind, stage)
    taken, beside = Taken(tensors, set()), []
    played.copy_engine.copy_stats.moved(
        Tier.GAP, taken.save_plan.written_bytes, 5.0
    )  # all of it fits into 5 of 9 idle seconds
    for _ in range(2):
        played.mark()
        played.train()
    played.stage.doing, played.stage.waiting = doing, at_gate
    taken.paced(played.mark())
    taken.start(played.copy_engine)
    at_gate()
    played.train()
    played.copy_engine.fence()
    assert taken.ended.wait(20) and taken.error is None
    assert played.copy_engine.copy_stats.written(Tier.GAP) == taken.save_plan.written_bytes
    assert beside[-1] == len(taken.chunks)
    if played.stage.spans[0].start == 0:
        assert beside[0] == 0, "nothing goes before the first gap"
    played.close()


def test_hooks_are_removed():
    played = Played("1F1B", 1)
    wait = dist.Work.wait
    assert "forward_one_chunk" in vars(played.stage) and "step" in vars(played.schedule)
    played.stop()
    assert "forward_one_chunk" not in vars(played.stage) and "step" not in vars(played.schedule)
    assert dist.Work.wait is not wait
    played.copy_engine.close()


def test_an_error_in_a_stage_reaches_the_user():
    played = Played("GPipe", 0)

    def doing(action) -> None:
        if action.kind is ActionKind.BACKWARD:
            raise ValueError("out of memory")

    played.stage.doing = doing
    played.mark()
    with pytest.raises(ValueError, match="out of memory"):
        played.schedule.step(return_outputs=False)
    assert played.profiler.name == OTHER
    played.close()


class Engine:
    """Executes instructions like DeepSpeed's PipelineEngine: from a table of the class."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def _instruct(self, name: str) -> None:
        self.said.append(f"{name} in {self.profiler.name}")

    names = (
        "RecvActivation",
        "ForwardPass",
        "SendActivation",
        "RecvGrad",
        "BackwardPass",
        "ReduceGrads",
        "OptimizerStep",
    )
    _INSTRUCTION_MAP: ClassVar = {
        type(name, (), {}): partial(lambda name, self: self._instruct(name), name) for name in names
    }

    def _exec_schedule(self, schedule: list[str]) -> None:
        table = {kind.__name__: call for kind, call in self._INSTRUCTION_MAP.items()}
        for name in schedule:
            MethodType(table[name], self)()


def test_deepspeeds_pipeline_is_idle_between_actions():
    engine = Engine()
    copy_engine = CpuCopyEngine([], Clock())
    engine.profiler = IterationProfiler(copy_engine, hooks.closed(engine))
    stop = hooks.follow(engine, engine.profiler)
    hooks.check(engine)
    for _ in range(2):  # the second step starts to count at zero
        engine.said = []
        engine.profiler.mark(1)
        engine._exec_schedule([*Engine.names[:5], "ForwardPass", *Engine.names[5:]])
        assert engine.said == [
            "RecvActivation in gap 0", "ForwardPass in F0", "SendActivation in gap 1", "RecvGrad in gap 1",
            "BackwardPass in B0", "ForwardPass in F1", "ReduceGrads in ReduceGrads", "OptimizerStep in OptimizerStep",
        ]  # fmt: skip
        assert engine.profiler.name == OTHER
        engine.profiler.fence()
    stop()
    assert "_exec_schedule" not in vars(engine) and engine._INSTRUCTION_MAP is Engine._INSTRUCTION_MAP
    copy_engine.close()


def test_an_unknown_schedule_is_refused():
    played = Played("1F1B", 1)
    for known in (None, schedules.OneFOneB(0, 2, 4), schedules.Custom(), Schedule1F1B(played.stage, M)):
        hooks.check(known)
    played.stop()
    with pytest.raises(ConfigError, match="schedule is a str"):
        hooks.check("1F1B")
