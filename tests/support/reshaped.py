"""Trainers of every parallelism that gloo supports, resharded by reft and by torch's checkpoints.

save:  train some steps ─► session.seal, torch.distributed.checkpoint.save
load:  attach ─► compare bits with torch.distributed.checkpoint.load ─► train on, save again

torch's ZeroRedundancyOptimizer has no such checkpoints: one rank saves what it consolidates.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

import reft
from reft.schedules import OneFOneB
from tests.support.foreign_optimizers import Lion
from tests.support.trainers import Trainers

WIDTH, LAYERS = 20, 4  # three ranks share 20 rows unevenly
WIDE = 320  # more bytes than travel in capsules
FOREIGN = {"lion": Lion}


def sizes(width: int = WIDTH) -> list[tuple[str, int, int]]:
    """Returns name, rows and columns of each layer."""
    hidden = [(f"hidden{i}", width, width) for i in range(LAYERS - 2)]
    return [("in", 6, width), *hidden, ("out", width, 5)]


class Net(nn.Module):
    """A model with the layers of these names only, as a pipeline's stage has."""

    def __init__(self, names: Sequence[str], width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: nn.Linear(rows, columns) for name, rows, columns in sizes(width) if name in names}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


class Loader:
    """A data loader with the position of its own rank. It fits the same number of ranks only."""

    def __init__(self, world: int) -> None:
        self.world, self.mine, self.given = world, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"mine": self.mine, "rank": dist.get_rank() if dist.is_initialized() else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.mine = state["mine"]


class SharedLoader(Loader):
    """A data loader that computes its position from those of any number of ranks."""

    def load_state_dicts(self, states: Sequence[dict[str, int]]) -> None:
        self.given = sum(state["mine"] for state in states)
        self.mine = self.given // self.world


def build(kind: str, rank: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model of a kind, e.g.

    "ddp", "zero1", "fsdp2", "hsdp2x2", "tp2xdp2", "pp2", and its optimizer, e.g. "fsdp2+lion".
    "fsdp2 wide" has more bytes than travel in capsules.
    """
    torch.manual_seed(1)
    kind, _, foreign = kind.partition("+")
    kind, _, is_wide = kind.partition(" ")
    names = [name for name, _, _ in sizes()]
    if kind.startswith("pp"):
        per = LAYERS // world
        names = names[rank * per : (rank + 1) * per]
    model: nn.Module = Net(names, WIDE if is_wide else WIDTH)
    if kind in ("ddp", "zero1") and world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2" or kind.startswith("hsdp"):
        _shard(model, kind, world)
    elif kind.startswith("tp"):
        _tensor_parallel(model, kind)
    elif kind == "fsdp1":
        model = _flat(model)
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    if kind == "zero1":
        return model, ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-2)
    return model, FOREIGN[foreign](groups, lr=1e-2) if foreign else torch.optim.AdamW(groups, lr=1e-2)


def _shard(model: nn.Module, kind: str, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = tuple(int(n) for n in kind[4:].split("x")) if kind.startswith("hsdp") else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _flat(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def _tensor_parallel(model: nn.Module, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tensor, data = (int(part[2:]) for part in kind.split("x"))
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    plan = {
        f"layers.{name}": ColwiseParallel() if i % 2 == 0 else RowwiseParallel()
        for i, (name, _, _) in enumerate(sizes())
    }
    parallelize_module(model, mesh["tp"], plan)
    model.data_group = mesh["dp"].get_group()


def step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
    """Trains one step on random data."""
    first = next(iter(model.parameters()))
    is_stage = kind.startswith("pp")
    columns = first.shape[1] if is_stage else 6
    if kind.startswith("tp"):  # the ranks of one tensor-parallel group see the same data
        generator = torch.Generator().manual_seed(dist.get_group_rank(model.data_group, dist.get_rank()))
        x = torch.randn(4, columns, generator=generator)
    else:
        x = torch.randn(4, columns)
    loader.mine += 4
    model(x).square().mean().backward()
    if kind.startswith("tp"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.to_local(), group=model.data_group)
    optimizer.step()
    optimizer.zero_grad()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the bytes of every local tensor of the state, by name."""
    by_name = {}
    held = getattr(optimizer, "optim", optimizer).state
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("module.")
        by_name[plain] = parameter
        for key, value in held.get(parameter, {}).items():
            by_name[f"{plain}.{key}"] = value
    local = {name: getattr(value, "_local_tensor", value).detach() for name, value in by_name.items()}
    return {name: value.contiguous().reshape(-1).view(torch.uint8).clone() for name, value in local.items()}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Writes torch's own checkpoint."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            whole = optimizer.state_dict()
            arrays = {f"model {name}": value.numpy() for name, value in model.state_dict().items()}
            for i, state in whole["state"].items():
                arrays |= {f"{i} {key}": value.numpy() for key, value in state.items()}
            with open(path, "wb") as file:
                np.savez(file, groups=repr(whole["param_groups"]), **arrays)
        return
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=path, no_dist=not dist.is_initialized())


def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Loads torch's own checkpoint, of any number of ranks."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        states: dict[str, dict[str, torch.Tensor]] = {}
        with np.load(path) as file:
            groups = ast.literal_eval(str(file["groups"]))
            for owner, _, key in (name.partition(" ") for name in file.files if name != "groups"):
                states.setdefault(owner, {})[key] = torch.from_numpy(file[f"{owner} {key}"])
        model.load_state_dict(states.pop("model"))
        optimizer.load_state_dict({"state": {int(i): state for i, state in states.items()}, "param_groups": groups})
        return
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def random_digest() -> str:
    """Returns a digest of the generators' state."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr(np.random.get_state()).encode()).hexdigest()


def run(spec: dict[str, Any]) -> None:
    """One rank; what became of it goes to spec["out"]."""
    os.environ.update(spec["environment"], REFT_FAILPOINTS=spec["failpoints"])
    torch.set_num_threads(1)
    rank, world, options = spec["rank"], spec["world"], spec["options"]
    if world > 1:
        store = f"tcp://127.0.0.1:{spec['port']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    kind = options["kind"]
    model, optimizer = build(kind, rank, world)
    torch.manual_seed(100 + rank)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    loader = Loader(world) if options.get("plain_loader") else SharedLoader(world)
    schedule = OneFOneB(rank, world, 4) if options.get("schedule") else None
    session = reft.attach(
        model, optimizer, schedule, state={"lr": scheduler, "data": loader}, job=spec["job"], daemon=spec["daemon"]
    )
    result: dict[str, Any] = {"began": session.step, "from": session.restored_from, "given": loader.given}
    result["random"] = random_digest()
    result["lr"] = [group["lr"] for group in optimizer.param_groups]
    if options.get("load"):
        with torch.random.fork_rng():
            other, fresh = build(kind, rank, world)
        load(other, fresh, options["load"])
        mine, theirs = tensors(model, optimizer), tensors(other, fresh)
        result["unlike"] = [name for name in theirs if not torch.equal(mine.get(name, torch.empty(0)), theirs[name])]
        result["compared"] = len(theirs), sum(value.numel() for value in theirs.values())
        result["unlike groups"] = [
            (key, repr(group.get(key)), repr(value))
            for group, its in zip(optimizer.param_groups, fresh.param_groups, strict=True)
            for key, value in its.items()
            if key != "params" and group.get(key) != value
        ]
    for _ in session.steps(spec["steps"]):
        step(kind, model, optimizer, loader)
        scheduler.step()
        np.random.rand()
    result["random at the end"] = random_digest()
    sealed = session.seal(timeout=60)
    result["sealed"] = [sealed.whole, sealed.step]
    if options.get("save"):
        save(model, optimizer, options["save"])
    result["stats"] = session.stats()
    session.close()
    Path(spec["out"]).write_text(json.dumps(result))
    if world > 1:
        dist.destroy_process_group()


class Ranks(Trainers):
    """All ranks of one run of one job of this kind."""

    target = staticmethod(run)
