"""Trains a tiny Llama with Hugging Face's Trainer and `KIND` of low-bit state: one process."""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from reft.integrations.transformers import ReftCallback

OPTIMIZERS = {"adamw_torch_8bit": "adamw_torch_8bit", "adafactor": "adafactor"}


def adapted(model: torch.nn.Module, base: str) -> torch.nn.Module:
    """Returns the model with its linear layers quantised, and PEFT's LoRA over them."""
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    quantize_(model.model, {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}[base]())
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.1))


def trained_in_float8(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model with torchao's layers that multiply in float8, emulated on the CPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=[*OPTIMIZERS, "int8", "float8", "float8_training"])
kind = parser.parse_args().kind
set_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32))
if kind in ("int8", "float8"):
    model = adapted(model, kind)
elif kind == "float8_training":
    model = trained_in_float8(model)
windows = torch.tensor(list("".join(topics.values()).encode()[: 32 * 96])).reshape(96, 32)
text = [{"input_ids": window, "labels": window} for window in windows]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3,
        logging_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        optim=OPTIMIZERS.get(kind, "adamw_torch"),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=text, callbacks=[ReftCallback()])
    trainer.train()
