"""Accelerate: `attach` replaces `reft.attach`, after `accelerator.prepare`.

    batches = Batches(loader)
    session = attach(accelerator, model, optimizer, batches, scheduler)
    while session.step < total:
        batch = next(batches)
        with accelerator.accumulate(model):
            loss = model(batch) ...
        if accelerator.sync_gradients:
            session.step_end()

`Batches` continues from epoch to epoch and knows its position. Mark a step only after gradients
were synchronized. Batches whose gradients were still accumulating are trained again after a
restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import reft
from reft.client.session import Session
from reft.client.state import random_state
from reft.console import say
from reft.integrations.checks import Tested, inner_optimizer

TESTED = Tested("accelerate", "1.15.0")


class Batches:
    """The batches of a data loader, as an iterator that can be restored. Its epochs are endless.

    Args:
        loader: what `accelerator.prepare` returned, or any loader of a map-style data set.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self.epoch = 0
        self.batch = 0  # batches fetched in this epoch
        self._at_epoch_begin = self._capture()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._resume_epoch() if self.batch else self._begin(self.epoch)
        for batch in self._iterator:
            self.batch += 1
            return batch
        if not self.batch:
            raise StopIteration  # the loader has no batches
        self.epoch, self.batch, self._iterator = self.epoch + 1, 0, None
        return next(self)

    def _capture(self) -> dict[str, Any]:
        """Returns the generators that determine an epoch's order of samples.

        With several processes, Accelerate gives the sampler a generator of its own.
        """
        own = getattr(self._loader, "synchronized_generator", None)
        return {"shared": random_state.capture(), "own": None if own is None else own.get_state()}

    def _begin(self, epoch: int) -> Iterator[Any]:
        self._at_epoch_begin = self._capture()
        return self._iterate(self._loader, epoch)

    def _resume_epoch(self) -> Iterator[Any]:
        """Returns an iterator from within the epoch, with the generators as without skipping."""
        from accelerate import skip_first_batches

        current = random_state.capture()
        random_state.restore(self._at_epoch_begin["shared"])
        if self._at_epoch_begin["own"] is not None:
            self._loader.synchronized_generator.set_state(self._at_epoch_begin["own"])
        iterator = self._iterate(skip_first_batches(self._loader, self.batch), self.epoch)
        first = next(iterator, None)  # this draws the order of samples
        random_state.restore(current)

        def rest() -> Iterator[Any]:
            if first is not None:
                yield first
            yield from iterator

        return rest()

    def _iterate(self, loader: Any, epoch: int) -> Iterator[Any]:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values only."""
        return {"epoch": self.epoch, "batch": self.batch, "at_epoch_begin": self._at_epoch_begin}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        """Continues with the batch after the mark."""
        self.epoch, self.batch, self._at_epoch_begin = held["epoch"], held["batch"], held["at_epoch_begin"]
        self._iterator = None


class _Accumulation:
    """Accelerator's count of batches, which decides when gradients are due."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        self._accelerator.step = held["step"]


def attach(
    accelerator: Any, model: Any, optimizer: Any, batches: Batches | None = None, scheduler: Any = None, **options: Any
) -> Session:
    """Attaches a training loop that uses Accelerate; restores its state after a restart.

    Call it on every process.

    Args:
        accelerator: accelerate.Accelerator.
        model: what `accelerator.prepare` returned.
        optimizer: what `accelerator.prepare` returned, or a list of them.
        batches: the source of the loop's batches. None: the data position is not held, and a line
            says so.
        scheduler: what `accelerator.prepare` returned.
        options: for `reft.attach`. Objects given to `accelerator.register_for_checkpointing` are
            held too.

    Raises:
        reft.errors.ReftError: see `reft.attach`; or this accelerate lacks a name that is read.
    """
    TESTED.need(accelerator, "step", "sync_gradients", "scaler", "is_main_process", "_custom_objects")
    optimizers = [
        inner_optimizer(each) for each in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])
    ]
    state: dict[str, Any] = {"accumulation": _Accumulation(accelerator)}
    state |= {f"registered{i}": each for i, each in enumerate(accelerator._custom_objects)}
    inner = getattr(scheduler, "scheduler", scheduler)  # Accelerate's wrapper has no state of its own
    named: dict[str, Any] = {"data": batches, "lr": inner, "scaler": accelerator.scaler}
    state |= {name: each for name, each in named.items() if each is not None}
    if batches is None and accelerator.is_main_process:
        say("not covered: the data position. Wrap the loader in reft.integrations.accelerate.Batches and pass it.")
    return reft.attach(model, optimizers, **{**options, "state": state | options.get("state", {})})
