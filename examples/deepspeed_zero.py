"""DeepSpeed with reft: ZeRO in bf16 with fp32 masters, and one line.

--stage 0 to 3; --accumulate fp32 with stage 1 runs DeepSpeed's BF16_Optimizer.

DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1
examples/deepspeed_zero.py

Under ZeRO each rank alone holds its part of masters and moments. Here this part is so small that it
travels in capsules. With --width 16384 it is larger, and the daemons of several nodes exchange
parity of it, beside training. Then a lost node takes the job back to the newest protected step.
"""

import argparse

import deepspeed
import torch
from torch import nn

from reft.integrations.deepspeed import attach


class Data:
    """Batches that continue after a restart, by state_dict and load_state_dict."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def next(self):
        x = torch.randn(8, 16, generator=self.generator)
        return x.bfloat16(), x.sum(1, keepdim=True).sin().bfloat16()

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--accumulate", default="bf16")
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else None)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, options.width), nn.GELU(), nn.Dropout(0.1), nn.Linear(options.width, 1))
world = torch.distributed.get_world_size()
config = {
    "train_batch_size": 16 * world, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
    "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 100},
    "data_types": {"grad_accum_dtype": options.accumulate}, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
}  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)

losses = []
data = Data(seed=torch.distributed.get_rank())
session = attach(engine, state={"data": data})  # restores the state, if reft holds one
for step in session.steps(options.steps):
    for _ in range(engine.gradient_accumulation_steps()):
        x, y = data.next()
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
    losses.append((step, loss.item()))
session.close()
torch.distributed.destroy_process_group()
