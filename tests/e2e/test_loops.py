"""Loops of tutorials go on bit for bit: a prefetched batch, a best loss, iter() after attach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.daemons import DaemonProcess
from tests.support.train_loop import LoopTrainers
from tests.support.trainers import Spec

STEPS = 9
SEALED = {"seal_at": [3, 4, 5]}
KILLED = {**SEALED, "die_at": 5}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    process = DaemonProcess()
    yield process
    process.close()


def run(spec: Spec) -> dict[str, Any]:
    trainers = LoopTrainers(spec)
    assert trainers.wait() == [0], trainers.errors()
    return trainers.results()[0]


def restarted(spec: Spec) -> dict[str, Any]:
    """Runs a job that is SIGKILLed after step 5, and once more to its end."""
    killed = LoopTrainers(spec)
    assert killed.wait() == [-9], killed.errors()
    again = run(spec)
    assert 4 <= again["began"]["step"] <= 6, "step 5 was sealed"
    return again


def test_a_killed_loop_goes_on_with_its_batch_its_best_loss_and_its_draws(daemon: DaemonProcess) -> None:
    """The batch is a leaf. The DataLoader of each process draws a seed between attach and loop."""
    plain = run(Spec(daemon.address, job="plain", steps=STEPS, options=SEALED))
    again = restarted(Spec(daemon.address, steps=STEPS, options=KILLED))
    began = again["began"]["step"]
    assert again["losses"] == plain["losses"][began:] and again["end"] == plain["end"]
    assert again["began"]["best"] == min(map(float.fromhex, plain["losses"][:began]))


def test_a_killed_loop_that_marks_by_itself_is_told_which_generator_moved(daemon: DaemonProcess) -> None:
    again = restarted(Spec(daemon.address, job="marked", steps=STEPS, options={**KILLED, "marks": True}))
    assert "the global torch generator moved between attach and the first forward" in again["said"]
