"""Sharded training of every family in real processes, and a round trip through a daemon."""

from __future__ import annotations

import hashlib
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import reft
from reft.client.state.inner_tensors import inner_tensors
from reft.client.state.tensors import flat_bytes
from tests.support.foreign_optimizers import Adafactor, Foreign, Lion, Lion8

Built = tuple[nn.Module, torch.optim.Optimizer]


class Block(nn.Module):
    """A norm and two linear layers, as in a transformer's MLP.

    In `model`, the sizes 10 and 3 are not divisible by the ranks, so shards are uneven, and some
    are empty.
    """

    def __init__(self, width: int = 8, inner: int = 40) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(inner: int = 40) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), Block(inner=inner), Block(inner=inner), nn.Linear(8, 3))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def _sharded(module: nn.Module, mesh: DeviceMesh, **arguments: Any) -> nn.Module:
    for part in module:
        fully_shard(part, mesh=mesh, **arguments)
    fully_shard(module, mesh=mesh, **arguments)
    return module


def _parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Applies TP to the blocks and SP to their norms. The rest is replicated over the mesh."""
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}  # fmt: skip
    for part in list(module)[1:3]:
        parallelize_module(part, mesh, plan)
        parallelize_module(part, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)))
        parallelize_module(part, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()))
    return module


def fsdp2(world: int) -> Built:
    whole = _sharded(model(), init_device_mesh("cpu", (world,)))
    return whole, adamw(whole)


def fsdp2_mixed(world: int) -> Built:
    """FSDP2 that gathers in bf16 from offloaded shards; evaluation leaves the root gathered."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False)
    whole = fully_shard(model(), mesh=init_device_mesh("cpu", (world,)), mp_policy=policy, offload_policy=offload)
    return whole, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)


def hsdp(world: int) -> Built:
    whole = _sharded(model(), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    return whole, adamw(whole)


def fsdp2_tp(world: int) -> Built:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    whole = model()
    for part in list(whole)[1:3]:
        parallelize_module(part, mesh["tp"], plan)
    return (whole := _sharded(whole, mesh["dp"])), adamw(whole)


def tp(world: int) -> Built:
    """TP and SP over all ranks; all other parameters are plain replicas."""
    whole = _parallel(model(), init_device_mesh("cpu", (world,)))
    return whole, torch.optim.Adam(whole.parameters(), lr=1e-2)


class Experts(nn.Module):
    """One expert for each place of the mesh, and one more.

    Each rank uses its own experts, and a sum over the ranks makes them one model.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        whole = torch.randn(mesh.size() + 1, 10, 3)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = x @ self.weight.to_local().sum(0)
        return DTensor.from_local(here, self.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def ep(world: int) -> Built:
    """Experts sharded over a submesh; each replica of the submesh has all of them."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "ep"))
    whole = nn.Sequential(Experts(mesh["ep"]), nn.Linear(3, 3))
    return whole, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)


def _fsdp1(world: int, use_orig_params: bool, **arguments: Any) -> FSDP:
    device = torch.device("cpu")
    whole = model()
    for i in (1, 2):
        whole[i] = FSDP(whole[i], use_orig_params=use_orig_params, device_id=device, **arguments)
    return FSDP(whole, use_orig_params=use_orig_params, device_id=device, **arguments)


def fsdp1(world: int) -> Built:
    whole = _fsdp1(world, False)
    return whole, adamw(whole)


def fsdp1_original(world: int) -> Built:
    """FSDP1 where each rank has a run of some parameters, and nothing of most."""
    whole = _fsdp1(world, True)
    return whole, adamw(whole)


def fsdp1_hybrid(world: int) -> Built:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    whole = _fsdp1(world, True, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    # Adagrad makes state at once, also for parameters that it never steps.
    return whole, torch.optim.Adagrad(whole.parameters(), lr=0.01)


def zero1(world: int) -> Built:
    """DDP where only one rank has the optimizer state of a parameter."""
    whole = nn.parallel.DistributedDataParallel(model(), find_unused_parameters=True)
    return whole, ZeroRedundancyOptimizer(whole.parameters(), torch.optim.AdamW, lr=1e-2)


def zero1_buckets(world: int) -> Built:
    whole = nn.parallel.DistributedDataParallel(model(), find_unused_parameters=True)
    return whole, ZeroRedundancyOptimizer(whole.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-2)


def _foreign(kind: type[Foreign], sharded: bool) -> Callable[[int], Built]:
    """Returns a builder of a model with an optimizer that is not torch's own."""

    def build(world: int) -> Built:
        if sharded:
            # Every piece has elements: the rows of an empty one have no sums.
            whole: nn.Module = _sharded(
                nn.Sequential(nn.Linear(10, 12), Block(12), nn.Linear(12, 8)), init_device_mesh("cpu", (world,))
            )
        else:
            whole = nn.parallel.DistributedDataParallel(model(), find_unused_parameters=True)
        return whole, kind(whole.parameters())

    return build


FOREIGN: dict[str, Callable[[int], Built]] = {
    f"{kind.__name__.lower()}_{'fsdp2' if sharded else 'ddp'}": _foreign(kind, sharded)
    for kind in (Lion, Adafactor, Lion8)
    for sharded in (False, True)
}
BUILDERS: dict[str, Callable[[int], Built]] = {
    **FOREIGN,
    "fsdp2": fsdp2, "fsdp2_mixed": fsdp2_mixed, "hsdp": hsdp, "fsdp2_tp": fsdp2_tp, "tp": tp, "ep": ep, "fsdp1": fsdp1,
    "fsdp1_original": fsdp1_original, "fsdp1_hybrid": fsdp1_hybrid, "zero1": zero1, "zero1_buckets": zero1_buckets,
}  # fmt: skip
SCALED = ("fsdp1_original",)  # trained with a ShardedGradScaler
UNFORESEEN = {*FOREIGN, *SCALED}  # with state that attach does not foresee
STEPS_MAX = 40
SAME_DATA = {"fsdp2_tp": 2, "tp": 4, "ep": 4}  # how many neighbouring ranks train on the same data


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def digests(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns kind and digest of every local tensor of the state.

    A digest covers the tensor's bytes.
    """
    tensors = {f"p{i}": each for i, each in enumerate(optimizer.param_groups[0]["params"])}
    tensors |= dict(module.named_buffers())
    inner = getattr(optimizer, "optim", optimizer)
    for i, state in enumerate(inner.state.values()):
        tensors |= {f"{i}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    described = {}
    for name, tensor in tensors.items():
        own = local(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        kind = f"{type(tensor).__name__} {type(own).__name__} {tuple(tensor.shape)} {tuple(own.shape)}"
        placed = str(tensor.placements) if isinstance(tensor, DTensor) else ""
        plain = [each.tensor.detach().contiguous() for each in inner_tensors(name, own)]
        data = b"".join(flat_bytes(each).numpy().tobytes() for each in plain)
        described[name] = f"{kind} {placed} {hashlib.sha256(data).hexdigest()}"
    return described


@dataclass
class Training:
    """A family's model and optimizer, and a gradient scaler, which is enabled for one family."""

    name: str
    world: int
    seed: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.module, self.optimizer = BUILDERS[self.name](self.world)
        self.scaler = ShardedGradScaler(
            "cpu", init_scale=8.0, growth_interval=2, enabled=self.name in SCALED, process_group=dist.group.WORLD
        )

    def attach(self, daemon: str) -> reft.Session:
        return reft.attach(
            self.module, self.optimizer, state={"scaler": self.scaler}, job=self.name, daemon=daemon
        )  # fmt: skip

    def step(self, seed: int) -> str:
        torch.manual_seed(1000 * seed + dist.get_rank() // SAME_DATA.get(self.name, 1))
        loss = self.module(torch.randn(4, 6, 10)).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item().hex()

    def digests(self) -> dict[str, Any]:
        return {**digests(self.module, self.optimizer), "scaler": self.scaler.state_dict()}


def is_whole(session: reft.Session) -> bool:
    """Returns whether the newest step is whole, the same on every rank."""
    answer = torch.tensor(int(bool(session.seal(timeout=60))))
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


def round_trip(name: str, world: int, daemon: str) -> dict[str, Any]:
    """Trains and seals, and restores the state into new objects.

    It takes one more step with both.
    """
    first = Training(name, world, seed=1)
    session = first.attach(daemon)
    for step in session.steps(3):
        first.step(step)
        with torch.no_grad():
            first.module(torch.zeros(4, 6, 10))  # so that FSDP's root is gathered at the mark
    sealed = is_whole(session)
    # While the ranks make a layout for state that nobody foresaw, no step becomes whole.
    while not sealed and session.step < STEPS_MAX:
        first.step(session.step)
        session.step_end()
        sealed = is_whole(session)
    stats = session.stats()
    expected, steps = first.digests(), session.step
    dist.barrier()
    session.close()
    other = Training(name, world, seed=2)
    session = other.attach(daemon)
    if name in SCALED:
        other.scaler.scale(torch.ones(1))  # a scaler makes its tensors with the first loss
    found = other.digests()
    restored = [session.step == steps, session.restored_from]
    session.close()
    losses = [each.step(9) for each in (first, other)]
    return {
        "sealed": sealed, "restored": restored, "skipped": stats["skipped"], "expected": expected, "found": found,
        "losses": losses, "after": [first.digests(), other.digests()],
    }  # fmt: skip


def work(rank: int, world: int, port: int, daemon: str, names: list[str], out: str) -> None:
    """Runs one rank; writes the result of each round trip, or the error."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", REFT_CHUNK_BYTES="4096")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        for name in names:
            results[name] = round_trip(name, world, daemon)
        dist.destroy_process_group()
    except BaseException:
        results["error"] = traceback.format_exc()
    Path(out, f"{rank}.json").write_text(json.dumps(results))
    os._exit(1 if "error" in results else 0)
