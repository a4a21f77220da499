"""Trains a mixture of experts in plain torch with EP: a script for `run_example`.

Each rank holds two experts that no other rank holds. All other layers are replicas. Each token goes
to the rank of its expert, and comes back.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import reft
from tests.support.batches import Batches

WIDTH, INNER, OF_A_RANK = 64, 256, 2


class Experts(nn.Module):
    """The experts of all ranks, of which this rank holds its own, by their numbers among all."""

    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world
        made = [nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(self.count)]
        own = range(rank * OF_A_RANK, (rank + 1) * OF_A_RANK)
        self.held = nn.ModuleDict({str(number): made[number] for number in own})

    @property
    def count(self):
        return self.world * OF_A_RANK

    def forward(self, tokens, expert):
        """Sends each token to its expert, and returns the results in the order of the tokens."""
        order = expert.argsort(stable=True)
        sent = expert.bincount(minlength=self.count)  # tokens for each expert
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        received = received.view(self.world, OF_A_RANK)  # by source, then by own expert
        to, by = sent.view(self.world, OF_A_RANK).sum(1).tolist(), received.sum(1).tolist()
        here = all_to_all_single_autograd(tokens[order], by, to, dist.group.WORLD)
        parts, blocks = here.split(received.flatten().tolist()), list(self.held.values())
        done = torch.cat([blocks[i % OF_A_RANK](part) for i, part in enumerate(parts)])
        back = all_to_all_single_autograd(done, to, by, dist.group.WORLD)
        return back[order.argsort()]


class Mixture(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.embed, self.experts, self.head = nn.Linear(16, WIDTH), Experts(rank, world), nn.Linear(WIDTH, 1)
        self.router = nn.Linear(WIDTH, self.experts.count)

    def forward(self, x):
        x = self.embed(x).tanh()
        weight, expert = self.router(x).softmax(1).max(1)
        return self.head(x + weight[:, None] * self.experts(nn.functional.dropout(x, 0.1), expert))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
steps = parser.parse_args().steps

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Mixture(rank, world)
torch.manual_seed(1 + rank)  # dropout differs between ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
data = Batches(32, seed=rank)

losses = []
session = reft.attach(model, optimizer, state={"lr": schedule, "data": data})
for step in session.steps(steps):
    x, y = data.next()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("experts."):  # an expert's gradient comes from the tokens of all ranks
            dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    schedule.step()
    losses.append((step, loss.item()))
session.close()
dist.destroy_process_group()
