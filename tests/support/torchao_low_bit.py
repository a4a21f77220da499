"""LoRA over a quantised base with one of torchao's low-bit optimizers: `… BASE OPTIMIZER`."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

import reft

BASES = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}
OPTIMIZERS = {"AdamW8bit": AdamW8bit, "AdamW4bit": AdamW4bit, "AdamWFp8": AdamWFp8}
WIDTH, RANK = 64, 128  # adapters of 8,192 elements: torchao keeps smaller ones in fp32
STEPS = 60  # nobody foresees the state, so some steps pass until the ranks have a layout for it
SEALED = 20  # each of so many first steps waits a second at most until it is whole


class Adapted(nn.Module):
    """A frozen, quantised linear layer beside a trainable one of low rank."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        quantize_(self.base, BASES[base]())
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK), nn.Linear(RANK, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


parser = argparse.ArgumentParser()
parser.add_argument("base", choices=BASES)
parser.add_argument("optimizer", choices=OPTIMIZERS)
arguments = parser.parse_args()
torch.manual_seed(0)
model: nn.Module = nn.Sequential(Adapted(arguments.base), nn.Tanh(), Adapted(arguments.base))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    # Every rank has the same seed. DDP can't broadcast quantised weights.
    model = nn.parallel.DistributedDataParallel(model, init_sync=False, find_unused_parameters=True)
optimizer = OPTIMIZERS[arguments.optimizer]([each for each in model.parameters() if each.requires_grad], lr=1e-3)
losses: list[float] = []
with reft.attach(model, optimizer) as session:
    for step in session.steps(STEPS):
        if step < SEALED:
            session.seal(timeout=1.0)
        inputs = torch.randn(8, WIDTH)
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    session.seal()
if dist.is_initialized():
    dist.destroy_process_group()
