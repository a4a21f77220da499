"""This reft restores a job from an earlier reft, bit for bit.

The job was left in a node's memory. golden/held-0.1.tar.gz is the folder of the daemon of
2026-11-23 (commit 7f3928b) after SIGKILL: record, slots and capsule of five steps of AdamW on two
linear layers and a BatchNorm, with an LR scheduler. `expected.npz` is the state that training had.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch

import reft
from tests.support.daemons import DaemonProcess

ARCHIVE = Path(__file__).parent / "golden/held-0.1.tar.gz"


def test_the_memory_of_an_earlier_reft_is_restored():
    folder = Path(tempfile.mkdtemp(prefix="reft-test-", dir="/dev/shm"))
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    expected = np.load(folder / "expected.npz")
    (folder / "expected.npz").unlink()
    process = DaemonProcess(folder=folder)
    try:
        torch.manual_seed(1)  # not the seed of the training
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        with reft.attach(model, optimizer, state={"lr": scheduler}, job="golden", daemon=process.address) as session:
            assert (session.step, session.restored_from) == (5, "memory")
            restored = {f"model.{name}": value for name, value in model.state_dict().items()}
            for i, moments in enumerate(optimizer.state.values()):
                restored |= {f"moment.{i}.{name}": value for name, value in moments.items()}
            rate = [optimizer.param_groups[0]["lr"], scheduler.last_epoch]
            restored |= {"random": torch.get_rng_state(), "lr": torch.tensor(rate, dtype=torch.float64)}
            assert restored.keys() == set(expected.files)
            for name, value in restored.items():
                assert value.numpy().tobytes() == expected[name].tobytes(), name
    finally:
        process.close()
