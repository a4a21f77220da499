"""Hugging Face's Trainer: `Trainer(..., callbacks=[ReftCallback()])`.

    train            (wrapped) asked to resume without a checkpoint, it needs a step of reft
    on_train_begin   attach: restores the state, the counters of Trainer, and its callbacks
    epochs           earlier epochs are skipped. Within the held epoch, Trainer's own logic for
                     resuming skips the earlier steps; it gets the held generators instead of those
                     of a checkpoint
    on_step_begin    the step before has ended, with its log, evaluation and save: mark
    on_epoch_end     mark of the epoch's last step
    on_train_end     close

transformers 5 has a method for each epoch, and `_EpochRun` wraps that method. In 4.57 one method is
the whole loop. It reads its place from a checkpoint before on_train_begin, so `_LoopRun` attaches
earlier and writes the held place into a file for it. There the mark of an epoch's last step comes
after the epoch's log and evaluation.

1. A mark comes after everything that a step does. So a step that was logged and evaluated is not
   logged again. What the evaluation drew from the generators is part of the state.
2. The order of samples is the same after a restart. A sampler without a seed of its own draws the
   order when its epoch begins. So the generators of that moment are held too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import tempfile
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

import reft
from reft.client.session import Session
from reft.client.state import random_state
from reft.config import Config
from reft.console import say
from reft.errors import ConfigError, UnsupportedState
from reft.integrations.checks import PERSISTENT_WORKERS, Tested, inner_optimizer, refuse_own, this_process

TESTED = Tested("transformers", "5.23.0", also="4.57.6")
LOGS_HELD = 50  # newest entries of TrainerState.log_history. It grows without limit, and a capsule must not.
STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
COUNTERS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
COUNTERS_OF_5 = ("_initial_global_step", "_initial_num_input_tokens_seen")
RESUMING = (
    "epoch",
    "num_update_steps_per_epoch",
    "resume_from_checkpoint",
    "epochs_trained",
    "steps_trained_in_current_epoch",
)
# Local variables of the loop of 4.57 that reft reads.
LOCALS_OF_4 = (
    "tr_loss",
    "epochs_trained",
    "steps_trained_in_current_epoch",
    "num_update_steps_per_epoch",
    "num_train_epochs",
    "max_steps",
)


class TrainerPosition:
    """Trainer's position in the training, as an object for `reft.attach(state=...)`.

    Args:
        trainer: transformers.Trainer, within `train`.
        counters: names of its attributes that count.
    """

    def __init__(self, trainer: Any, counters: tuple[str, ...] = COUNTERS) -> None:
        self._trainer = trainer
        self._counters = counters
        self.epoch = 0
        self.updates = 0  # optimizer steps completed in this epoch
        self.has_ended = False  # the mark is the one at the end of the epoch
        self.stops = False  # a callback has stopped the training, not the limit of this run's arguments
        self.at_epoch_begin: dict[str, Any] = random_state.capture()

    def begin(self, epoch: int, updates: int) -> None:
        """Notes the beginning of an epoch, just before its order of samples is drawn.

        Args:
            epoch: its number.
            updates: completed optimizer steps, if the epoch continues from a checkpoint; else 0.
        """
        self.epoch, self.updates, self.has_ended = epoch, updates, False
        self.at_epoch_begin = random_state.capture()

    def note_end(self) -> bool:
        """Notes whether a callback has stopped the training.

        The limit of steps stops it too. But a later run may have a higher limit, and then goes on
        within this epoch.

        Returns:
            Whether the epoch has ended, and is not cut by the limit.
        """
        state, control = self._trainer.state, self._trainer.control
        is_at_limit = state.global_step >= state.max_steps
        self.stops = control.should_training_stop and not is_at_limit
        return control.should_epoch_stop or not is_at_limit

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values only."""
        state = self._trainer.state
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "has_ended": self.has_ended,
            "stops": self.stops,
            "process": this_process(),
            "at_epoch_begin": self.at_epoch_begin,
            "state": {name: getattr(state, name) for name in STATE},
            "logs": state.log_history[-LOGS_HELD:],
            # The loop of 4.57 makes two of them after attach.
            "counters": {name: getattr(self._trainer, name, 0) for name in self._counters},
            "callbacks": [[type(each).__name__, each.state()["attributes"]] for each in self._stateful()],
        }

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        """Restores the Trainer's counters; a `_Run` moves its loop.

        Raises:
            ConfigError: another training of this process has written them.
        """
        step, held_step = self._trainer.state.global_step, held["state"]["global_step"]
        if not step:
            refuse_own(held["process"])
        if step > held_step and self._trainer.is_world_process_zero():
            say(f"Trainer has read its checkpoint of step {step}, but reft goes on from step {held_step}.")
        self.epoch, self.updates = held["epoch"], held["updates"]
        self.has_ended, self.stops = held["has_ended"], held["stops"]
        self.at_epoch_begin = held["at_epoch_begin"]
        self.put_back(held)

    def put_back(self, held: Mapping[str, Any]) -> None:
        """Writes the held counters into the Trainer, its state and its callbacks.

        Raises:
            ConfigError: other callbacks have a state.
        """
        for name, value in held["state"].items():
            setattr(self._trainer.state, name, value)
        self._trainer.state.log_history = list(held["logs"])
        for name, value in held["counters"].items():
            setattr(self._trainer, name, value)
        stateful = self._stateful()
        if [name for name, _ in held["callbacks"]] != [type(each).__name__ for each in stateful]:
            raise ConfigError("Trainer's callbacks with state differ from those of the held run.")
        for callback, (_, attributes) in zip(stateful, held["callbacks"], strict=True):
            vars(callback).update(attributes)

    def _stateful(self) -> list[Any]:
        """Returns the callbacks with a state, such as EarlyStoppingCallback."""
        return [each for each in self._trainer.callback_handler.callbacks if callable(getattr(each, "state", None))]


class _Run:
    """One call of Trainer.train.

    Args:
        trainer: the Trainer that trains.
        options: for `reft.attach`.
        counters: names of the Trainer's attributes that count.
    """

    def __init__(self, trainer: Any, options: Mapping[str, Any], counters: tuple[str, ...]) -> None:
        self._trainer, self._options = trainer, options
        self._position = TrainerPosition(trainer, counters)
        self.session: Session | None = None
        self._random: dict[str, Any] | None = None
        self._resumes = False
        self._marked = 0

    def attach(self, loss_sum: torch.Tensor) -> None:
        """Attaches, once Trainer has prepared model, optimizer and scheduler.

        Args:
            loss_sum: the sum of the losses since the last log.
        """
        trainer, options = self._trainer, self._options
        loss = nn.Module()
        # Trainer adds to this tensor in place, also between mark and fence. A buffer is copied at
        # the mark.
        loss.register_buffer("sum", loss_sum)
        state = {"trainer": self._position, "loss": loss, "lr": trainer.lr_scheduler, **options.get("state", {})}
        if getattr(trainer.accelerator, "scaler", None) is not None:
            state["scaler"] = trainer.accelerator.scaler
        self.session = reft.attach(
            trainer.model_wrapped, inner_optimizer(trainer.optimizer), **{**options, "state": state}
        )
        self._random = None if self.session.restored_from is None else random_state.capture()
        self._resumes = self._random is not None
        self._marked = trainer.state.global_step

    def put_random_back(self) -> None:
        """Once after a restore: sets the generators to their state at the mark.

        Skipping steps has drawn from them.
        """
        if self._random is not None:
            random_state.restore(self._random)
            self._random = None

    def step_begins(self) -> None:
        """Marks the step before, when a step begins or an epoch ends."""
        if self._trainer.state.global_step > self._marked:
            self._position.updates += 1
        self._mark()

    def _mark(self) -> None:
        self.put_random_back()
        if self._trainer.state.global_step > self._marked and self.session is not None:
            self._marked = self._trainer.state.global_step
            self.session.step_end()

    def close(self) -> None:
        """Closes the session."""
        if self.session is not None:
            self.session.close()


class _EpochRun(_Run):
    """One call of Trainer.train of transformers 5, which has a method for an epoch."""

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        super().__init__(trainer, options, COUNTERS + COUNTERS_OF_5)
        _check(trainer, "_run_epoch", "_load_rng_state", "_tr_loss", *COUNTERS, *COUNTERS_OF_5)
        TESTED.need_parameters(trainer._run_epoch, RESUMING)

    def train_begins(self) -> None:
        """Attaches, and wraps two of Trainer's methods."""
        trainer = self._trainer
        self.attach(trainer._tr_loss)
        self._run_epoch, self._load_rng_state = trainer._run_epoch, trainer._load_rng_state
        trainer._run_epoch, trainer._load_rng_state = self.run_epoch, self.load_rng_state

    def run_epoch(self, **arguments: Any) -> None:
        """Replaces Trainer._run_epoch: skips earlier epochs, and resumes the held one."""
        epoch = arguments["epoch"]
        # A checkpoint made Trainer begin after the held position.
        if self._resumes and epoch > self._position.epoch:
            arguments["resume_from_checkpoint"] = None
            for earlier in range(self._position.epoch, epoch):
                self.run_epoch(**{**arguments, "epoch": earlier})
                if self._trainer.control.should_training_stop:
                    return
        accumulation = self._trainer.args.gradient_accumulation_steps
        if not self._resumes:
            is_from_checkpoint = (
                arguments["resume_from_checkpoint"] is not None and epoch == arguments["epochs_trained"]
            )
            batches = arguments["steps_trained_in_current_epoch"] if is_from_checkpoint else 0
            self._position.begin(epoch, batches // accumulation)
        elif epoch < self._position.epoch:
            return
        else:
            self._resumes = False
            all_updates = arguments["num_update_steps_per_epoch"]
            state = self._trainer.state
            ends = self._position.stops or state.global_step >= state.max_steps
            updates = all_updates if ends or self._position.has_ended else self._position.updates
            self._trainer.control.should_training_stop |= ends
            random_state.restore(self._position.at_epoch_begin)
            arguments |= {
                "epochs_trained": epoch,
                "resume_from_checkpoint": "the memory of reft",
                "steps_trained_in_current_epoch": updates * accumulation,
            }
        self._run_epoch(**arguments)

    def load_rng_state(self, checkpoint: str | None) -> None:
        """Replaces Trainer._load_rng_state, which would read a file."""
        if self._random is None:
            self._load_rng_state(checkpoint)
        self.put_random_back()

    def epoch_begins(self) -> None:
        """Does nothing: `run_epoch` has begun the epoch."""

    def epoch_ends(self) -> None:
        """Marks the last step of an epoch, before the epoch's own log and evaluation.

        After a restart from this mark, log and evaluation are done again.
        """
        self._position.has_ended = self._position.note_end()
        self.step_begins()

    def close(self) -> None:
        """Restores Trainer's methods, and closes the session."""
        self._trainer._run_epoch, self._trainer._load_rng_state = self._run_epoch, self._load_rng_state
        super().close()


class _LoopRun(_Run):
    """One call of Trainer.train of transformers 4.57, whose whole loop is one method.

    The loop reads its place from the file of a checkpoint, soon after `_load_scaler`. So it gets a
    folder that looks like the user's checkpoint. After a restore from memory the folder has one
    file only, with the held place.

    Args:
        trainer: it has just been made, and has not trained.
        options: for `reft.attach`.
    """

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        super().__init__(trainer, options, COUNTERS)
        self._loss = torch.zeros((), device=trainer.args.device)
        self._loop, trainer._inner_training_loop = trainer._inner_training_loop, self.train

    def train(self, *arguments: Any, resume_from_checkpoint: str | None = None, **named: Any) -> Any:
        """Replaces Trainer._inner_training_loop: the loop gets a folder as its checkpoint.

        Raises:
            UnsupportedState: this kind or version of Trainer is not supported.
        """
        trainer = self._trainer
        trainer._inner_training_loop = self._loop
        _check_loop(trainer)
        self._load_scaler, self._log_and_save = trainer._load_scaler, trainer._maybe_log_save_evaluate
        trainer._load_scaler, trainer._maybe_log_save_evaluate = self.load_scaler, self.log_and_save
        try:
            with tempfile.TemporaryDirectory(prefix="reft-trainer-") as folder:
                for name in os.listdir(resume_from_checkpoint) if resume_from_checkpoint else ():
                    os.symlink(os.path.abspath(os.path.join(str(resume_from_checkpoint), name)), f"{folder}/{name}")
                return self._loop(*arguments, resume_from_checkpoint=folder, **named)
        finally:
            trainer._load_scaler, trainer._maybe_log_save_evaluate = self._load_scaler, self._log_and_save

    def load_scaler(self, folder: str) -> None:
        """Replaces Trainer._load_scaler, the last step before the loop reads its place."""
        self._load_scaler(folder)
        trainer, path = self._trainer, f"{folder}/trainer_state.json"
        if os.path.exists(path):
            trainer.state = type(trainer.state).load_from_json(path)  # the loop reads it again
        self.attach(self._loss)
        if self._resumes:
            for name in os.listdir(folder):
                os.unlink(f"{folder}/{name}")
            _write_place(trainer.state, self._place(), path)
            self._held = self._position.state_dict()

    def _place(self) -> int:
        """Returns the number of steps from which the loop computes epoch and step."""
        loop, position = _locals_of_loop(), self._position
        all_updates = loop["num_update_steps_per_epoch"]
        if position.stops or self._trainer.state.global_step >= loop["max_steps"]:
            return loop["num_train_epochs"] * all_updates
        if position.updates >= all_updates:  # the limit of an earlier run was the end of an epoch
            position.epoch, position.updates = position.epoch + 1, 0
        return position.epoch * all_updates + position.updates

    def train_begins(self) -> None:
        """Restores what the loop has set since attach, or notes the loop's place."""
        loop = _locals_of_loop()
        if self._resumes:
            self._position.put_back(self._held)
            loop["tr_loss"].copy_(self._loss)
        else:
            batches = loop["steps_trained_in_current_epoch"]
            self._position.epoch = loop["epochs_trained"]
            self._position.updates = batches // self._trainer.args.gradient_accumulation_steps
        self._marked = self._trainer.state.global_step

    def epoch_begins(self) -> None:
        """Notes or restores the generators that draw the epoch's order."""
        if self._resumes and self._position.updates:
            random_state.restore(self._position.at_epoch_begin)
        else:
            self.put_random_back()
            self._position.begin(self._position.epoch, self._position.updates)
        self._resumes = False

    def epoch_ends(self) -> None:
        """Notes that the epoch's own log and evaluation come next."""
        self._position.has_ended = True

    def log_and_save(self, loss_sum: torch.Tensor, *arguments: Any, **named: Any) -> None:
        """Replaces Trainer._maybe_log_save_evaluate: marks the epoch's last step behind it."""
        self._log_and_save(loss_sum, *arguments, **named)
        self._loss.copy_(loss_sum)
        if self._position.has_ended:
            self._position.has_ended = False
            if self._position.note_end():
                self._position.epoch, self._position.updates = self._position.epoch + 1, 0
                self._mark()
            else:
                self.step_begins()


class _TrainerCallback:
    """Protects the training of a transformers.Trainer, and restores it after a failure.

    Args:
        options: for `reft.attach`: job, every, tolerate, protect, slots, daemon, config, and
            `state` with more objects.

    Attributes:
        session: the reft.Session while the Trainer trains, else None.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: _EpochRun | _LoopRun | None = None
        self._has_trained = False

    @property
    def session(self) -> Session | None:
        return self._run.session if self._run else None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wraps Trainer.train, and the loop of transformers 4.57.

        That loop reads its place before on_train_begin.
        """
        trainer = _calling_trainer()
        trainer.train = functools.partial(self.train, trainer, trainer.train)
        if not hasattr(trainer, "_run_epoch") and hasattr(trainer, "_inner_training_loop"):
            self._run = _LoopRun(trainer, self._options)

    def train(
        self, trainer: Any, train: Any, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any
    ) -> Any:
        """Calls Trainer.train; if Trainer has no checkpoint to resume from, reft must have a step.

        Raises:
            reft.errors.RestoreError: neither has one.
        """
        config = self._options.get("config") or Config()
        if resume_from_checkpoint is True and config.mode != "off" and not _has_checkpoint(trainer.args.output_dir):
            if trainer.is_world_process_zero():
                say(f"Trainer has no checkpoint in {trainer.args.output_dir}: reft must have a step to resume from.")
            self._options["config"] = dataclasses.replace(config, restore="require")
            resume_from_checkpoint = None
        return train(resume_from_checkpoint, *arguments, **named)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attaches.

        Raises:
            reft.errors.ReftError: see `reft.attach`; or this kind or version of Trainer is not
                supported.
        """
        if self._has_trained:
            say("this Trainer has already trained in this process, so this call of train() is not protected.")
            return
        self._has_trained = True
        trainer = _calling_trainer()
        if self._run is None:
            _check_epochs_exist(trainer)
            self._run = _EpochRun(trainer, self._options)
        self._run.train_begins()
        for gap in _gaps(trainer) if trainer.state.is_world_process_zero else ():
            say(f"not covered: {gap}")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes or restores the generators of the epoch."""
        if self._run:
            self._run.epoch_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Marks the step before."""
        if self._run:
            self._run.step_begins()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Marks the epoch's last step."""
        if self._run:
            self._run.epoch_ends()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Closes the session."""
        if self._run:
            self._run.close()
            self._run = None


@functools.cache
def _callback_class() -> type:
    from transformers import TrainerCallback

    return type(
        "ReftCallback",
        (_TrainerCallback, TrainerCallback),
        {"__doc__": _TrainerCallback.__doc__, "__module__": __name__},
    )


def __getattr__(name: str) -> Any:
    """Makes `ReftCallback` on first use, because its base class imports transformers."""
    if name == "ReftCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _calling_trainer() -> Any:
    """Returns the Trainer that calls the callback; callbacks do not get it as an argument.

    Raises:
        UnsupportedState: the caller is not a Trainer.
    """
    from transformers import Trainer

    for frame in _frames():
        if isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
    raise UnsupportedState(
        "ReftCallback was not called by a transformers.Trainer.", "Trainer(callbacks=[ReftCallback()])"
    )


def _locals_of_loop() -> Mapping[str, Any]:
    """Returns the local variables of the calling loop of transformers 4.57, for reading."""
    from transformers import Trainer

    code = Trainer._inner_training_loop.__code__
    return next(frame.f_locals for frame in _frames() if frame.f_code is code)


def _has_checkpoint(folder: str) -> bool:
    """Returns whether Trainer finds a checkpoint of its own."""
    from transformers.trainer_utils import get_last_checkpoint

    return os.path.isdir(folder) and get_last_checkpoint(folder) is not None


def _write_place(state: Any, step: int, path: str) -> None:
    """Writes a TrainerState of this step where the loop of transformers 4.57 reads its place."""
    dataclasses.replace(state, global_step=step).save_to_json(path)


def _check(trainer: Any, *names: str) -> None:
    TESTED.need(
        trainer, *names, "model_wrapped", "lr_scheduler", "callback_handler.callbacks", "accelerator", "control"
    )
    TESTED.need(trainer, "is_world_process_zero", "state.max_steps", *(f"state.{name}" for name in STATE))
    if trainer.is_deepspeed_enabled:
        raise UnsupportedState("Trainer runs DeepSpeed, and this callback can't read the state of DeepSpeed.")
    if trainer.args.auto_find_batch_size:
        raise UnsupportedState(
            "auto_find_batch_size=True restarts the training within a process, which reft does not support.",
            "set per_device_train_batch_size=N instead",
        )


def _check_epochs_exist(trainer: Any) -> None:
    if not hasattr(trainer, "_run_epoch") and hasattr(trainer, "_inner_training_loop"):
        raise UnsupportedState(
            "ReftCallback was added to a Trainer that existed; that of transformers 4.57 needs it when it is made.",
            "Trainer(callbacks=[ReftCallback()])",
        )
    TESTED.need(trainer, "_run_epoch")


def _check_loop(trainer: Any) -> None:
    from transformers import Trainer

    TESTED.need_release("4.57")
    _check(trainer, "_load_scaler", "_maybe_log_save_evaluate")
    TESTED.need_locals(Trainer._inner_training_loop, LOCALS_OF_4)
    if trainer.is_fsdp_enabled:
        raise UnsupportedState(
            "Trainer of transformers 4.57 runs FSDP, and its loop would read the weights from a checkpoint of FSDP.",
            f"pip install transformers=={TESTED.version}",
        )


def _gaps(trainer: Any) -> list[str]:
    """Returns the data position's parts that a restart would not restore exactly, as sentences."""
    args, loader, gaps = trainer.args, trainer.callback_handler.train_dataloader, []
    if args.ignore_data_skip:
        gaps.append(
            "the data position: with ignore_data_skip=True an interrupted epoch starts again with its first batch."
        )
    if args.world_size > 1 and not args.accelerator_config.use_seedable_sampler:
        gaps.append(
            "the order of samples: with use_seedable_sampler=False the sampler draws it from its own generator."
        )
    if args.dataloader_num_workers:
        gaps.append(
            "random transforms in workers of the data loader: a restarted worker draws other numbers. The order is kept."
        )
    if args.dataloader_num_workers and args.dataloader_persistent_workers:
        gaps.append(PERSISTENT_WORKERS)
    if isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset):
        gaps.append("the time to skip batches: an iterable data set reads all earlier batches again.")
    return gaps
