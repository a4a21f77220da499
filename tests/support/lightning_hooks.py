"""Trains with Lightning features outside of the batch hooks: one process, epochs of four steps."""

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging
from torch import nn

from reft.integrations.lightning import ReftCallback


class Hooked(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.average = nn.Linear(16, 1), nn.Linear(16, 1).requires_grad_(False)
        self.losses = []

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.losses.append((self.global_step, self.current_epoch, loss.item(), rate, stopping.wait_count))
        return loss

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            self.average.weight.mul_(0.9).add_(self.net.weight, alpha=0.1)

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["more"] = 1

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        follows = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": follows, "monitor": "val_loss"}}


class Whole(Callback):
    """Waits before each step until the step before is whole."""

    def on_train_batch_start(self, *_):
        guard.session.seal()


lightning.seed_everything(0)
x = torch.randn(32, 16)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, guard = Hooked(), ReftCallback()
# Stops after the fifth of seven epochs.
stopping = EarlyStopping("val_loss", min_delta=10.0, patience=4)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=7, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[guard, stopping, EMAWeightAveraging(), Whole()],
)  # fmt: skip
trainer.fit(model, loader, torch.utils.data.DataLoader(data, batch_size=16))
