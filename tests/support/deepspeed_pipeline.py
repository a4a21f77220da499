"""Trains with DeepSpeed's PipelineEngine: two stages, ZeRO-1, bf16; a script for `run_example`."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from reft.integrations.deepspeed import attach
from tests.support.batches import Batches


class Data(Batches):
    """Micro-batches in bf16, as an iterator."""

    def __iter__(self):
        return self

    def __next__(self):
        return tuple(each.bfloat16() for each in self.next())


def loss_of(outputs, targets):
    return nn.functional.mse_loss(outputs.float(), targets.float())


deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [LayerSpec(nn.Linear, 16, 64), LayerSpec(nn.GELU), LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Linear, 64, 1)]
model = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
config = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "steps_per_print": 1000,
}  # fmt: skip
parameters = [each for each in model.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

losses = []
data = Data(4)
session = attach(engine, state={"data": data})
for step in session.steps(30):
    losses.append((step, engine.train_batch(data).item()))
session.close()
torch.distributed.destroy_process_group()
