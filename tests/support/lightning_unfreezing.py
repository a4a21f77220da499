"""Trains with Lightning's BackboneFinetuning: one process, four epochs of four steps."""

import os

import lightning
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from torch import nn

from reft.integrations.lightning import ReftCallback


class Tuned(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 1)
        self.losses = []

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])
        rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self.losses.append((self.global_step, self.current_epoch, loss.item(), rates))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


class Whole(Callback):
    """Waits before each step until the step before is whole."""

    def on_train_batch_start(self, *_):
        guard.session.seal()


lightning.seed_everything(0)
x = torch.randn(32, 16)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, guard = Tuned(), ReftCallback()
# The backbone learns from epoch 1 on, and its rate rises in each later epoch.
unfreezes = BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False, backbone_initial_ratio_lr=0.1)
callbacks = [guard, unfreezes, Whole()] if os.environ.get("ORDER") != "last" else [unfreezes, guard, Whole()]
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=callbacks,
)  # fmt: skip
trainer.fit(model, loader)
