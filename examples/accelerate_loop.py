"""A loop on Accelerate with reft: four lines.

python examples/accelerate_loop.py                                        one process
torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1
examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import reft
from reft.integrations.accelerate import attach

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=48)
total = parser.parse_args().steps

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(256, 16)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

losses = []
loader = reft.ResumableLoader(loader)
session = attach(accelerator, model, optimizer, loader, schedule)  # restores the state, if reft holds one
batches = loader.endless()
while session.step < total:
    x, y = next(batches)  # the batch comes first: accumulate asks the loader whether it is the last
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        session.step_end()
        losses.append((session.step, loss.item()))
print(f"loss {loss.item():.4f}", flush=True)
session.close()
accelerator.end_training()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
