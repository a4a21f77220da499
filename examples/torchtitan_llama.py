"""torchtitan with reft: a small Llama 3 with FSDP2, or --tp 2, and one line of its configuration.

torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1
examples/torchtitan_llama.py

Each rank alone holds its shards. The daemons of several nodes exchange parity of the shards, beside
training. So a lost node takes the job back to the newest protected step.
"""

import argparse
from dataclasses import dataclass

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from reft.integrations.torchtitan import ReftCheckpointManager


class Tokens(IterableDataset):
    """Counts up from random numbers, and continues after a restart."""

    def __init__(self, seed, length):
        self.generator, self.length = torch.Generator().manual_seed(seed), length

    def __iter__(self):
        while True:
            first = torch.randint(2000, (1,), generator=self.generator)
            run = (first + torch.arange(self.length + 1)) % 2048
            yield {"input": run[:-1]}, run[1:]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


class TokenLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        super().__init__(Tokens(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    encode = decode = get_vocab_size = None


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--tp", type=int, default=1)
options = parser.parse_args()

spec = model_registry("debugmodel")
spec.model.layers = spec.model.layers[:2]
trainer = Trainer.Config(
    model_spec=spec,
    checkpoint=ReftCheckpointManager.Config(),  # restores the state, if reft holds one
    tokenizer=NoTokenizer.Config(),
    dataloader=TokenLoader.Config(),
    loss=CrossEntropyLoss.Config(global_vocab_size=2048),
    optimizer=default_adamw(lr=1e-3),
    lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5),
    training=TrainingConfig(steps=options.steps, local_batch_size=2, seq_len=32, disable_cuda_graphs=True),
    parallelism=ParallelismConfig(tensor_parallel_degree=options.tp, spmd_backend="partial_dtensor"),
    metrics=MetricsProcessor.Config(log_freq=1),
    debug=DebugConfig(seed=0),  # without a seed each start would draw one
).build()
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
