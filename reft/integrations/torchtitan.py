"""torchtitan: reft replaces the checkpoint manager in the configuration.

    config.checkpoint = ReftCheckpointManager.Config()

    Trainer.train ─► load ─► attach: restores the state, the trainer's counters, LR schedulers, the
                             loader's position
    each step     ─► optimizers.step (its pre-hook ends the window) ─► lr_schedulers.step ─► save
                  ─► mark

`Config(storage=CheckpointManager.Config(enable=True, …))` also keeps torchtitan's own checkpoints.
They are written as before, and read if memory holds nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import reft
from reft.client.session import Session
from reft.console import say
from reft.errors import ConfigError
from reft.integrations.checks import Tested

TESTED = Tested("torchtitan", "0.3.0")
LOADER = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"
OPTIONS = ("job", "tolerate", "protect", "every", "slots")
# What reft, or torchtitan's trainer itself, reads of the Config.
READ = {"enable", "interval", "load_step", "storage", *OPTIONS}


class LoaderPosition:
    """The loader's position in the data, as plain values.

    torchtitan's own `state_dict` pickles the position, and reft never unpickles.

    Args:
        loader: torchtitan's loader. If it is a torchdata StatefulDataLoader, that class's methods
            are called directly.
    """

    def __init__(self, loader: Any) -> None:
        kinds = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in type(loader).__mro__}
        self._kind: Any = kinds.get(LOADER, type(loader))
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Returns the position; see the class."""
        state: dict[str, Any] = self._kind.state_dict(self._loader)
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the position, and makes the iterator at once.

        Making the iterator draws a random number. The generators are restored after all other
        state.
        """
        self._kind.load_state_dict(self._loader, dict(saved))
        if self._kind.__name__ == "StatefulDataLoader":
            self._kind.state_dict(self._loader)


class _Manager:
    """torchtitan's checkpoint manager, implemented by reft; made by its `Config`.

    Attributes:
        session: the reft.Session, after `load` was called.
    """

    save_future = None  # torchtitan has nothing to wait for: a snapshot is not a file

    def __init__(
        self, config: Any, *, dataloader: Any, model_parts: list[Any], optimizers: Any, lr_schedulers: Any,
        states: dict[str, Any], **others: Any,
    ) -> None:  # fmt: skip
        self.enable = config.enable
        self.session: Session | None = None
        self._storage = None
        if not self.enable:
            return
        _refuse_ignored(config)
        TESTED.need(optimizers, "optimizers")
        TESTED.need(lr_schedulers, "state_dict", "load_state_dict")
        self._options = {name: getattr(config, name) for name in OPTIONS}
        self._model_parts, self._optimizers = list(model_parts), list(optimizers.optimizers)
        self._state = {**states, "lr": lr_schedulers}
        if hasattr(dataloader, "state_dict"):
            self._state["data"] = LoaderPosition(dataloader)
        else:
            say("not covered: the data position. The loader has no state_dict.")
        self._load_step = getattr(config.storage, "load_step", -1)
        if config.storage is not None:
            named = {"dataloader": dataloader, "model_parts": model_parts, "optimizers": optimizers}
            self._storage = config.storage.build(lr_schedulers=lr_schedulers, states=states, **named, **others)

    def _load(self, step: int = -1) -> bool:
        """Attaches; reads a checkpoint from storage if memory holds nothing.

        Args:
            step: `load_step` of reft's Config. At -1 that of `storage=` counts, which torchtitan's
                trainer does not see.

        Raises:
            reft.errors.ReftError: see `reft.attach`.
        """
        self.session = reft.attach(self._model_parts, self._optimizers, state=self._state, **self._options)
        self.session.begin_marking()  # reading a checkpoint calls optimizer.step
        if self.session.restored_from is not None:
            return True
        return bool(self._storage.load(self._load_step if step < 0 else step)) if self._storage else False

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Marks the step."""
        if self._storage:
            self._storage.save(curr_step, last_step)
        assert self.session is not None, "torchtitan loads before it saves"
        self.session.step_end()
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Waits for the storage only: the optimizers' pre-hooks wait for reft's copies next."""
        if self._storage:
            self._storage.maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        """Waits for checkpoints on storage."""
        if self._storage:
            self._storage.maybe_wait_for_saving()

    def _wait_for_saving(self) -> None:
        """Is never called; see `save_future`."""

    def _close(self) -> None:
        if self._storage:
            self._storage.close()
        if self.session is not None:
            self.session.close()
            self.session = None


def _refuse_ignored(config: Any) -> None:
    """Refuses options of torchtitan's own checkpoints, which reft does not read.

    Else a run with `initial_load_path` would train from random weights.

    Raises:
        ConfigError: such an option has been set.
    """
    read = READ if config.storage is not None else READ - {"load_step"}
    options = fields(config) if is_dataclass(config) else ()
    for option in (each for each in options if each.name not in read):
        name = option.name
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if getattr(config, name) != default:
            raise ConfigError(
                f"checkpoint.{name} is {getattr(config, name)!r}; reft does not read it, only torchtitan's own checkpoint "
                "manager does.",
                f"ReftCheckpointManager.Config(storage=CheckpointManager.Config(enable=True, {name}=...))",
            )


@functools.cache
def _manager_class() -> type:
    from torchtitan.components.checkpointer import BaseCheckpointManager

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Options of `reft.attach`, and the destination of checkpoints on storage.

        Attributes:
            storage: the Config of one of torchtitan's managers; None: no checkpoints on storage.
        """

        enable: bool = True
        interval: int = 1
        job: str | None = None
        tolerate: int | None = None
        protect: str = "auto"
        every: int | None = None
        slots: int | None = None
        storage: Any = None

    members = {"Config": Config, "__doc__": _Manager.__doc__, "__module__": __name__}
    return type("ReftCheckpointManager", (_Manager, BaseCheckpointManager), members)


def __getattr__(name: str) -> Any:
    """Makes `ReftCheckpointManager` on first use, because its base class imports torchtitan."""
    if name == "ReftCheckpointManager":
        return _manager_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
