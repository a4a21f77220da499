"""Trains a model of thousands of small parameters, as experts of a mixture have them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

import reft

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
EXPERTS = 100  # of a layer; 2 parameters each


def experts(parameters: int) -> nn.Module:
    """Returns layers of experts with so many parameters, a multiple of 200."""
    expert = lambda: nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("up", "down")})  # noqa: E731
    return nn.ModuleList(nn.ModuleList(expert() for _ in range(EXPERTS)) for _ in range(parameters // (2 * EXPERTS)))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Returns a digest of the names and bytes of all parameters, and of their state."""
    hasher = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key, tensor in (("", parameter.detach()), *sorted(state.items())):
            hasher.update(f"{name} {key} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return hasher.hexdigest()


def train(spec: dict[str, Any]) -> None:
    """Trains from attach to close, and writes its digest; dies at options["die_at"].

    Gradients depend on the parameter, its value and the step.
    """
    os.environ.update(spec["environment"])
    torch.set_num_threads(1)
    options = spec["options"]
    torch.manual_seed(0)
    model = experts(options["parameters"])
    parameters = list(model.parameters())
    assert len(parameters) == options["parameters"]
    optimizer = OPTIMIZERS[options["optimizer"]](parameters, lr=0.1)
    session = reft.attach(model, optimizer, job=spec["job"], daemon=spec["daemon"])
    began = session.step
    for step in session.steps(spec["steps"]):
        if step == options.get("die_at"):
            assert session.seal(timeout=600)
            os.kill(os.getpid(), signal.SIGKILL)
        for i, parameter in enumerate(parameters):
            parameter.grad = parameter.detach() * (i % 7 + 1) / (step + 1)
        optimizer.step()
    result = {"began": began, "digest": digest(model, optimizer)}
    session.close()
    Path(spec["out"]).write_text(json.dumps(result))
