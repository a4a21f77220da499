"""The training script of the demo: `torchrun … -m reft.demo.train --out DIR`.

Only `attach` and `steps` belong to reft. Every rank appends to DIR/rank-R.jsonl, one JSON object a
line, with times in seconds of the machine's monotonic clock:
    {"event": "started",  "pid": …, "time_s": …}                the first line of this file has run
    {"event": "attached", "restored_from": …, "step": …,        what reft.attach has restored
     "load_s": …, "time_s": …}
    {"event": "step", "step": n, "loss": float.hex, "time_s": …}         n steps are completed now
At the end it writes DIR/rank-R.digests.json: name → SHA-256 of the bytes of every tensor and random
generator.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

STARTED_S = time.monotonic()

import grpc  # noqa: E402, F401  (attach imports grpc: import it here, so that load_s is only the load)
import torch  # noqa: E402  (after STARTED_S: the import takes a second)
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import reft  # noqa: E402
from reft.demo.data import Loader, manual  # noqa: E402
from reft.demo.model import Llama, ModelShape  # noqa: E402

WARM_UP = 10  # steps


class LossLog:
    """Lines that survive the SIGKILL of their writer: each line is one write to the kernel."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, event: str, **values: Any) -> None:
        """Appends one line; `time_s` is now unless it is given."""
        line = {"event": event, "time_s": time.monotonic(), **values}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def main() -> None:
    """Runs one rank from start to end."""
    options = parse()
    torch.set_num_threads(1)
    # A peer that hangs is an error after one minute; torch's default is half an hour.
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank, world = dist.get_rank(), dist.get_world_size()
    record = LossLog(options.out / f"rank-{rank}.jsonl")
    record.add("started", pid=os.getpid(), time_s=STARTED_S)
    torch.manual_seed(options.seed)
    model = Llama(ModelShape())
    torch.manual_seed(options.seed + 1 + rank)  # dropout differs between ranks
    # DDP regroups gradients after the first backward pass of a process. The grouping sets the order
    # in which the gradients of more than two ranks are added. So the first step after a restart
    # would round differently than in an undisturbed run. With find_unused_parameters the first
    # grouping stays.
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, options.steps))
    loader = Loader(manual(), options.batch, ModelShape.context, rank, world, options.seed)

    began_s = time.monotonic()
    session = reft.attach(ddp, optimizer, state={"lr": schedule, "data": loader}, tolerate=options.tolerate)
    load_s = time.monotonic() - began_s
    record.add("attached", restored_from=session.restored_from, step=session.step, load_s=load_s)
    for step in session.steps(options.steps):
        inputs, targets = next(loader)
        loss = ddp(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        record.add("step", step=step + 1, loss=loss.item().hex())
    session.seal()
    session.close()
    digests = digest(model, optimizer)
    draft = options.out / f"rank-{rank}.digests.new"
    draft.write_text(json.dumps(digests))
    draft.rename(options.out / f"rank-{rank}.digests.json")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one rank in a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerate", type=int, help="lost nodes to survive; attach's own choice if not given")
    return parser.parse_args()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the parameter groups: matrices have weight decay, norms have none."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def warm_up_then_cosine(step: int, total: int) -> float:
    """Returns the factor of the learning rate."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(total - WARM_UP, 1)))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns name → SHA-256 of every parameter, optimizer tensor and the random generator."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"parameter {name}"] = parameter
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer {name}.{key}"] = value
    tensors["random generator"] = torch.get_rng_state()
    return {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in tensors.items()}


def raw(tensor: torch.Tensor) -> bytes:
    """Returns a tensor's bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
