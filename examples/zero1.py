"""ZeRO-1 of torch: DDP, with each parameter's optimizer state on one rank alone.

torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 examples/zero1.py

Parameters are replicas. Optimizer state has one holder: on several nodes each node keeps a copy of
another node's, and recomputes the copy from gradients, beside training. So a lost node takes the
job back to the newest protected step, and nothing is sent. Where recomputing does not keep up, the
daemons send the copies, and from the next start on parity. REFT_PROTECT=aor never gives up.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

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

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
model = nn.Sequential(nn.Linear(16, 256), *layers, nn.Linear(256, 1))
model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # keeps the order of its sums
torch.manual_seed(1 + rank)  # dropout differs between ranks
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
data = Data(seed=rank)

session = reft.attach(model, optimizer, state={"lr": schedule, "data": data})  # restores the state, if reft holds one
for step in session.steps(steps):
    x, y = data.next()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if rank == 0 and (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
session.close()
dist.destroy_process_group()
