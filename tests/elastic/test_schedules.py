"""The training by whose losses the scenarios of shrinking and growing are judged."""

from __future__ import annotations

import pytest

from tests.support import elastic_train

SCHEDULE = [4] * 5 + [3] * 5 + [4] * 5  # worker counts, step by step


def losses(share: int = 0) -> list[float]:
    """Returns the losses of a run with this schedule.

    Args:
        share: the number of workers by which the work is divided; 0: that of the step.
    """
    model, optimizer = elastic_train.build()
    losses_by_step = []
    for step, world in enumerate(SCHEDULE):
        micro = [range(rank, elastic_train.MICRO, share or world) for rank in range(world)]
        total = sum(elastic_train.gradients(model, step, each) for each in micro)
        losses_by_step.append(elastic_train.apply(model, optimizer, total))
    return losses_by_step


@pytest.mark.slow
def test_a_schedule_of_worker_counts_does_not_change_the_losses():
    expected = list(elastic_train.alone(len(SCHEDULE)))
    assert losses() == expected
    wrong = losses(share=4)
    assert wrong[:5] == expected[:5] and all(a != b for a, b in zip(wrong[5:], expected[5:], strict=True))
