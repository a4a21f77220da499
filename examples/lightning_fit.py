"""Lightning with reft: one callback.

A small net learns a sine, in batches shuffled anew each epoch.

python examples/lightning_fit.py                                          one process
torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1
examples/lightning_fit.py
"""

import argparse
import os

import lightning
import torch
from torch import nn

from reft.integrations.lightning import ReftCallback


class Sine(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
        self.losses = []

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append((self.global_step, loss.item()))
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
epochs = parser.parse_args().epochs

lightning.seed_everything(0)
x = torch.randn(256, 16)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = Sine()
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), max_epochs=epochs, accumulate_grad_batches=2,
    val_check_interval=0.5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[ReftCallback()],
)  # fmt: skip
trainer.fit(model, loader, torch.utils.data.DataLoader(data, batch_size=64))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
