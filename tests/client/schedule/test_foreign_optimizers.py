"""Which marks give no snapshot because the state would not be complete."""

from __future__ import annotations

from reft.client.schedule.foreign_optimizers import ForeignOptimizerGuard


class DeepSpeedEngine:
    """An optimizer that is not torch's, and keeps its gradients in buffers of its own."""


def test_a_mark_between_the_micro_batches_of_an_engine_gives_no_snapshot():
    guard = ForeignOptimizerGuard([DeepSpeedEngine()], lambda _: False, lambda _: None)
    guard.own_step(0)
    assert guard.mark(is_unmarked=False, modules=()) == ""
    reason = guard.mark(is_unmarked=False, modules=())
    assert "no step of DeepSpeedEngine since the last mark" in reason
    guard.own_step(0)
    assert guard.mark(is_unmarked=False, modules=()) == ""


def test_a_step_that_a_gradient_scaler_skipped_is_a_step_of_any_optimizer():
    guard = ForeignOptimizerGuard([DeepSpeedEngine()], lambda _: False, lambda _: None)
    guard.skipped_step()
    assert guard.mark(is_unmarked=False, modules=()) == ""
