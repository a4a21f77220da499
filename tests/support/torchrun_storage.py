"""A script for torchrun: DDP on two ranks, with a checkpoint at one step; its last line is JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import reft

PACE = threading.Event()  # never set


def main() -> None:
    """Trains to step 10. With an argument: waits for a checkpoint at step 6 there, and dies."""
    storage = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    session = reft.attach(model, optimizer)
    began = session.step
    for step in session.steps(10):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if storage is not None and step == 6:
            session.seal(timeout=60)
            session.persist()
            while not list(storage.glob("*/*/e*/MANIFEST.json")):
                PACE.wait(0.05)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    state = [*model.state_dict().values(), *(each["exp_avg_sq"] for each in optimizer.state.values())]
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in state)).hexdigest()
    session.close()
    if dist.get_rank() == 0:
        print(json.dumps({"began": began, "from": session.restored_from, "digest": digest}), flush=True)


if __name__ == "__main__":
    main()
