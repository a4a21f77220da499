"""DeepSpeed: `attach` after `deepspeed.initialize`.

    engine, optimizer, loader, schedule = deepspeed.initialize(...)
    session = attach(engine, state={"data": data})
    for step in session.steps(total):
        ...                              # all micro batches of a step, or engine.train_batch(data)

`reft.client.state.extract.deepspeed` says which state of the engine is held, and how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import reft
from reft.client.schedule.hooks.deepspeed import is_engine
from reft.client.session import Session
from reft.console import say


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
    if engine.lr_scheduler is not None:
        objects.setdefault("lr", engine.lr_scheduler)
    schedule = engine if is_engine(engine) else None
    return reft.attach(engine.module, engine, schedule, state=objects, **options)
