"""Accelerate: `attach` replaces `reft.attach`, after `accelerator.prepare`.

    loader = reft.ResumableLoader(loader)
    session = attach(accelerator, model, optimizer, loader, scheduler)
    batches = loader.endless()
    while session.step < total:
        batch = next(batches)
        with accelerator.accumulate(model):
            loss = model(batch) ...
        if accelerator.sync_gradients:
            session.step_end()

Mark a step only after gradients were synchronized. Batches whose gradients were still accumulating
are trained again after a restart.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import reft
from reft.client.data.loader import ResumableLoader
from reft.client.session import Session
from reft.console import say
from reft.errors import ConfigError
from reft.integrations.checks import Tested, inner_optimizer

TESTED = Tested("accelerate", "1.15.0")


class Batches(ResumableLoader):
    """The former name of `reft.ResumableLoader`, as its own endless iterator. Removed after 0.2.

    Args:
        loader: what `accelerator.prepare` returned, or a torch DataLoader.
    """

    def __init__(self, loader: Any) -> None:
        warnings.warn(
            "Batches is now reft.ResumableLoader: next(batches) becomes next(loader.endless()), with one endless() for all",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(loader)
        self._batches = self.endless()

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __next__(self) -> Any:
        return next(self._batches)


class _Accumulation:
    """Accelerator's count of batches, which decides when gradients are due."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        self._accelerator.step = held["step"]


def attach(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    loader: ResumableLoader | None = None,
    scheduler: Any = None,
    **options: Any,
) -> Session:
    """Attaches a training loop that uses Accelerate; restores its state after a restart.

    Call it on every process.

    Args:
        accelerator: accelerate.Accelerator.
        model: what `accelerator.prepare` returned.
        optimizer: what `accelerator.prepare` returned, or a list of them.
        loader: the loop's reft.ResumableLoader. None: the data position is not held, and a line
            says so.
        scheduler: what `accelerator.prepare` returned.
        options: for `reft.attach`. Objects given to `accelerator.register_for_checkpointing` are
            held too.

    Raises:
        reft.errors.ReftError: see `reft.attach`; or this accelerate lacks a name that is read; or
            the loader was not prepared.
    """
    TESTED.need(accelerator, "step", "sync_gradients", "scaler", "is_main_process", "num_processes", "_custom_objects")
    if loader is not None and accelerator.num_processes > 1 and not hasattr(loader, "base_dataloader"):
        raise ConfigError(
            f"each of the {accelerator.num_processes} processes would read all batches: the loader was not prepared.",
            "loader = reft.ResumableLoader(accelerator.prepare(loader))",
        )
    optimizers = [
        inner_optimizer(each) for each in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])
    ]
    state: dict[str, Any] = {"accumulation": _Accumulation(accelerator)}
    state |= {f"registered{i}": each for i, each in enumerate(accelerator._custom_objects)}
    inner = getattr(scheduler, "scheduler", scheduler)  # Accelerate's wrapper has no state of its own
    named: dict[str, Any] = {"data": loader, "lr": inner, "scaler": accelerator.scaler}
    state |= {name: each for name, each in named.items() if each is not None}
    if loader is None and accelerator.is_main_process:
        say("no loader was passed, so its position is not held. Pass reft.ResumableLoader(loader), and iterate it.")
    return reft.attach(model, optimizers, **{**options, "state": state | options.get("state", {})})
