"""A small training for `reft-cli rehearse`: clean, or with one fault that users make.

python -m tests.support.rehearsed_loop [--fault prefetch]
"""

import argparse
import random

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import reft

FAULTS = ("", "prefetch", "moved", "drawn", "scheduler", "ema", "worker", "hash", "position", "epoch")
STEPS, EPOCH = 200, 8


class Draws:
    """Batches from a generator of its own, held in state=."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __next__(self):
        return torch.randn(4, 8, generator=self.generator)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


class Rows(Dataset):
    """EPOCH batches of one row; noisy rows have a draw that nothing seeds."""

    def __init__(self, is_noisy):
        self.is_noisy = is_noisy

    def __len__(self):
        return EPOCH

    def __getitem__(self, index):
        noise = random.Random().random() if self.is_noisy else 0.0
        return torch.full((8,), index + noise)


def words():
    """Returns batches in the order of a set of texts: another one in each process."""
    while True:
        for word in {"zero", "one", "two", "three", "four", "five", "six", "seven"}:
            yield torch.full((4, 8), float(len(word) + ord(word[0])))


def rows(loader):
    """Returns batches of one epoch after the other."""
    while True:
        yield from loader


def epochs(first):
    """Returns batches in an order that follows from the epoch."""
    for epoch in range(first, STEPS):
        yield from torch.randn(EPOCH, 4, 8, generator=torch.Generator().manual_seed(epoch))


def main(fault):
    random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = StepLR(optimizer, 4, gamma=0.9)
    average = AveragedModel(model)
    data = Draws() if fault != "drawn" else reft.ResumableLoader(DataLoader(Rows(False), batch_size=1))
    state = {"lr": schedule, "average": average, "data": data}
    forgotten = {
        "scheduler": "lr",
        "ema": "average",
        "position": "data",
        "worker": "data",
        "hash": "data",
        "epoch": "data",
    }
    state.pop(forgotten.get(fault, ""), None)
    session = reft.attach(model, optimizer, state=state)
    if fault == "position":
        data = rows(DataLoader(Rows(False), batch_size=1))
    elif fault == "worker":
        data = rows(DataLoader(Rows(True), batch_size=1, num_workers=1))
    elif fault == "hash":
        data = words()
    elif fault == "epoch":
        data = epochs(-(-session.step // EPOCH))
    elif fault == "moved":
        torch.rand(3)
    elif fault == "drawn":
        data = data.endless()
    begun = session.step
    batch = next(data) if fault == "prefetch" else None
    while session.step < STEPS:
        batch = next(data) if fault != "prefetch" else batch
        if fault == "drawn" and session.step == begun:
            torch.rand(3)  # after the batch
        loss = model(batch).square().mean()
        batch = next(data) if fault == "prefetch" else None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        session.step_end()
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="")
    main(parser.parse_args().fault)
