"""A training with what a rehearsal may reach: validation, epochs, checkpoints after a restart.

python -m tests.support.reached_loop
"""

import io

import torch
from torch import nn
from torch.utils.data import DataLoader

import reft

EPOCH = 3  # batches


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = reft.ResumableLoader(DataLoader(torch.randn(4 * EPOCH, 8), batch_size=4, shuffle=True))
    session = reft.attach(model, optimizer, state={"data": loader})
    for _ in loader.epochs(50):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            session.step_end()
        with torch.no_grad():
            model.eval()(torch.ones(4, 8))
        model.train()
        if session.restored_from:
            torch.save(model.state_dict(), io.BytesIO())  # the checkpoint
    session.close()


if __name__ == "__main__":
    main()
