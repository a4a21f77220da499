"""A training in epochs with a reft.ResumableLoader, which dies where the options say."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reft
from tests.support.drawing_data import loader_of

EPOCHS = 3
DYING_EPOCH = 1


def train(spec: dict[str, Any]) -> None:
    """Trains one rank; writes what each step and each validation had to spec["out"].

    options: "kind" and "workers" of `datasets.loader_of`; "dies" is the place of a SIGKILL.
    """
    multiprocessing.current_process()._config["daemon"] = False  # loaders start workers
    multiprocessing.set_start_method("fork", force=True)  # as in a user's script; ours comes from a fork server
    torch.set_num_threads(1)
    options, rank = spec["options"], spec["rank"]
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    if spec["world"] > 1:
        store = f"tcp://127.0.0.1:{spec['port']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=spec["world"])
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = reft.ResumableLoader(loader_of(options["kind"], options["workers"], rank))
    session = reft.attach(model, optimizer, state={"data": loader}, daemon=spec["daemon"], job=spec["job"])
    resumed_at, events = session.step, []

    def die_at(place: str) -> None:
        if place == options.get("dies"):
            session.seal(timeout=60)
            os.kill(os.getpid(), signal.SIGKILL)

    for epoch in loader.epochs(EPOCHS):
        if epoch == DYING_EPOCH + 1:
            die_at("between epochs")
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step_end()
            events.append([session.step, epoch, batch.tolist(), loss.item()])
            if epoch == DYING_EPOCH and loader.batch == 2:
                die_at("mid-epoch")
            if epoch == DYING_EPOCH and loader.batch == options["batches"]:
                die_at("last batch")
        events.append([session.step, epoch, "validation", torch.rand(()).item()])
        if epoch == DYING_EPOCH:
            die_at("in validation")
    session.close()
    Path(spec["out"]).write_text(json.dumps({"resumed_at": resumed_at, "events": events}))
    if dist.is_initialized():
        dist.destroy_process_group()
