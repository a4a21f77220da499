"""The trainer of bench/recovery.py: a small DDP model, and a line for each phase of a start.

Appends to OUT/marks, one line of JSON each: {"node", "rank", "pid", "mark", "at"}. `at` is the time
of the machine's clock (seconds since 1970), like in torchrun's log.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

STARTED = time.time()


def born() -> float:
    """Returns when this process began, to a clock tick."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Trains one rank until a file `done` lies in OUT. Only rank 0 looks for the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True, help="at most")
    options = parser.parse_args()
    marks = os.open(options.out / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    me = {
        "node": Path(os.environ.get("REFT_TEST_NODE", "here")).name,
        "rank": int(os.environ["RANK"]),
        "pid": os.getpid(),
    }

    def mark(name: str, at: float | None = None) -> None:
        os.write(marks, json.dumps({**me, "mark": name, "at": at or time.time()}).encode() + b"\n")

    mark("born", born())
    mark("started", STARTED)
    import torch
    import torch._dynamo
    import torch.distributed as dist

    import reft
    import reft.client.attach.api

    mark("imported")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    dist.barrier()
    mark("connected")
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters())
    session = reft.attach(ddp, optimizer)
    mark("loaded")
    for step in session.steps(options.steps):
        time.sleep(0.05)
        optimizer.zero_grad()
        ddp(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        mark(f"step {step + 1}")
        done = torch.tensor([float((options.out / "done").exists())])
        dist.broadcast(done, 0)
        if done.item():
            break
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
