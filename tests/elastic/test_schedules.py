"""The training that scenarios of shrinking and growing are judged by: what its losses show, and what they would not hide."""

from __future__ import annotations

from tests.support import elastic_train

SCHEDULE = [4] * 5 + [3] * 5 + [4] * 5  # worker counts, step by step


def losses(share: int = 0) -> list[float]:
    """Of a run with this schedule; `share`: the worker count that the shares are made for, by default the step's own."""
    model, optimizer = elastic_train.build()
    found = []
    for step, world in enumerate(SCHEDULE):
        micro = [range(rank, elastic_train.MICRO, share or world) for rank in range(world)]
        total = sum(elastic_train.gradients(model, step, each) for each in micro)
        found.append(elastic_train.apply(model, optimizer, total))
    return found


def test_a_run_with_a_schedule_of_worker_counts_has_the_losses_of_an_undisturbed_one():
    expected = list(elastic_train.alone(len(SCHEDULE)))
    assert losses() == expected
    wrong = losses(share=4)
    assert wrong[:5] == expected[:5] and all(a != b for a, b in zip(wrong[5:], expected[5:], strict=True))
