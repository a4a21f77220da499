"""Trains a tiny GPT-2 on the CPU with Hugging Face's Trainer and a GradScaler.

Trainer makes a scaler for float16 on a GPU only, so this script gives one to Trainer, and trains in
float32. The first scale is so large that the scaler skips steps until the scale has shrunk.
"""

import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from reft.integrations.transformers import ReftCallback

set_seed(0)
sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
windows = torch.tensor(list("".join(topics.values()).encode()[: 32 * 48])).reshape(48, 32)
text = [{"input_ids": window, "labels": window} for window in windows]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3,
        logging_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=text, callbacks=[ReftCallback()])
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
    trainer.train()
