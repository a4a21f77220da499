"""A training on one device, of a kind that users have on GPUs; it writes the bits of each loss.

python -m tests.support.gpu_loop --kind graph --steps 30 --out losses.txt

Each rank has a file, whose name ends in the rank. A process writes lines to it: "begins STEP PID",
"STEP LOSS" with the loss in hex, and "ends DIGEST" of the final state. Losses are read from the
device a few steps late, so that Python runs ahead, as in a real training. With `--device cpu` the
kinds without graphs run too.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products

import torch
import torch.distributed as dist
import xxhash
from torch import nn

import reft

KINDS = ("foreach", "fused", "scaler", "compile", "graphed-forward", "graph", "ddp", "fsdp2", "bf16")
WIDTH, ROWS = 256, 64
INF_STEP = 6  # of the kind scaler: its gradients overflow
READ_EVERY = 4  # steps between two reads of losses


class Batches:
    """Batches from a generator of the device, held in state=."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.generator = torch.Generator(device).manual_seed(rank)
        self.device = device

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(ROWS, WIDTH, generator=self.generator, device=self.device)
        return x, x.sum(1, keepdim=True).sin()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"].cpu())


class Training:
    """The model, its optimizer, and one step of each kind."""

    def __init__(self, kind: str, device: torch.device) -> None:
        self.kind, self.device = kind, device
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(0)
        norms = [nn.Identity() if kind == "fsdp2" else nn.BatchNorm1d(WIDTH) for _ in range(3)]
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.GELU(), nn.Dropout(0.1)) for norm in norms]
        model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        model = model.to(device, torch.bfloat16 if kind == "bf16" else torch.float32)
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif kind == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if kind == "graph":
            self.warm_up(model)
        torch.manual_seed(1 + rank)
        options: dict[str, Any] = {"lr": 1e-3}
        if kind in ("foreach", "ddp"):
            options["foreach"] = True
        elif kind == "graph":
            options |= {"capturable": device.type == "cuda", "lr": torch.tensor(1e-3, device=device)}
        else:
            options["fused"] = kind in ("fused", "scaler", "bf16")
        self.optimizer = torch.optim.AdamW(model.parameters(), **options)
        self.model = model
        self.scaler = torch.amp.GradScaler(device.type, enabled=kind == "scaler", init_scale=2.0**12)
        self.scheduler = None if kind == "graph" else torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.batches = Batches(device, rank)
        self.forward: Any = model
        self.graph: Any = None
        self.x = torch.zeros(ROWS, WIDTH, device=device)
        self.y = torch.zeros(ROWS, 1, device=device)
        self.loss = torch.zeros((), device=device)

    def warm_up(self, model: nn.Module) -> None:
        """Runs a step of a copy: libraries must have allocated their memory before a capture."""
        other, stream = copy.deepcopy(model), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer = torch.optim.AdamW(other.parameters(), capturable=True)
            nn.functional.mse_loss(
                other(torch.zeros(ROWS, WIDTH, device=self.device)), torch.zeros(ROWS, 1, device=self.device)
            ).backward()
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)

    def state(self) -> dict[str, Any]:
        objects = {"batches": self.batches, "scheduler": self.scheduler, "scaler": self.scaler}
        return {name: value for name, value in objects.items() if value is not None}

    def prepare(self) -> None:
        """Compiles or captures the forward, after attach."""
        if self.kind == "compile":
            self.forward = torch.compile(self.model)
        elif self.kind == "graphed-forward":
            self.forward = torch.compile(self.model, mode="reduce-overhead")

    def step(self, number: int) -> torch.Tensor:
        if self.kind == "graph":
            return self.graph_step()
        x, y = self.batches.next()
        if self.kind == "bf16":
            x, y = x.bfloat16(), y.bfloat16()
        with torch.autocast(self.device.type, torch.float16, enabled=self.kind == "scaler"):
            loss = nn.functional.mse_loss(self.forward(x), y)
        if self.kind == "scaler" and number == INF_STEP:
            loss = loss * float("inf")
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert self.scheduler is not None
        self.scheduler.step()
        return loss.detach()

    def graph_step(self) -> torch.Tensor:
        """Trains one step by a replay; the first step of all runs without a graph."""
        x, y = self.batches.next()
        self.x.copy_(x)
        self.y.copy_(y)
        if not self.optimizer.state:
            return self.whole_step().clone()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self.whole_step()
        self.graph.replay()
        return self.loss.clone()

    def whole_step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def digest(self) -> str:
        """Returns a digest of the parameters, the buffers, the optimizer's state and a draw."""
        digest = xxhash.xxh3_128()
        held = (
            value
            for _, each in sorted(self.optimizer.state_dict()["state"].items())
            for _, value in sorted(each.items())
        )
        for tensor in (*self.model.state_dict().values(), *held, torch.rand(3, device=self.device), torch.rand(3)):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="foreach")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if "WORLD_SIZE" in os.environ:
        # NCCL allows one rank a device only.
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("nccl" if options.device == "cuda" and world == 1 else "gloo")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    training = Training(options.kind, device)
    session = reft.attach(training.model, training.optimizer, state=training.state(), every=1)
    training.prepare()
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses: list[tuple[int, torch.Tensor]] = []
    with open(f"{options.out}.{rank}" if options.out else os.devnull, "a", buffering=1) as lines:
        print("begins", session.step, os.getpid(), file=lines)
        while session.step < options.steps:
            losses.append((session.step, training.step(session.step)))
            session.step_end()
            if len(losses) == READ_EVERY or session.step == options.steps:
                lines.write("".join(f"{step} {loss.item().hex()}\n" for step, loss in losses))
                losses.clear()
        session.seal(timeout=60)
        print("ends", training.digest(), session.stats(), file=lines)
    session.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
