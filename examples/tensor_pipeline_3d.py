"""Tensor, pipeline and data parallel training at once: TP 2 x PP 2 x DP 2, 1F1B, on eight ranks.

torchrun --nproc-per-node=8 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1
examples/tensor_pipeline_3d.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reft

WORDS, WIDTH, LAYERS, BATCH, LENGTH, MICROBATCHES = 64, 32, 4, 8, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Part(nn.Module):
    """One stage of the model.

    Its parameters have the names that they have in the whole model: reft identifies them by name.
    """

    def __init__(self, stage, stages):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH) if stage == 0 else None
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS) if i * stages // LAYERS == stage})
        self.head = nn.Linear(WIDTH, WORDS) if stage == stages - 1 else None

    def forward(self, x):
        x = self.embed(x) if self.embed else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head else x


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))  # tp pairs are neighbours: one node
dp, pp = mesh["dp"].get_group(), mesh["pp"].get_group()
stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
torch.manual_seed(stage)  # the same seed on all data and tensor parallel ranks
model = Part(stage, stages)
for layer in model.layers.values():
    parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
schedule = Schedule1F1B(
    PipelineStage(model, stage, stages, torch.device("cpu"), group=pp), MICROBATCHES,
    loss_fn=lambda y, target: nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # plain tensors and DTensors in one group
data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())

session = reft.attach(model, optimizer, schedule, state={"data": data})  # restores the state, if reft holds one
for step in session.steps(steps):
    words = torch.randint(WORDS, (BATCH, LENGTH), generator=data)
    target, losses = (words + 1) % WORDS, []
    optimizer.zero_grad()
    if stage == 0:
        schedule.step(words)
    else:
        schedule.step(target=target, losses=losses)
    for parameter in model.parameters():
        dist.all_reduce(local(parameter.grad), group=dp)
        parameter.grad /= mesh["dp"].size()
    optimizer.step()
    if losses and dist.get_rank() == dist.get_world_size() - 1 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
session.close()
dist.destroy_process_group()
