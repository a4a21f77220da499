"""DeepSpeed: `attach` after `deepspeed.initialize`.

    engine, optimizer, loader, schedule = deepspeed.initialize(...)
    session = attach(engine, state={"data": data})
    for step in session.steps(total):
        ...                              # all micro batches of a step, or engine.train_batch(data)

`reft.client.state.extract.deepspeed` says which state of the engine is held, and how. Also held:
the engine's LR scheduler, and the states of DeepSpeed's random tracker, if it has any.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import reft
from reft.client.schedule.hooks.deepspeed import is_engine
from reft.client.session import Session
from reft.console import say

CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


class TrackerStates:
    """The states of DeepSpeed's random tracker, as an object for `reft.attach(state=...)`.

    Dropout draws from them in the regions that a model forks, as Megatron-DeepSpeed's does.

    Args:
        tracker: `deepspeed.checkpointing.get_cuda_rng_tracker()`.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def state_dict(self) -> dict[str, Any]:
        """Returns name → state (uint8, on the host)."""
        return {"states": self._tracker.get_states()}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        """Continues in each region with the draw after the mark."""
        self._tracker.set_states(dict(held["states"]))

    def load_state_dicts(self, held: Sequence[Mapping[str, Any]]) -> None:
        """In a job of another size: loads the first old rank's states; all ranks had one seed."""
        self.load_state_dict(held[0])


def tracked_states() -> TrackerStates | None:
    """Returns the states of the random tracker; None if the script has seeded none."""
    checkpointing = sys.modules.get(CHECKPOINTING)
    tracker = checkpointing.get_cuda_rng_tracker() if checkpointing is not None else None
    return TrackerStates(tracker) if tracker is not None and tracker.get_states() else None


def attach(engine: Any, *, state: Mapping[str, Any] | None = None, **options: Any) -> Session:
    """Attaches a DeepSpeed engine; restores its state after a restart. Call it on every rank.

    Args:
        engine: DeepSpeedEngine, or PipelineEngine, whose idle times are then used for copies.
        state: name → any other object of the training state, above all the source of the batches.
        options: for `reft.attach`.

    Raises:
        reft.errors.ReftError: see `reft.attach`; or the engine uses a feature that is not
            supported, which the message names.
    """
    objects = dict(state or {})
    if not objects and engine.global_rank == 0:
        say(
            "state= is empty, so no position in the data is held. Pass its source: attach(engine, state={'data': ...})."
        )
    if (states := tracked_states()) is not None:
        objects.setdefault("random", states)
    if engine.lr_scheduler is not None:
        objects.setdefault("lr", engine.lr_scheduler)
    schedule = engine if is_engine(engine) else None
    return reft.attach(engine.module, engine, schedule, state=objects, **options)
