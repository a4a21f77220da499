"""Trains with Lightning on a data set without a length: one process, four-step epochs.

EPOCHS in the environment is the number of epochs. With VALIDATES=1 each epoch ends with a
validation.
"""

import os

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from reft.integrations.lightning import ReftCallback


class Draws(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(4):
            yield torch.rand(16) + i, torch.tensor([i / 4])


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1)
        self.losses = []

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append((self.global_step, self.current_epoch, batch[1].item(), loss.item()))
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class Whole(Callback):
    """Waits before each step until the step before is whole."""

    def on_train_batch_start(self, *_):
        guard.session.seal()


lightning.seed_everything(0)
model, guard = Line(), ReftCallback()
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=int(os.environ.get("EPOCHS", "3")), logger=False, num_sanity_val_steps=0,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[guard, Whole()],
)  # fmt: skip
validated = torch.utils.data.DataLoader(Draws(), batch_size=1) if "VALIDATES" in os.environ else None
trainer.fit(model, torch.utils.data.DataLoader(Draws(), batch_size=1), validated)
