"""A loop as tutorials have it: a prefetched batch, a best loss, a DataLoader made after attach."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import reft
from tests.support.trainers import Trainers

WIDTH = 1 << 10
ROWS = 32  # a batch has 128 KiB, so it is a leaf


def train(spec: dict[str, Any]) -> None:
    """Trains one rank; writes its losses, and what it had at attach and at its end."""
    os.environ.update(spec["environment"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options, steps, rank, world = spec["options"], spec["steps"], spec["rank"], spec["world"]
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if world > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{spec['port']}", rank=rank, world_size=world)
        model = torch.nn.parallel.DistributedDataParallel(model)
    seeded = torch.Generator().manual_seed(rank)
    data = TensorDataset(torch.randn(ROWS * (steps + 1), WIDTH, generator=seeded))
    # A first value of the batch's size, so that the slots have room from the first step on.
    loop = reft.Values(best=1e9, batch=torch.zeros(ROWS, WIDTH))
    session = reft.attach(model, optimizer, state={"loop": loop}, job=spec["job"], daemon=spec["daemon"])
    began = {"step": session.step, "best": loop.best}
    # iter() draws a seed from the global generator. The batches that were read are skipped.
    is_fresh = session.restored_from is None
    batches = islice(iter(DataLoader(data, batch_size=ROWS)), 0 if is_fresh else session.step + 1, None)
    if is_fresh:
        (loop.batch,) = next(batches)
    losses = []
    for step in marked(session, steps) if options.get("marks") else session.steps(steps):
        if step in options.get("seal_at", ()):
            session.seal(timeout=60)
        loss = model(loop.batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        loop.best = min(loop.best, loss.item())
        (loop.batch,) = next(batches)
        if step == options.get("die_at") and session.restored_from is None:
            os.kill(os.getpid(), 9)
    sealed = session.seal(timeout=60)
    session.close()
    end = {"best": loop.best, "batch": float(loop.batch.sum()), "draw": float(torch.rand(()))}
    if world > 1:
        dist.destroy_process_group()
    Path(spec["out"]).write_text(json.dumps({"began": began, "losses": losses, "end": end, "sealed": sealed.whole}))


def marked(session: reft.Session, steps: int) -> Any:
    """Yields the steps of a loop that marks its steps by itself."""
    while session.step < steps:
        yield session.step
        session.step_end()


class LoopTrainers(Trainers):
    """Ranks that run this loop."""

    target = staticmethod(train)
