"""Trains with Hugging Face's Trainer from its own newest checkpoint: one process, 6-step epochs.

With STOP_AT=N in the environment the script stops after step N. With RESUMES=1 it passes
`resume_from_checkpoint=True`, whether or not there is a checkpoint. MAX_STEPS=N is Trainer's limit;
the learning rate is then constant, so that it does not follow from the limit.
"""

import os

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from reft.integrations.transformers import ReftCallback


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.linear(x), labels)}


class Sums(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(48, 16)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.x[i].sum(0, keepdim=True)}


class Steps(TrainerCallback):
    """Waits before each step until the step before is whole.

    Stops the training after step STOP_AT.
    """

    def on_substep_end(self, *_, **__):
        if guard.session:
            guard.session.seal()

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step == int(os.environ.get("STOP_AT", "-1"))


set_seed(0)
guard, limit = ReftCallback(), int(os.environ.get("MAX_STEPS", "-1"))
arguments = TrainingArguments(
    "checkpoints", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=4,
    logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, max_steps=limit,
    lr_scheduler_type="linear" if limit < 0 else "constant",
)  # fmt: skip
trainer = Trainer(Net(), arguments, train_dataset=Sums(), callbacks=[guard, Steps()])
newest = get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None
trainer.train(resume_from_checkpoint=True if "RESUMES" in os.environ else newest)
