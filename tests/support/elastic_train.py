"""Trains with losses that do not depend on the number of ranks.

    python -m tests.support.elastic_train --out DIR --steps N
    python tests/support/elastic_train.py --out DIR --steps N --sharded

Each step has MICRO micro-batches, which are shared out among the ranks. The gradients and losses of
each are rounded to multiples of 2^-12 before they are added. So sums are exact in any order, and
all runs are bitwise equal. Every rank appends to DIR/rank-R.jsonl the same lines as
`reft.demo.train`, and its world; at the end it writes the same digests. Rank 0 ends the job when
DIR/done exists, or at step N.

With --sharded, FSDP2 shards a wider model, whose shards are too large for capsules, and there are
no digests. An older reft can be tested with this file by its path.
"""

from __future__ import annotations

import argparse
import json
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
from reft.cli.demo.records import TrainingResult  # noqa: E402
from reft.demo.train import LossLog, digest  # noqa: E402

MICRO = 12
GRID = 4096.0
WIDTH, SHARDED_WIDTH = 32, 5120


def build(width: int = WIDTH) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    return model, optimize(model, width)


def optimize(model: torch.nn.Module, width: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.32 / width)


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
        gradient = (total[at : at + p.numel()] / MICRO).reshape(p.shape).clone()
        p.grad = gradient if type(p) is torch.nn.Parameter else to_shards(gradient, p)
        at += p.numel()
    optimizer.step()
    return float(total[-1]) / MICRO


def shard(model: torch.nn.Module, world: int) -> torch.nn.Module:
    """Shards a model among all ranks."""
    # Not at the head of the file: the imports take a second, and most jobs have no shards.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def to_shards(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that is sharded as another one is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements)


def gather(shards: torch.nn.Module, model: torch.nn.Module) -> None:
    """Copies all parameters of a sharded model."""
    with torch.no_grad():
        for p, from_shards in zip(model.parameters(), shards.parameters(), strict=True):
            p.copy_(from_shards.full_tensor())


def alone(steps: int, width: int = WIDTH) -> Iterator[float]:
    """Yields the losses of an undisturbed run of one process without reft."""
    yield from _train_alone(*build(width), steps)


def check(result: TrainingResult) -> None:
    """Fails unless all losses, and the state at the end, equal those of an undisturbed run."""
    steps = [step for attempts in result.attempts.values() for attempt in attempts for step in attempt.steps]
    model, optimizer = build()
    losses: list[str] = []
    for loss in _train_alone(model, optimizer, max(step.step for step in steps)):
        losses.append(loss.hex())
        if len(losses) == result.completed:
            assert all(digests == digest(model, optimizer) for digests in result.digests.values())
    assert len(losses) >= result.completed > 0
    assert all(step.loss == losses[step.step - 1] for step in steps)


def _train_alone(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[float]:
    """Trains in one thread, as each rank does: on busy cores threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step in range(steps):
            yield apply(model, optimizer, gradients(model, step, range(MICRO)))
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--sharded", action="store_true", help="shard a wider model with FSDP2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pause = threading.Event()
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank, world = dist.get_rank(), dist.get_world_size()
    record = LossLog(options.out / f"rank-{rank}.jsonl")
    record.add("started", pid=os.getpid(), time_s=STARTED_S)
    width = SHARDED_WIDTH if options.sharded else WIDTH
    model, optimizer = build(width)
    whole = model
    if options.sharded:
        model = shard(build(width)[0], world)
        optimizer = optimize(model, width)
    session = reft.attach(model, optimizer)
    record.add("attached", restored_from=session.restored_from, step=session.step, world=world)
    for step in session.steps(options.steps):
        if options.sharded:
            gather(model, whole)
        total = gradients(whole, step, range(rank, MICRO, world))
        dist.all_reduce(total)
        loss = apply(model, optimizer, total)
        record.add("step", step=step + 1, loss=loss.hex(), world=world)
        pause.wait(options.pause)
        ends = torch.tensor([float((options.out / "done").exists())])
        dist.broadcast(ends, 0)
        if ends.item():
            break
    session.close()
    if not options.sharded:
        digests = options.out / f"rank-{rank}.digests.new"
        digests.write_text(json.dumps(digest(model, optimizer)))
        digests.rename(digests.with_suffix(".json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
