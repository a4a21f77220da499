"""Trains with torch's pipeline over gloo, one stage a process; all stages take equal times.

A stage sleeps until its time is over; with options["computes"] it computes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tests.support.trainers import Trainers

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
BATCH = 2  # rows of a microbatch


def rest(began_s: float, seconds: float) -> None:
    """Sleeps until `seconds` after `began_s`."""
    remaining_s = began_s + seconds - time.perf_counter()
    if remaining_s > 0:
        threading.Event().wait(remaining_s)


def compute(began_s: float, seconds: float) -> None:
    """Computes until `seconds` after `began_s`."""
    block = torch.ones(128, 128)
    while time.perf_counter() < began_s + seconds:
        block @ block


class _Paced(torch.autograd.Function):
    """A linear layer whose forward and backward pass take the given times."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, times: tuple[float, float], fill: Callable[[float, float], None]
    ) -> torch.Tensor:  # fmt: skip
        began_s = time.perf_counter()
        ctx.save_for_backward(x, weight)
        ctx.seconds, ctx.fill = times[1], fill
        out = x @ weight
        fill(began_s, times[0])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        began_s = time.perf_counter()
        x, weight = ctx.saved_tensors
        gradients = grad @ weight.t(), x.t() @ grad, None, None
        ctx.fill(began_s, ctx.seconds)
        return gradients


class Part(nn.Module):
    """One stage's part of the model.

    Parameter names contain the stage, so they differ between stages.
    """

    def __init__(
        self, stage: int, width: int, times: tuple[float, float], fill: Callable[[float, float], None]
    ) -> None:  # fmt: skip
        super().__init__()
        self.weights = nn.ParameterDict({f"stage{stage}": torch.randn(width, width) / width})
        self.times, self.fill = times, fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (weight,) = self.weights.values()
        return _Paced.apply(x, weight, self.times, self.fill)


def train(own: dict[str, Any]) -> None:
    """Trains one stage; writes its stats and gaps into its file."""
    import reft

    torch.set_num_threads(1)
    torch.manual_seed(own["rank"])
    options, world, rank = own["options"], own["world"], own["rank"]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{own['port']}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    width, microbatches = options["width"], options["microbatches"]
    if options.get("pinned"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    times = options["forward_s"], options["backward_s"]
    part = Part(rank, width, times, compute if options.get("computes") else rest)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = SCHEDULES[options["schedule"]](stage, microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)
    session = reft.attach(
        part, optimizer, schedule if options.get("followed", True) else None, daemon=own["daemon"], job=own["job"],
        protect="none",
    )  # fmt: skip
    steps = []
    x = torch.randn(BATCH * microbatches, width)
    for step in session.steps(own["steps"]):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        kwargs = {"target": x} if rank == world - 1 else {}
        schedule.step(*((x,) if rank == 0 else ()), **kwargs)
        # Stages wait for each other, as for the norm of all gradients.
        dist.all_reduce(torch.zeros(1))
        optimizer.step()
        steps.append(time.perf_counter() - began_s)
        if step + 1 == options.get("warm", 0):
            before = session.stats()
    # Before seal: the last step's snapshot waits for a gap that does not come.
    after = session.stats()
    sealed = bool(session.seal(30))
    comparison = session._window.profiler.comparison()
    result = {
        "stats": after, "before": before, "sealed": sealed, "steps": steps,
        "idle_threads": len(session._window.snapshots.engine._idle_threads),
        "gaps": [list(each) for each in comparison.differences] if comparison else [],
        "trace": session.timeline(),
    }  # fmt: skip
    Path(own["out"]).write_text(json.dumps(result))
    session.close()
    dist.destroy_process_group()


class Pipeline(Trainers):
    """All stages of one run."""

    target = staticmethod(train)
