"""Megatron-core with reft: a small GPT in bf16 with fp32 masters, and one line.

--tp, --pp and --ep split the model by tensors, stages and experts; --vp sets the stages of each
rank; --hidden sets the width of the layers.

torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1
examples/megatron_gpt.py --tp 2

With the distributed optimizer each rank alone holds its part of main parameters and moments. Here
this part is so small that it travels in capsules. With --hidden 128 it is larger, and the daemons
of several nodes exchange parity of it, beside training. Then a lost node takes the job back to the
newest protected step.
"""

import argparse
import os

import torch

if not torch.cuda.is_available():
    import megatron_cpu  # noqa: F401  Megatron-core wants a GPU: this tells it that the CPU is one

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from reft.integrations.megatron import attach

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--pp", type=int, default=1)
parser.add_argument("--vp", type=int, default=1)
parser.add_argument("--ep", type=int, default=1)
parser.add_argument("--hidden", type=int, default=32)
options = parser.parse_args()
virtual, experts = options.vp if options.vp > 1 else None, 4 if options.ep > 1 else None
LENGTH, WORDS, MICROBATCHES = 16, 64, 4


class Data:
    """Endless micro batches.

    The position is the number of micro batches that all ranks have taken. So it has the same
    meaning for any number of ranks.
    """

    taken = 0

    def __next__(self):
        own = self.taken + parallel_state.get_data_parallel_rank()
        self.taken += parallel_state.get_data_parallel_world_size()
        first = torch.randint(WORDS, (2, 1), generator=torch.Generator().manual_seed(own))
        return (first + 3 * torch.arange(LENGTH + 1)) % WORDS

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def forward(data, model):
    tokens = next(data)
    places = torch.arange(LENGTH).expand(2, -1)
    future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1], places, future, labels=tokens[:, 1:])
    return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
parallel_state.initialize_model_parallel(options.tp, options.pp, virtual, expert_model_parallel_size=options.ep)
torch.manual_seed(0)
tensor_parallel.model_parallel_cuda_manual_seed(0)

config = TransformerConfig(
    num_layers=2 * options.vp, hidden_size=options.hidden, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16,
    use_cpu_initialization=True, tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp,
    virtual_pipeline_model_parallel_size=virtual, expert_model_parallel_size=options.ep, num_moe_experts=experts,
    pipeline_dtype=torch.bfloat16, batch_p2p_comm=False, finalize_model_grads_func=finalize_model_grads,
    gradient_accumulation_fusion=False, gated_linear_unit=True, add_bias_linear=not experts, masked_softmax_fusion=False,
    bias_dropout_fusion=False,
)  # fmt: skip
sharded = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)


def chunk(i):
    at = {"ignore_virtual": False, "vp_stage": i}
    first, last = parallel_state.is_pipeline_first_stage(**at), parallel_state.is_pipeline_last_stage(**at)
    gpt = GPTModel(
        config, get_gpt_layer_local_spec(experts), WORDS, LENGTH, pre_process=first, post_process=last,
        share_embeddings_and_output_weights=True, vp_stage=i if virtual else None,
    )  # fmt: skip
    return DistributedDataParallel(config, sharded, Float16Module(config, gpt))


model = [chunk(i) for i in range(options.vp)]
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, weight_decay=0.01, bf16=True, params_dtype=torch.bfloat16,
                    use_distributed_optimizer=True), model)  # fmt: skip
scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 0.0, 3, options.steps, "cosine", 0.01, 0.01, 1, "constant")
train = get_forward_backward_func()

losses = []
data = [Data() for _ in model]
session = attach(model, optimizer, scheduler, data)  # restores the state, if reft holds one
for step in session.steps(options.steps):
    optimizer.zero_grad()
    for each in model:
        each.zero_grad_buffer()
    found = train(forward_step_func=forward, data_iterator=data, model=model, num_microbatches=MICROBATCHES,
                  seq_length=LENGTH, micro_batch_size=2, forward_only=False)  # fmt: skip
    optimizer.step()
    scheduler.step(1)
    losses.append((step, sum(each["loss"].item() for each in found)))
session.close()
torch.distributed.destroy_process_group()
