"""Trains torch's ZeRO under protect="aor", and waits until each step is protected."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import reft
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemons import until

MARKS = 6
WIDTH = 200  # a moment of such a layer is too large for a capsule
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"kind": torch.optim.AdamW},
    "adam-l2": {"kind": torch.optim.Adam, "weight_decay": 0.1, "amsgrad": True},
    "sgd": {"kind": torch.optim.SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


def work(rank: int, world: int, port: int, daemon: str, out: str) -> None:
    """Runs all cases in one process of the group, and writes how each turn was made."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), REFT_DAEMON=daemon)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    try:
        dist.init_process_group("gloo")
        for name, case in CASES.items():
            results[name] = train(name, **case)
        dist.destroy_process_group()
    except BaseException:
        results["error"] = traceback.format_exc()
    Path(out, f"{rank}.json").write_text(json.dumps(results))


def train(name: str, kind: type, **values: Any) -> dict[str, Any]:
    """Returns how each turn was made on this node, and the numbers on records."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), kind, lr=1e-3, **values)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    turns = []
    with reft.attach(ddp, optimizer, state={"scheduler": scheduler}, job=name, protect="aor") as session:
        for step in session.steps(MARKS):
            if step:
                turns.append(await_protected(name, step))
            optimizer.zero_grad()
            torch.manual_seed(1000 * step + dist.get_rank())
            ddp(torch.randn(8, WIDTH)).square().sum().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        turns.append(await_protected(name, MARKS))
        stats = session.stats()
    return {"turns": turns, "stats": {key: value for key, value in stats.items() if key.startswith("record")}}


def await_protected(job: str, step: int) -> str:
    """Waits until a step is protected; returns why this node did not recompute it."""
    with rpc.channel(os.environ["REFT_DAEMON"]) as channel:
        stub = pb_grpc.DaemonStub(channel)

        def exchange() -> pb.ExchangeStatus | None:
            found = stub.Status(pb.StatusRequest(job=job), timeout=20).jobs[0].exchange
            return found if found.protected >= step else None

        (replay,) = until(exchange, 100, f"protected({step})").replays
        return replay.reason
