"""The arguments of `reft.attach`, their checks, and what every step of attach needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reft.client import torch_internals
from reft.client.attach import stage_names
from reft.client.link.rank_group import RankGroup
from reft.client.schedule import hooks
from reft.client.state.extract import recomputable
from reft.client.state.extract.registry import extractor_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.client.state.values import Values
from reft.config import Config, Launch
from reft.core.coding.placement import WIDTH_MAX
from reft.errors import ConfigError
from reft.failpoints import Failpoints
from reft.wire import rpc

SCHEMES = ("auto", "arc", "aec", "aor", "none")
EVERY_LIMIT = (1 << 32) - 1  # a manifest carries no larger number


@dataclass(frozen=True)
class AttachArguments:
    """The arguments that the user passed to `reft.attach`.

    Attributes:
        every: the snapshot interval; 1 with every="auto", until the ranks agree on another
            interval.
        adapts: whether the user passed every="auto".
    """

    model: Any
    optimizers: Sequence[Any]
    schedule: Any
    state: Mapping[str, Any]
    tolerate: int | None
    protect: str
    every: int
    adapts: bool = False

    def tracked(self) -> TrackedObjects:
        """Returns the models and optimizers, after checking all arguments.

        Raises:
            ConfigError: an argument has the wrong type or value.
            UnsupportedState: reft can't hold a part of the state.
        """
        models = list(self.model) if isinstance(self.model, (list, tuple, nn.ModuleList)) else [self.model]
        for value in models:
            if not isinstance(value, nn.Module) and not stage_names.is_stage(value):
                raise ConfigError(f"model is a {type(value).__name__}; an nn.Module is expected.")
            extractor = extractor_of(value)
            if extractor is not None and extractor.roles == {"optimizer"}:
                raise ConfigError(
                    f"model is a {type(value).__name__}, which reft holds as an optimizer: its weights would not be held.",
                    "pass the module in it as model; for a DeepSpeed engine, reft.integrations.deepspeed.attach(engine)",
                )
        for value in self.optimizers:
            extractor = extractor_of(value)
            if extractor is None or "optimizer" not in extractor.roles:
                raise ConfigError(
                    f"optimizer is a {type(value).__name__}; it must be a torch.optim.Optimizer, or a kind that was passed to "
                    "reft.client.register_extractor.",
                    _inner_hint(value),
                )
        for name, value in self.state.items():
            extractor = extractor_of(value)
            if extractor is not None and extractor.roles == {"optimizer"}:
                raise ConfigError(
                    f"state[{name!r}] is a {type(value).__name__}: an optimizer in state= would write while its state is copied.",
                    "pass it in optimizer=[...]",
                )
        hooks.check(self.schedule)
        if not isinstance(self.every, int) or not 0 < self.every <= EVERY_LIMIT:
            raise ConfigError(
                f"every is {self.every!r}; it can be a number of steps from 1 to {EVERY_LIMIT}, or 'auto'.", "every=1"
            )
        if self.protect not in SCHEMES:
            raise ConfigError(
                f"protect={self.protect!r} is not in this version; it can be {', '.join(SCHEMES)}.", "protect='auto'"
            )
        if self.tolerate is not None and not (isinstance(self.tolerate, int) and 0 <= self.tolerate < WIDTH_MAX):
            raise ConfigError(f"tolerate is {self.tolerate!r}; it is a number of nodes, 0 to {WIDTH_MAX - 1}.")
        torch_internals.require([*models, *self.optimizers, self.schedule], self.state.values())
        modules = stage_names.modules_of(models, self.schedule)
        modules |= {f"state.{name}": value for name, value in self.state.items() if isinstance(value, nn.Module)}
        for name, value in self.state.items():
            if isinstance(value, Values):
                modules[f"state.{name}"] = held = value.reft_held
                held.check()
                held.refresh()
        scalers = {name: value for name, value in self.state.items() if isinstance(value, torch.amp.GradScaler)}
        tracked = TrackedObjects(modules, tuple(self.optimizers), scalers)
        for prefix, value, extractor in tracked.items():
            extractor.check(prefix, value)
        if self.protect == "aor":
            recomputable.check_optimizers(tracked.items())
        return tracked

    def objects(self) -> dict[str, Any]:
        """Returns the entries of `state` that are neither modules nor scalers."""
        return {n: v for n, v in self.state.items() if not isinstance(v, (nn.Module, torch.amp.GradScaler))}

    def forgets_scheduler(self) -> bool:
        """Returns whether an LR scheduler steps an optimizer, and nothing in `state` holds one.

        torch's schedulers wrap the optimizer's step, which is how one is seen. Trainers keep theirs
        in a wrapper's attribute, or in a list there. A data loader can't be seen, so nothing is
        said about loaders.
        """
        kind = torch.optim.lr_scheduler.LRScheduler
        parts = (part for value in self.state.values() for part in (value, *getattr(value, "__dict__", {}).values()))
        each_part = (each for part in parts for each in (part if isinstance(part, (list, tuple)) else (part,)))
        is_stepped = any(torch_internals.has_lr_scheduler(each) for each in self.optimizers)
        return is_stepped and not any(isinstance(each, kind) for each in each_part)


def _inner_hint(wrapper: object) -> str:
    """Returns what to pass in place of a wrapper around an optimizer, or empty text."""
    inner = [name for name, each in getattr(wrapper, "__dict__", {}).items() if isinstance(each, torch.optim.Optimizer)]
    if not inner:
        return ""
    return f"pass its .{inner[0]}; if the {type(wrapper).__name__} keeps values of its own, hold these in state="


@dataclass(frozen=True)
class AttachContext:
    """What every step of one rank's attach needs.

    Attributes:
        settings: the settings of this rank.
        launch: facts from the launcher's environment.
        rank_group: all ranks of the job.
        request: the arguments of `reft.attach`.
        failpoints: the faults that tests inject.
        calls: to the daemon of this node; they share a connection until attach ends.
    """

    settings: Config
    launch: Launch
    rank_group: RankGroup
    request: AttachArguments
    failpoints: Failpoints
    calls: rpc.DaemonCalls

    @property
    def rank(self) -> int:
        """This rank."""
        return self.rank_group.rank
