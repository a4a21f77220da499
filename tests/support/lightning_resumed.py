"""Trains with Lightning's own checkpoints and `ckpt_path="last"`: one process, four-step epochs.

The folder of the checkpoints is CHECKPOINTS in the environment.
"""

import os

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from reft.integrations.lightning import ReftCallback


class Sine(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1)
        self.losses = []

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append((self.global_step, self.current_epoch, loss.item()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class Whole(Callback):
    """Waits before each step until the step before is whole."""

    def on_train_batch_start(self, *_):
        guard.session.seal()


lightning.seed_everything(0)
x = torch.randn(32, 16)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, guard = Sine(), ReftCallback()
saving = ModelCheckpoint(os.environ.get("CHECKPOINTS", "checkpoints of the plain run"), save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[guard, saving, Whole()],
)  # fmt: skip
trainer.fit(model, loader, ckpt_path="last")
