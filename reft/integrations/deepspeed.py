"""DeepSpeed in one line, after `deepspeed.initialize`:

    engine, optimizer, loader, schedule = deepspeed.initialize(...)
    session = attach(engine, state={"data": data})
    for step in session.steps(total):
        ...                                            # all micro batches of a step, or engine.train_batch(data)

What of the engine is held, and how, stands in `reft.client.state.extract.deepspeed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import reft
from reft.client.schedule.hooks.deepspeed import is_engine
from reft.client.session import Session
from reft.console import say


def attach(engine: Any, *, state: Mapping[str, Any] | None = None, **options: Any) -> Session:
    """Protects a DeepSpeed engine, and brings its state back if this is a restart. Call it on every rank.

    Args:
        engine: DeepSpeedEngine, or PipelineEngine, whose idle times are then used for copies.
        state: name → anything else that belongs to the state, above all what the batches come from.
        options: for `reft.attach`.

    Raises:
        reft.errors.ReftError: see `reft.attach`; or the engine runs what is not held, which is named.
    """
    held = dict(state or {})
    if not held and engine.global_rank == 0:
        say("not covered: the data position; pass what the batches come from: attach(engine, state={'data': ...}).")
    if engine.lr_scheduler is not None:
        held.setdefault("lr", engine.lr_scheduler)
    schedule = engine if is_engine(engine) else None
    return reft.attach(engine.module, engine, schedule, state=held, **options)
