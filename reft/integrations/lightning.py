"""Lightning in one line: `Trainer(..., callbacks=[ReftCallback()])`.

    on_fit_start         attach: what is held comes back, the loops' counters and the callbacks' state too
    setup_data           (wrapped) the generators of the moment in which the held epoch's samples were drawn
    epoch's start        (wrapped) the loader is taken to its place in the epoch; then the generators of the mark
    batch's end          (wrapped) mark, if the optimizer stepped: behind all hooks, a validation, and schedulers that follow it
    epoch's end          (wrapped) mark of the epoch's last step: behind the epoch's hooks and schedulers
    on_fit_end           close

Automatic optimization runs forward and backward within `optimizer.step(closure)`: the session's fence closes the window
behind the closure, see `Session`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import reft
from reft.client.session import Session
from reft.client.state.host_state import capture_random, restore_random
from reft.console import say
from reft.errors import UnsupportedState
from reft.integrations.checks import Tested, refuse_own, this_process

TESTED = Tested("lightning", "2.6.6")
LOOPS = ("setup_data", "on_advance_end", "done", "restarting", "_restarting", "epoch_loop.on_run_start",
         "epoch_loop.on_advance_end", "epoch_loop.done", "epoch_loop.batch_progress.reset_on_run",
         "epoch_loop.scheduler_progress.reset_on_run", "epoch_loop.batch_progress.current",
         "epoch_loop.automatic_optimization.optim_progress.reset_on_run", "state_dict", "load_state_dict")  # fmt: skip


class Position:
    """Where Lightning is, as an object for `reft.attach(state=...)`.

    Args:
        trainer: lightning.Trainer, within `fit`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.before_iter = capture_random()
        self.is_held = self._stops = False
        self._metrics: dict[str, torch.Tensor] = {}
        self.note()

    def note(self) -> None:
        """The loops as they are now, which is where Lightning's own resuming can begin; a mark that comes later says so."""
        self._loops = self._trainer.fit_loop.state_dict()

    def note_metrics(self) -> None:
        """What callbacks and schedulers monitor; where Lightning has just computed it, since a device is waited for."""
        self._metrics = {name: value.detach().cpu() for name, value in self._trainer.callback_metrics.items()}

    def note_epoch(self) -> None:
        """The loops where an epoch is over: the next one begins with its own counters."""
        loop = self._trainer.fit_loop.epoch_loop
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        self.note()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and small tensors."""
        return {
            "loops": self._loops,
            "before_iter": self.before_iter,
            "process": this_process(),
            "stops": self._trainer.should_stop,
            "metrics": self._metrics,
            "callbacks": {each.state_key: state for each in self._trainer.callbacks if (state := each.state_dict())},
            "datamodule": self._trainer.datamodule.state_dict() if self._trainer.datamodule else {},
        }

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        """Brings the counters back, by Lightning's own logic of resuming; `_Fit` takes the loader there.

        Raises:
            ConfigError: they are those of another fit of this process.
        """
        if not self._trainer.global_step:
            refuse_own(held["process"])
        self._trainer.fit_loop.load_state_dict(held["loops"])
        self.before_iter, self._stops, self._metrics = held["before_iter"], held["stops"], held["metrics"]
        self.note()
        for callback in self._trainer.callbacks:
            if callback.state_key in held["callbacks"]:
                callback.load_state_dict(held["callbacks"][callback.state_key])
        if self._trainer.datamodule:
            self._trainer.datamodule.load_state_dict(held["datamodule"])
        self.is_held = True

    def put_back(self) -> None:
        """What Lightning resets between the start of fit and that of training."""
        self._trainer.should_stop |= self._stops
        device = self._trainer.strategy.root_device
        self._trainer._logger_connector._callback_metrics.update(
            {name: value.to(device) for name, value in self._metrics.items()}
        )


class _Fit:
    """One call of Trainer.fit.

    Args:
        trainer: the strategy has set up model and optimizers.
        options: for `reft.attach`.
    """

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        _check(trainer)
        self._trainer, self._loop = trainer, trainer.fit_loop
        self._position = Position(trainer)
        state: dict[str, Any] = {"trainer": self._position, **_modules(trainer.callbacks)}
        state |= {f"lr{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            state["scaler"] = trainer.precision_plugin.scaler
        self.session: Session = reft.attach(
            trainer.strategy.model,
            trainer.strategy.optimizers,
            **{**options, "state": state | options.get("state", {})},
        )
        self._random = capture_random() if self._position.is_held else None
        self._stepped = trainer.global_step
        self._originals = (
            self._loop.setup_data,
            self._loop.epoch_loop.on_run_start,
            self._loop.epoch_loop.on_advance_end,
            self._loop.on_advance_end,
        )
        self._put(self._setup_data, self._epoch_starts, self._batch_ends, self._epoch_ends)

    def _put(self, setup_data: Any, on_run_start: Any, on_batch_end: Any, on_epoch_end: Any) -> None:
        self._loop.setup_data, self._loop.on_advance_end = setup_data, on_epoch_end
        self._loop.epoch_loop.on_run_start, self._loop.epoch_loop.on_advance_end = on_run_start, on_batch_end

    # What draws the order of samples: a loader's iterator when it is made, and its sampler right after it

    def _setup_data(self) -> None:
        """In place of the fit loop's: makes the first epoch's iterator."""
        if self._loop._combined_loader is None:
            if self._random is not None:
                restore_random(self._position.before_iter)
            self._position.before_iter = capture_random()
        self._originals[0]()

    def _epoch_starts(self, data_fetcher: Any) -> None:
        """In place of the epoch loop's: makes the iterator of every later epoch. Samplers know the epoch here."""
        if self._random is not None:
            random, self._random = self._random, None
            self._take_to_its_place(data_fetcher, random)
        elif self._trainer.current_epoch > 0 and not (self._loop.is_resuming or self._loop.epoch_loop.restarting):
            self._position.before_iter = capture_random()
        self._originals[1](data_fetcher)

    def _take_to_its_place(self, data_fetcher: Any, random: Mapping[str, Any]) -> None:
        """After a restore: the loader stands where the mark was, and the generators too."""
        # While it takes itself for restarting, Lightning leaves out schedulers that follow a metric at the epoch's end.
        self._loop._restarting = False
        done = self._loop.epoch_loop.batch_progress.current.ready  # 0: the epoch was over, this is the next one
        if not _is_resumable(self._loop):
            if self._trainer.current_epoch > 0:
                # What setup_data made was drawn as for a first epoch. A new epoch draws from the generators of the mark.
                restore_random(self._position.before_iter if done else random)
                self._position.before_iter = capture_random()
                iter(data_fetcher)
            for _ in range(done):
                next(data_fetcher.iterator, None)
        if done:
            restore_random(random)
        else:
            self._loop.restarting = False  # no batch is under way

    # Marks

    def begin(self) -> None:
        """Training begins."""
        if self._position.is_held:
            self._position.put_back()

    def note(self) -> None:
        """A batch has been trained; hooks of this moment are still to come."""
        self._position.note()

    def note_validated(self) -> None:
        """A validation has ended; hooks of this moment are still to come."""
        self._position.note()
        self._position.note_metrics()

    def _batch_ends(self, data_fetcher: Any) -> None:
        """In place of the epoch loop's: the last thing that belongs to a batch, but for an epoch's last one."""
        self._originals[2](data_fetcher)
        if not self._loop.epoch_loop.done:
            self._mark()

    def _epoch_ends(self) -> None:
        """In place of the fit loop's: the last thing that belongs to an epoch."""
        self._originals[3]()
        self._position.note_metrics()
        if not self._loop.done:
            self._position.note_epoch()
        self._mark()

    def _mark(self) -> None:
        """Marks the step, if the optimizer has stepped since the last one."""
        if self._trainer.global_step > self._stepped:
            self._stepped = self._trainer.global_step
            self.session.step_end()

    def close(self) -> None:
        """Lightning is itself again."""
        self._put(*self._originals)
        self.session.close()


class _Callback:
    """Protects the training of a lightning.Trainer, and brings it back after a failure.

    Args:
        options: as for `reft.attach`: job, every, tolerate, protect, slots, daemon, config, and `state` with more objects.

    Attributes:
        session: the reft.Session while the Trainer fits, else None.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._fit: _Fit | None = None

    @property
    def session(self) -> Session | None:
        return self._fit.session if self._fit else None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches.

        Raises:
            reft.errors.ReftError: see `reft.attach`; or the Trainer is of a kind or version that is not supported.
        """
        self._fit = _Fit(trainer, self._options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Says what can't be brought back."""
        assert self._fit
        self._fit.begin()
        for gap in _gaps(trainer) if trainer.is_global_zero else ():
            say(f"not covered: {gap}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Notes where a restart could begin."""
        assert self._fit
        self._fit.note()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Notes where a restart could begin."""
        if self._fit and not trainer.sanity_checking:
            self._fit.note_validated()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the session."""
        if self._fit:
            self._fit.close()
            self._fit = None


@functools.cache
def _callback_class() -> type:
    from lightning.pytorch import Callback

    return type("ReftCallback", (_Callback, Callback), {"__doc__": _Callback.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    """`ReftCallback`, made when asked for, because its base class loads lightning."""
    if name == "ReftCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check(trainer: Any) -> None:
    TESTED.need(
        trainer, "strategy.model", "strategy.optimizers", "precision_plugin", "lr_scheduler_configs", "callbacks"
    )
    TESTED.need(trainer.fit_loop, "_data_fetcher", "_combined_loader", "is_resuming", *LOOPS)
    if type(trainer.strategy).__name__ == "DeepSpeedStrategy":
        raise UnsupportedState("Lightning runs DeepSpeed, whose state this callback does not reach.")


def _is_resumable(loop: Any) -> bool:
    """Whether Lightning itself brings the loaders back, because they have state_dict and load_state_dict."""
    return all(
        hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        for loader in loop._combined_loader.flattened
    )


def _modules(callbacks: Iterable[Any]) -> dict[str, nn.Module]:
    """Modules that callbacks have, such as the averaged one of WeightAveraging, as objects for `reft.attach(state=...)`."""
    found = [(name, value) for each in callbacks for name, value in vars(each).items() if isinstance(value, nn.Module)]
    return {f"callback{i}_{name}": value for i, (name, value) in enumerate(found)}


def _savers(trainer: Any) -> list[Any]:
    """Who adds to checkpoints by a hook, which writes into a checkpoint that is not there; modules of callbacks are held."""
    from lightning.pytorch import Callback, LightningModule

    callbacks = (each for each in trainer.callbacks if not _modules([each]))
    is_own = lambda each, base: type(each).on_save_checkpoint is not base.on_save_checkpoint  # noqa: E731
    own = [trainer.lightning_module] if is_own(trainer.lightning_module, LightningModule) else []
    return [*own, *(each for each in callbacks if is_own(each, Callback))]


def _gaps(trainer: Any) -> list[str]:
    """What a restart would not bring back exactly."""
    found = [
        f"what {type(each).__name__}.on_save_checkpoint adds to a checkpoint; keep it in a buffer, in the state_dict of a "
        "callback, or in an object that ReftCallback(state={...}) is given."
        for each in _savers(trainer)
    ]
    if trainer.num_training_batches == float("inf") and not _is_resumable(trainer.fit_loop):
        found.append("the end of an epoch of unknown length: a restart right after its last batch was not tested.")
    if not _is_resumable(trainer.fit_loop):
        found.append(
            "the time to skip: after a restart the epoch's batches before the held position are read again. A loader with "
            "state_dict and load_state_dict goes there at once."
        )
    return found
