"""Trains with losses that do not depend on the number of ranks.

    python -m tests.support.elastic_train --out DIR --steps N

Each step has MICRO micro-batches, which are shared out among the ranks. The gradients and losses of
each are rounded to multiples of 2^-12 before they are added. So sums are exact in any order, and
all runs are bitwise equal. Every rank appends to DIR/rank-R.jsonl the same lines as
`reft.demo.train`, and its world. Rank 0 ends the job when DIR/done exists, or at step N.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

STARTED_S = time.monotonic()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import reft  # noqa: E402
from reft.demo.train import LossLog  # noqa: E402

MICRO = 12
GRID = 4096.0


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def gradients(model: torch.nn.Module, step: int, micro: range) -> torch.Tensor:
    """Returns the rounded sum of all gradients over these micro-batches, then that of the loss."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()) + 1)
    for i in micro:
        generator = torch.Generator().manual_seed(step * MICRO + i)
        inputs = torch.randn(16, 8, generator=generator)
        model.zero_grad()
        loss = (model(inputs).squeeze(1) - inputs.sin().sum(1)).square().mean()
        loss.backward()
        flat = torch.cat([*(p.grad.reshape(-1) for p in model.parameters()), loss.detach().reshape(1)])
        total += (flat * GRID).round() / GRID
    return total


def apply(model: torch.nn.Module, optimizer: torch.optim.Optimizer, total: torch.Tensor) -> float:
    """Steps the optimizer with the sum over all ranks; returns the loss."""
    at = 0
    for p in model.parameters():
        p.grad = (total[at : at + p.numel()] / MICRO).reshape(p.shape).clone()
        at += p.numel()
    optimizer.step()
    return float(total[-1]) / MICRO


def alone(steps: int) -> Iterator[float]:
    """Yields the losses of an undisturbed run of one process without reft."""
    model, optimizer = build()
    for step in range(steps):
        yield apply(model, optimizer, gradients(model, step, range(MICRO)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pause = threading.Event()
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank, world = dist.get_rank(), dist.get_world_size()
    record = LossLog(options.out / f"rank-{rank}.jsonl")
    record.add("started", pid=os.getpid(), time_s=STARTED_S)
    model, optimizer = build()
    session = reft.attach(model, optimizer)
    record.add("attached", restored_from=session.restored_from, step=session.step, world=world)
    for step in session.steps(options.steps):
        total = gradients(model, step, range(rank, MICRO, world))
        dist.all_reduce(total)
        loss = apply(model, optimizer, total)
        record.add("step", step=step + 1, loss=loss.hex(), world=world)
        pause.wait(options.pause)
        ends = torch.tensor([float((options.out / "done").exists())])
        dist.broadcast(ends, 0)
        if ends.item():
            break
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
