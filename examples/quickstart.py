"""A whole training loop with reft: epochs of a DataLoader, validation, and the best loss.

REFT_JOB=first python examples/quickstart.py                              one process
torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=first
examples/quickstart.py
"""

import argparse
import os
from pydoc_data import topics  # English text that every Python has

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import reft

CONTEXT = 32


class Text(Dataset):
    """Pieces of a text: some bytes, and the byte after them."""

    def __init__(self, text: str):
        self.bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()

    def __len__(self):
        return (len(self.bytes) - CONTEXT) // CONTEXT

    def __getitem__(self, index):
        begin = index * CONTEXT + int(torch.randint(CONTEXT, ()))  # another piece in each epoch
        return self.bytes[begin : begin + CONTEXT], self.bytes[begin + CONTEXT]


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--chars", type=int, default=200_000)
options = parser.parse_args()
epochs = options.epochs

torch.manual_seed(0)
text = "\n".join(topics.topics.values())[: options.chars]
train, valid = Text(text[: -len(text) // 10]), Text(text[-len(text) // 10 :])
model = nn.Sequential(
    nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 256)
)
sampler = None
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(train)
is_first = not dist.is_initialized() or dist.get_rank() == 0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
loader = DataLoader(train, batch_size=32, sampler=sampler, shuffle=sampler is None, num_workers=2)
loader = reft.ResumableLoader(loader)
loop = reft.Values(best=1e9)


def loss_of(x, y):
    return nn.functional.cross_entropy(model(x), y)


@torch.no_grad()
def validate():
    """Returns the mean loss of all ranks: with one held value for all, their number may change."""
    model.eval()
    losses = [loss_of(x, y) for x, y in DataLoader(valid, batch_size=256)]
    model.train()
    loss = torch.stack(losses).mean()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


session = reft.attach(model, optimizer, state={"lr": schedule, "data": loader, "loop": loop})
for epoch in loader.epochs(epochs):
    for x, y in loader:
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.step_end()
    schedule.step()
    valid_loss = validate()
    loop.best = min(loop.best, valid_loss)
    if is_first:
        print(f"epoch {epoch}  step {session.step}  loss {valid_loss:.4f}  best {loop.best:.4f}", flush=True)
session.close()
if dist.is_initialized():
    dist.destroy_process_group()
