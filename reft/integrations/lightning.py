"""Lightning: `Trainer(..., callbacks=[ReftCallback()])`.

    on_fit_start         attach: restores the state, the counters of the loops, and the callbacks
    setup_data           (wrapped) restores the generators with which the epoch's order was drawn
    start of an epoch    (wrapped) moves the loader to its position; then restores the generators of
                         the mark
    end of a batch       (wrapped) mark, if the optimizer stepped; after all hooks, a validation and
                         schedulers
    end of an epoch      (wrapped) mark of the epoch's last step; after the epoch's hooks and
                         schedulers
    on_fit_end           close

Automatic optimization runs forward and backward inside `optimizer.step(closure)`. The session's
fence closes the window after the closure; see `Session`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import reft
from reft.client.session import Session
from reft.client.state import random_state
from reft.console import say
from reft.errors import UnsupportedState
from reft.integrations.checks import PERSISTENT_WORKERS, Tested, has_persistent_workers, refuse_own, this_process

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TESTED = Tested("lightning", "2.6.6")
LOOPS = ("setup_data", "on_advance_end", "done", "restarting", "_restarting", "epoch_loop.on_run_start",
         "epoch_loop.on_advance_end", "epoch_loop.done", "epoch_loop.restarted_on_train_batch_end",
         "epoch_loop.batch_progress.reset_on_run", "epoch_loop.scheduler_progress.reset_on_run",
         "epoch_loop.batch_progress.current", "epoch_loop.batch_progress.is_last_batch",
         "epoch_loop.automatic_optimization.optim_progress.reset_on_run", "state_dict", "load_state_dict")  # fmt: skip


class FitPosition:
    """Lightning's position in the training, as an object for `reft.attach(state=...)`.

    Args:
        trainer: lightning.Trainer, within `fit`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.before_iter = random_state.capture()
        self.is_held = self._stops = False
        self._metrics: dict[str, torch.Tensor] = {}
        self.note()

    def note(self) -> None:
        """Stores the state of the loops now; Lightning can resume from here.

        A later mark includes the newest stored state.
        """
        self._loops = self._trainer.fit_loop.state_dict()

    def note_metrics(self) -> None:
        """Stores the metrics that callbacks and schedulers monitor.

        Reading them waits for the device. So this runs only where Lightning has just computed them.
        """
        self._metrics = {name: value.detach().cpu() for name, value in self._trainer.callback_metrics.items()}

    def note_epoch(self) -> None:
        """Stores the loops at the end of an epoch. They have the counters of the next epoch."""
        loop = self._trainer.fit_loop.epoch_loop
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        self.note()

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values and small tensors."""
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
        """Restores the counters by Lightning's own logic for resuming; `_Fit` moves the loader.

        Raises:
            ConfigError: another fit of this process has written them.
        """
        if not self._trainer.global_step:
            refuse_own(held["process"])
        self._trainer.fit_loop.load_state_dict(held["loops"])
        self.before_iter, self._stops, self._metrics = held["before_iter"], held["stops"], held["metrics"]
        self.note()
        for callback in self._trainer.callbacks:
            if callback.state_key in held["callbacks"]:
                callback.load_state_dict(held["callbacks"][callback.state_key])
        _finish_finetuning(self._trainer)
        if self._trainer.datamodule:
            self._trainer.datamodule.load_state_dict(held["datamodule"])
        self.is_held = True

    def put_back(self) -> None:
        """Restores the values that Lightning resets between fit's and training's start."""
        self._trainer.should_stop |= self._stops
        device = self._trainer.strategy.root_device
        self._trainer._logger_connector._callback_metrics.update(
            {name: value.to(device) for name, value in self._metrics.items()}
        )


class _Fit:
    """One call of Trainer.fit.

    Args:
        trainer: its strategy has set up model and optimizers.
        options: for `reft.attach`.
    """

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        _check(trainer)
        self._trainer, self._loop = trainer, trainer.fit_loop
        self._position = FitPosition(trainer)
        state: dict[str, Any] = {"trainer": self._position, **_modules(trainer.callbacks)}
        state |= {f"lr{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            state["scaler"] = trainer.precision_plugin.scaler
        self.session: Session = reft.attach(
            trainer.strategy.model,
            trainer.strategy.optimizers,
            **{**options, "state": state | options.get("state", {})},
        )
        if self._position.is_held:
            _drop_checkpoint(trainer)
        self._random = random_state.capture() if self._position.is_held else None
        self._stepped = trainer.global_step
        self._originals = (
            self._loop.setup_data,
            self._loop.epoch_loop.on_run_start,
            self._loop.epoch_loop.on_advance_end,
            self._loop.on_advance_end,
        )
        self._replace_methods(self._setup_data, self._epoch_starts, self._batch_ends, self._epoch_ends)

    def _replace_methods(self, setup_data: Any, on_run_start: Any, on_batch_end: Any, on_epoch_end: Any) -> None:
        self._loop.setup_data, self._loop.on_advance_end = setup_data, on_epoch_end
        self._loop.epoch_loop.on_run_start, self._loop.epoch_loop.on_advance_end = on_run_start, on_batch_end

    # The order of samples is drawn when a loader's iterator is made, and right after that by its
    # sampler.

    def _setup_data(self) -> None:
        """Replaces the fit loop's setup_data, which makes the first epoch's iterator."""
        if self._loop._combined_loader is None:
            if self._random is not None:
                random_state.restore(self._position.before_iter)
            self._position.before_iter = random_state.capture()
        self._originals[0]()

    def _epoch_starts(self, data_fetcher: Any) -> None:
        """Replaces the epoch loop's on_run_start, which makes the iterator of every later epoch.

        The samplers know the epoch here.
        """
        if self._random is not None:
            random, self._random = self._random, None
            self._move_loader(data_fetcher, random)
        elif self._trainer.current_epoch > 0 and not (self._loop.is_resuming or self._loop.epoch_loop.restarting):
            self._position.before_iter = random_state.capture()
        self._originals[1](data_fetcher)

    def _move_loader(self, data_fetcher: Any, random: Mapping[str, Any]) -> None:
        """After a restore: moves the loader to the mark, and restores the generators."""
        # While `restarting` is set, Lightning skips schedulers that follow a metric at the end of
        # an epoch.
        self._loop._restarting = False
        epoch_loop = self._loop.epoch_loop
        # A fit has ended with this epoch, and this one has more epochs. Lightning has counted the
        # epoch, but begins the next one with its first batch only if it knows the length.
        if epoch_loop.batch_progress.is_last_batch and epoch_loop.restarted_on_train_batch_end:
            self._position.note_epoch()
        trained_batches = epoch_loop.batch_progress.current.ready  # 0: the mark was at the end of the epoch before
        if not _is_resumable(self._loop):
            if self._trainer.current_epoch > 0:
                # setup_data has drawn an order as for a first epoch. A new epoch draws from the
                # generators of the mark.
                random_state.restore(self._position.before_iter if trained_batches else random)
                self._position.before_iter = random_state.capture()
                iter(data_fetcher)
            for _ in range(trained_batches):
                _skip_batch(data_fetcher)
        if trained_batches:
            random_state.restore(random)
        else:
            self._loop.restarting = False  # the epoch begins with its first batch

    # Marks

    def begin(self) -> None:
        """Restores the values that Lightning has reset, when training begins."""
        if self._position.is_held:
            self._position.put_back()

    def note(self) -> None:
        """Stores the position after a trained batch; more hooks of this batch follow."""
        self._position.note()

    def note_validated(self) -> None:
        """Stores the position after a validation; more hooks of this moment follow."""
        self._position.note()
        self._position.note_metrics()

    def _batch_ends(self, data_fetcher: Any) -> None:
        """Replaces the epoch loop's on_advance_end, which ends every batch but an epoch's last."""
        self._originals[2](data_fetcher)
        if not self._loop.epoch_loop.done:
            self._mark()

    def _epoch_ends(self) -> None:
        """Replaces the fit loop's on_advance_end, the last call of an epoch."""
        self._originals[3]()
        self._position.note_metrics()
        if not self._loop.done:
            self._position.note_epoch()
        self._mark()

    def _mark(self) -> None:
        """Marks the step, if the optimizer has stepped since the last mark."""
        if self._trainer.global_step > self._stepped:
            self._stepped = self._trainer.global_step
            self.session.step_end()

    def close(self) -> None:
        """Restores Lightning's methods, and closes the session."""
        self._replace_methods(*self._originals)
        self.session.close()


class _LightningCallback:
    """Protects the training of a lightning.Trainer, and restores it after a failure.

    Args:
        options: for `reft.attach`: job, every, tolerate, protect, slots, daemon, config, and
            `state` with more objects.

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
            reft.errors.ReftError: see `reft.attach`; or this kind or version of Trainer is not
                supported.
        """
        self._fit = _Fit(trainer, self._options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Prints which state can't be restored exactly."""
        assert self._fit
        self._fit.begin()
        for gap in _gaps(trainer) if trainer.is_global_zero else ():
            say(f"not covered: {gap}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stores the position for a restart."""
        assert self._fit
        self._fit.note()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Stores the position for a restart."""
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

    return type(
        "ReftCallback", (_LightningCallback, Callback), {"__doc__": _LightningCallback.__doc__, "__module__": __name__}
    )


def __getattr__(name: str) -> Any:
    """Makes `ReftCallback` on first use, because its base class imports lightning."""
    if name == "ReftCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check(trainer: Any) -> None:
    TESTED.need(
        trainer, "strategy.model", "strategy.optimizers", "precision_plugin", "lr_scheduler_configs", "callbacks"
    )
    TESTED.need(
        trainer, "ckpt_path", "strategy.restore_checkpoint_after_setup", "_checkpoint_connector._loaded_checkpoint"
    )
    TESTED.need(trainer.fit_loop, "_data_fetcher", "_combined_loader", "is_resuming", *LOOPS)
    if type(trainer.strategy).__name__ == "DeepSpeedStrategy":
        raise UnsupportedState("Lightning runs DeepSpeed, and this callback can't read the state of DeepSpeed.")


def _drop_checkpoint(trainer: Any) -> None:
    """Makes Lightning not load its own checkpoint over the state that reft has restored.

    Lightning has read its checkpoint before `on_fit_start`, and loads the loops and optimizers of
    that checkpoint afterwards.

    Raises:
        UnsupportedState: the strategy reads the checkpoint only now.
    """
    path, connector = trainer.ckpt_path, trainer._checkpoint_connector
    if path and trainer.strategy.restore_checkpoint_after_setup:
        raise UnsupportedState(
            f"reft has restored step {trainer.global_step}, and {type(trainer.strategy).__name__} would load {path} over it.",
            "call trainer.fit without ckpt_path; or give up reft's state by reft-cli purge JOB",
        )
    if connector._loaded_checkpoint:
        if trainer.is_global_zero:
            say(
                f"Lightning has read its checkpoint of step {connector._loaded_checkpoint['global_step']}, but reft goes "
                f"on from step {trainer.global_step}."
            )
        connector._loaded_checkpoint = {}


def _is_resumable(loop: Any) -> bool:
    """Returns whether Lightning itself restores the loaders, by their state_dict methods."""
    return all(
        hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        for loader in loop._combined_loader.flattened
    )


def _skip_batch(data_fetcher: Any) -> None:
    """Takes the next batch out of a fetcher, without counting it.

    Without a length the fetcher has read a batch ahead, to know which batch is the last.
    """
    ahead = getattr(data_fetcher, "batches", [])
    if not ahead:
        next(data_fetcher.iterator, None)
        return
    ahead.pop(0)
    try:
        ahead.append(next(data_fetcher.iterator))
    except StopIteration:
        data_fetcher.done = not ahead


def _finish_finetuning(trainer: Any) -> None:
    """Makes what a finetuning callback has unfrozen as it was.

    Attach has restored which parameters get gradients, and the groups of the optimizers. The
    callback would replace these groups by earlier ones of its own. When it unfreezes a batch
    normalization, it also makes the running averages go on.
    """
    from lightning.pytorch.callbacks import BaseFinetuning

    callbacks = [each for each in trainer.callbacks if isinstance(each, BaseFinetuning)]
    for callback in callbacks:
        TESTED.need(callback, "_restarting")
        callback._restarting = False
    for part in trainer.lightning_module.modules() if callbacks else ():
        if isinstance(part, BATCH_NORMS) and any(p.requires_grad for p in part.parameters()):
            part.track_running_stats = True


def _modules(callbacks: Iterable[Any]) -> dict[str, nn.Module]:
    """Returns the modules in callbacks as objects for `reft.attach(state=...)`.

    An example is the averaged model of WeightAveraging.
    """
    modules = [
        (name, value) for each in callbacks for name, value in vars(each).items() if isinstance(value, nn.Module)
    ]
    return {f"callback{i}_{name}": value for i, (name, value) in enumerate(modules)}


def _savers(trainer: Any) -> list[Any]:
    """Returns the objects whose on_save_checkpoint hook adds state that reft does not hold.

    Callbacks that have modules are left out: their modules are held.
    """
    from lightning.pytorch import Callback, LightningModule

    callbacks = (each for each in trainer.callbacks if not _modules([each]))
    overrides = lambda each, base: type(each).on_save_checkpoint is not base.on_save_checkpoint  # noqa: E731
    modules = [trainer.lightning_module] if overrides(trainer.lightning_module, LightningModule) else []
    return [*modules, *(each for each in callbacks if overrides(each, Callback))]


def _gaps(trainer: Any) -> list[str]:
    """Returns the parts that a restart would not restore exactly, as sentences."""
    gaps = [
        f"what {type(each).__name__}.on_save_checkpoint adds to a checkpoint. Keep it in a buffer, in the state_dict of a "
        "callback, or in an object that you pass as ReftCallback(state={...})."
        for each in _savers(trainer)
    ]
    if trainer.num_training_batches == float("inf") and _is_resumable(trainer.fit_loop):
        gaps.append(
            "one batch of the epoch of a restart. Without a length Lightning reads a batch ahead, and the loader's state "
            "has that batch as read. A loader without state_dict is covered."
        )
    if trainer.reload_dataloaders_every_n_epochs:
        gaps.append(
            "the order of samples in later epochs. With reload_dataloaders_every_n_epochs a restart makes the loader anew "
            "at another moment."
        )
    if any(base.__name__ == "StochasticWeightAveraging" for each in trainer.callbacks for base in type(each).__mro__):
        gaps.append(
            "the learning rates of StochasticWeightAveraging. After a restart within an epoch they stay as they are until "
            "the next one, and anneal by one step less. WeightAveraging is covered."
        )
    if has_persistent_workers(trainer.fit_loop._combined_loader.flattened):
        gaps.append(PERSISTENT_WORKERS)
    if not _is_resumable(trainer.fit_loop):
        gaps.append(
            "the time to skip batches. After a restart the loader reads the epoch's earlier batches again. A loader with "
            "state_dict and load_state_dict goes to its position at once."
        )
    return gaps
