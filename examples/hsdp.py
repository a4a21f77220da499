"""HSDP: shards within a node, replicas of them on every node. So any node may be lost, and no tensor byte is sent for that.

torchrun --nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-endpoint=storehost:29400 examples/hsdp.py

reft finds from the shards' places in the whole which ranks hold the same bytes: here rank i of each node. daemon/README.md
and reft/elastic/README.md say how to start the daemons and the store for several nodes.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reft


class Data:
    """Batches that go on where they were: that is why it has state_dict and load_state_dict."""

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
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(50, 50), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
model = nn.Sequential(nn.Linear(16, 50), *layers, nn.Linear(50, 1))
local = int(os.environ["LOCAL_WORLD_SIZE"])
mesh = init_device_mesh("cpu", (world // local, local), mesh_dim_names=("replicate", "shard"))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
torch.manual_seed(1 + rank)  # dropout differs between ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
data = Data(seed=rank)

session = reft.attach(model, optimizer, state={"lr": schedule, "data": data})  # brings back what is held
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
