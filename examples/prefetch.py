"""A loop that fetches the next batch while this one trains, with reft.

REFT_JOB=ahead python examples/prefetch.py
"""

import argparse

import torch
from torch import nn

import reft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
draws = torch.Generator().manual_seed(1)  # a generator of its own: nobody else draws from it


def next_batch():
    x = torch.randn(32, 16, generator=draws)
    return x, x.sum(1, keepdim=True).sin()


# The batch of the next step has been fetched at the mark, so that batch is state too.
loop = reft.Values(batch=None, best=float("inf"))
session = reft.attach(model, optimizer, state={"draws": draws, "loop": loop})
if loop.batch is None:
    loop.batch = next_batch()
for step in session.steps(steps):
    x, y = loop.batch
    loss = nn.functional.mse_loss(model(x), y)
    loop.batch = next_batch()  # on a GPU: while the device computes the loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loop.best = min(loop.best, loss.item())
    if (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}, best {loop.best:.4f}", flush=True)
session.close()
