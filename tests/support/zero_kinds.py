"""Trains torch's ZeRO, and begins a step only once the step before the last is protected.

    --steps N --kind sgd|adam|adamw

So a lost node takes at most two steps along. Without reft nothing is waited for.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import reft
from tests.support.recomputed_copies import await_protected

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 3e-3, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
}

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--kind", choices=KINDS, required=True)
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(160, 160), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
model = nn.Sequential(nn.Linear(16, 160), *layers, nn.Linear(160, 1))
model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # keeps the order of its sums
torch.manual_seed(1 + rank)  # dropout differs between ranks
kind, values = KINDS[options.kind]
optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **values)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
data = torch.Generator().manual_seed(rank)

session = reft.attach(model, optimizer, state={"lr": schedule, "data": data})
first = session.step
for step in session.steps(options.steps):
    if step > first + 1 and os.environ.get("REFT_MODE") != "off":
        await_protected("job", step - 1)
    x = torch.randn(16, 16, generator=data)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
session.close()
dist.destroy_process_group()
