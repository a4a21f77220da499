"""A small training with all kinds of state: dropout, BatchNorm, AdamW, a schedule, numpy data."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reft

# Never set: a step lasts options["step_s"] longer. That is the speed of training.
PACE = threading.Event()


def build(options: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Returns model, optimizer and schedule, made from a seed."""
    torch.manual_seed(options.get("seed", 0))
    width = options.get("width", 64)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(width, width),
        torch.nn.Linear(width, 4),
    )
    kind = Hidden if options.get("hidden") else Growing if options.get("growing") else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


class Hidden(torch.optim.SGD):
    """An optimizer whose state attach can't predict: it reads a value before it makes state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                size = float(parameter.grad.abs().sum())  # fails on `meta`
                buffer = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                buffer.mul_(0.9).add_(parameter.grad, alpha=1 / (1 + size))
                parameter.sub_(buffer, alpha=group["lr"])


class Growing(torch.optim.SGD):
    """An optimizer whose state grows after the first step: the last three gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, new = self.state[parameter], parameter.grad[None]
                state["last"] = torch.cat([state["last"], new])[-3:] if "last" in state else new.clone()
                parameter.sub_(state["last"].mean(0), alpha=group["lr"])


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns a digest of the bytes of every tensor of the state."""
    tensors = dict(model.state_dict())
    for i, state in enumerate(optimizer.state.values()):
        tensors |= {f"{i}.{key}": value for key, value in state.items()}
    return {
        n: hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest() for n, t in tensors.items()
    }


def _pause(spec: dict[str, Any], step: int) -> None:
    """Stops before the mark of each step in options["pause_at"], until the test resumes it.

    The steps may differ by rank: then they are a dict, with the rank as text.
    """
    steps = spec["options"].get("pause_at", ())
    if step in (steps.get(str(spec["rank"]), ()) if isinstance(steps, dict) else steps):
        gate = Path(spec["out"]).with_suffix(f".gate{step}")
        os.mkfifo(gate)
        gate.read_text()


def _seed(rank: int, options: dict[str, Any]) -> None:
    """Gives each rank its own data; with options["alike"] all ranks have the same."""
    seed = 0 if options.get("alike") else rank
    torch.manual_seed(100 + seed)
    np.random.seed(seed)


def _change_gradients(model: torch.nn.Module, rank: int, step: int, options: dict[str, Any]) -> None:
    """Drops a gradient before options["thaws_at"].

    With options["clips"], clips by a norm of this rank: no two replicas stay equal.
    """
    if step < options.get("thaws_at", 0):
        model[0].weight.grad = None  # so that the weight gets no state before that step
    if options.get("clips"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 + 0.01 * rank)


def _drift(model: torch.nn.Module, rank: int, step: int, options: dict[str, Any]) -> None:
    """Makes the replicas mismatched, from the step options["drift_at"] on."""
    if step == options.get("drift_at"):
        with torch.no_grad():
            model[0].weight[0] += rank


def _keep(session: reft.Session, step: int, options: dict[str, Any]) -> None:
    """Waits for a whole step, and asks for a checkpoint, where the options say so.

    Before the optimizer's step, at which a snapshot without a slot is dropped.
    """
    is_persisted = bool(step) and step % options.get("persist_each", step + 1) == 0
    if is_persisted or step in options.get("seal_at", ()):
        session.seal(timeout=60)
    if is_persisted:
        session.persist()


def _await_layout(session: reft.Session, attached: Any, longest_s: float) -> None:
    """Waits until snapshots have a newer layout than attach made, or the next mark brings it.

    Args:
        session: the session.
        attached: what took its snapshots at first.
        longest_s: how long to wait at most: an attempt may need further marks.
    """
    window, end_s = session._window, time.monotonic() + longest_s

    def is_made() -> bool:
        if window.snapshots is attached:
            return window.reviews._ready is not None
        return window.snapshots.reporter.layout.start >= 0

    while time.monotonic() < end_s and not is_made():
        PACE.wait(0.02)


def _tell(out: Path, step: int) -> None:
    """Writes the step, and adds the time to those of all steps."""
    out.with_suffix(".step").write_text(str(step))
    with open(out.with_suffix(".times"), "a") as file:
        file.write(f"{time.monotonic()}\n")


def train(spec: dict[str, Any]) -> None:
    """Trains one rank from attach to close; writes its losses and digests to spec["out"]."""
    os.environ.update(spec["environment"], REFT_FAILPOINTS=spec["failpoints"])
    torch.set_num_threads(1)
    rank, world, options = spec["rank"], spec["world"], spec["options"]
    if world > 1:
        store = f"tcp://127.0.0.1:{spec['port']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    if options.get("seed_by_rank"):
        options = {**options, "seed": rank}
    model, optimizer, schedule = build(options)
    _seed(rank, options)
    wrapped = model
    if world > 1 and not options.get("apart"):
        # With more than two ranks DDP's own regrouping would change the order of its sums at a
        # restart.
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=world > 2)
    if options.get("bad_rank") == rank:
        model.register_buffer("bad", torch.empty(3, device="meta"))
    arguments = {key: options[key] for key in ("slots", "every", "protect", "tolerate") if key in options}
    if options.get("odd_rank") == rank:
        arguments["tolerate"] = 2
    # With options["own"] no leaf has a replica: the names of all leaves differ by rank.
    held = torch.nn.ModuleDict({f"rank{rank}": wrapped}) if options.get("own") else wrapped
    session = reft.attach(held, optimizer, state={"lr": schedule}, job=spec["job"], daemon=spec["daemon"], **arguments)
    attached = session._window.snapshots
    began, losses, longest = session.step, [], 0.0
    step_s, mark_began = 0.0, time.monotonic()
    for step in session.steps(spec["steps"]):
        longest = max(longest, step_s + time.monotonic() - mark_began)  # with its mark
        _keep(session, step, options)
        started = time.monotonic()
        batch = torch.from_numpy(np.random.standard_normal((8, 16)).astype(np.float32))
        loss = wrapped(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        _change_gradients(model, rank, step, options)
        optimizer.step()
        _drift(model, rank, step, options)
        schedule.step()
        losses.append(loss.item().hex())
        PACE.wait(options.get("step_s", 0))
        _await_layout(session, attached, options.get("layout_s", 0.0))
        step_s = time.monotonic() - started
        if options.get("tells"):
            _tell(Path(spec["out"]), step)
        _pause(spec, step)
        if step == options.get("die_at", -1) and (session.restored_from is None or options.get("dies_again")):
            os.kill(os.getpid(), 9)
        mark_began = time.monotonic()
    sealed = session.seal(timeout=options.get("seal_s", 60))
    result = {
        "began": began, "from": session.restored_from, "losses": losses, "digests": digests(model, optimizer),
        "longest_step_s": longest, "sealed": [sealed.whole, sealed.step], "stats": session.stats(),
        "random": torch.rand(1).item().hex(),
    }  # fmt: skip
    session.close()
    Path(spec["out"]).write_text(json.dumps(result))
    if world > 1:
        dist.destroy_process_group()
