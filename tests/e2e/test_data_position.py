"""A job is SIGKILLed in an epoch, and goes on with the same batches, draws and losses.

make test    three cells, and each cell without kills (`client/data/test_position.py`)
make soak    all cells
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.support import train_epochs
from tests.support.daemons import DaemonProcess
from tests.support.drawing_data import KINDS, WORKERS
from tests.support.trainers import Spec, Trainers

PLACES = ("mid-epoch", "last batch", "between epochs", "in validation")
SHORT = (
    ("shuffle", "2 persistent workers", "mid-epoch"),
    ("distributed", "no workers", "last batch"),
    ("iterable", "no workers", "in validation"),
)
pytestmark = pytest.mark.timeout(300)


class EpochTrainers(Trainers):
    """The ranks of a training in epochs."""

    target = staticmethod(train_epochs.train)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    process = DaemonProcess()
    yield process
    process.close()


def trained(address: str, job: str, **options: Any) -> EpochTrainers:
    """Starts a job of one rank, or of two that divide the samples."""
    is_split = options["kind"] == "distributed"
    options["batches"] = 3 if is_split else 6
    return EpochTrainers(Spec(address, job=job, options=options), 2 if is_split else 1)


def ended(job: EpochTrainers) -> list[dict[str, Any]]:
    codes = job.wait()
    assert set(codes) == {0}, (codes, job.errors()[-3000:])
    return job.results()


@cache
def undisturbed(address: str, kind: str, workers: str) -> list[dict[str, Any]]:
    return ended(trained(address, f"whole-{uuid.uuid4().hex[:8]}", kind=kind, workers=workers))


CELLS = [
    pytest.param(*cell, marks=[pytest.mark.slow] * (cell not in SHORT)) for cell in product(KINDS, WORKERS, PLACES)
]


@pytest.mark.parametrize(("kind", "workers", "place"), CELLS)
def test_a_killed_job_goes_on_with_the_next_batch(kind, workers, place, daemon):
    job = f"killed-{uuid.uuid4().hex[:8]}"
    killed = trained(daemon.address, job, kind=kind, workers=workers, dies=place)
    assert -9 in killed.wait(), killed.errors()[-3000:]
    # Only the number of workers counts, and only for an iterable dataset.
    as_here = workers if kind == "iterable" else "no workers"
    for resumed, whole in zip(
        ended(trained(daemon.address, job, kind=kind, workers=workers)),
        undisturbed(daemon.address, kind, as_here),
        strict=True,
    ):
        steps = [event[0] for event in whole["events"] if event[2] != "validation"]
        assert resumed["resumed_at"] in steps
        first = next(i for i, event in enumerate(whole["events"]) if event[0] == resumed["resumed_at"])
        assert resumed["events"] == whole["events"][first + 1 :]
