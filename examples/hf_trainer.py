"""Hugging Face's Trainer with reft: one callback.

A tiny GPT-2 learns the bytes of a text that comes with Python.

python examples/hf_trainer.py                                             one process
torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1
examples/hf_trainer.py
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from reft.integrations.transformers import ReftCallback


class Text(torch.utils.data.Dataset):
    """Windows of 32 bytes."""

    def __init__(self, size):
        self.bytes = torch.tensor(list("".join(topics.values()).encode()[: 32 * size]))

    def __len__(self):
        return len(self.bytes) // 32

    def __getitem__(self, i):
        window = self.bytes[32 * i : 32 * i + 32]
        return {"input_ids": window, "labels": window}


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
epochs = parser.parse_args().epochs

set_seed(0)
sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
text = Text(96)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3,
        logging_steps=2, eval_strategy="epoch", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=text, eval_dataset=Text(8), callbacks=[ReftCallback()])
    trainer.train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
