"""What the user passed to `reft.attach`, and what it must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reft.client.attach import stage_names
from reft.client.schedule import hooks
from reft.client.state.extract.registry import extractor_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import ConfigError

SCHEMES = ("auto", "arc", "aec", "none")


@dataclass(frozen=True)
class AttachArguments:
    """What the user passed, and what it must be."""

    model: Any
    optimizers: Sequence[Any]
    schedule: Any
    state: Mapping[str, Any]
    tolerate: int | None
    protect: str
    every: int
    adapts: bool = False  # every="auto": 1 until the ranks have agreed on another

    def tracked(self) -> TrackedObjects:
        """Models and optimizers, checked.

        Raises:
            ConfigError: something is of the wrong kind.
            UnsupportedState: something can't be held.
        """
        models = list(self.model) if isinstance(self.model, (list, tuple, nn.ModuleList)) else [self.model]
        for value in models:
            if not isinstance(value, nn.Module) and not stage_names.is_stage(value):
                raise ConfigError(f"model is a {type(value).__name__}; an nn.Module is expected.")
        for value in self.optimizers:
            found = extractor_of(value)
            if found is None or "optimizer" not in found.roles:
                raise ConfigError(
                    f"optimizer is a {type(value).__name__}; a torch.optim.Optimizer is expected, or what "
                    "reft.client.register_extractor was told of."
                )
        for name, value in self.state.items():
            found = extractor_of(value)
            if found is not None and found.roles == {"optimizer"}:
                raise ConfigError(
                    f"state[{name!r}] is a {type(value).__name__}: an optimizer there would write while its state is copied.",
                    "pass it in optimizer=[...]",
                )
        hooks.check(self.schedule)
        if not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every is {self.every!r}; it can be a number of steps from 1 on, or 'auto'.", "every=1")
        if self.protect not in SCHEMES:
            raise ConfigError(
                f"protect={self.protect!r} is not in this version; it can be {', '.join(SCHEMES)}.", "protect='auto'"
            )
        if self.tolerate is not None and self.tolerate < 0:
            raise ConfigError(f"tolerate is {self.tolerate}; it is a number of nodes, 0 or more.")
        modules = stage_names.modules_of(models, self.schedule)
        modules |= {f"state.{name}": value for name, value in self.state.items() if isinstance(value, nn.Module)}
        scalers = {name: value for name, value in self.state.items() if isinstance(value, torch.amp.GradScaler)}
        tracked = TrackedObjects(modules, tuple(self.optimizers), scalers)
        for prefix, value, its in tracked.items():
            its.check(prefix, value)
        return tracked

    def objects(self) -> dict[str, Any]:
        """What of `state` is neither a module nor a scaler."""
        return {n: v for n, v in self.state.items() if not isinstance(v, (nn.Module, torch.amp.GradScaler))}

    def uncovered(self) -> list[str]:
        """What a restart would not bring back, as far as that can be seen."""
        found = []
        others = [v for v in self.objects().values() if not isinstance(v, torch.optim.lr_scheduler.LRScheduler)]
        has_scheduler = len(others) < len(self.objects())
        if not has_scheduler and any(hasattr(o.step, "_wrapped_by_lr_sched") for o in self.optimizers):
            found.append("the LR scheduler")
        if not others:
            found.append("the data position")
        return found
