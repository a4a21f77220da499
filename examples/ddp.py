"""Your own training with reft: only the lines that name reft are new.

python examples/ddp.py                                                    one process
torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 examples/ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import reft


class Data:
    """Batches that continue after a restart, by state_dict and load_state_dict."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def next(self):
        x = torch.randn(32, 16, generator=self.generator)
        return x, x.sum(1, keepdim=True).sin()

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
rank = dist.get_rank() if dist.is_initialized() else 0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
data = Data(seed=rank)

session = reft.attach(model, optimizer, state={"lr": schedule, "data": data})  # restores the state, if reft holds one
for step in session.steps(steps):
    x, y = data.next()  # inside the loop: zip(data, session.steps(n)) would lose a batch at a restart
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if rank == 0 and (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
session.close()
if dist.is_initialized():
    dist.destroy_process_group()
