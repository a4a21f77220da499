"""Loops of tutorials go on bit for bit: a prefetched batch, a best loss, iter() after attach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.daemons import DaemonProcess, Site
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


def run(spec: Spec, *daemons: str) -> list[dict[str, Any]]:
    trainers = LoopTrainers(spec, len(daemons) or 1, daemons)
    assert set(trainers.wait()) == {0}, trainers.errors()
    return trainers.results()


def restarted(spec: Spec, *daemons: str) -> list[dict[str, Any]]:
    """Runs a job that is SIGKILLed after step 5, and once more to its end."""
    killed = LoopTrainers(spec, len(daemons) or 1, daemons)
    assert set(killed.wait()) == {-9}, killed.errors()
    again = run(spec, *daemons)
    assert all(4 <= each["began"]["step"] <= 6 for each in again), "step 5 was sealed"
    return again


def check_equal(again: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
    """Compares each rank's losses, best loss, batch and draws with those of an undisturbed run."""
    for one, other in zip(again, plain, strict=True):
        began = one["began"]["step"]
        assert one["losses"] == other["losses"][began:] and one["end"] == other["end"]
        assert one["began"]["best"] == min(map(float.fromhex, other["losses"][:began]))


def test_a_killed_loop_goes_on_with_its_batch_its_best_loss_and_its_draws(daemon: DaemonProcess) -> None:
    """The batch is a leaf. The DataLoader of each process draws a seed between attach and loop."""
    plain = run(Spec(daemon.address, job="plain", steps=STEPS, options=SEALED))
    check_equal(restarted(Spec(daemon.address, steps=STEPS, options=KILLED)), plain)


def test_each_rank_of_two_nodes_gets_its_own_batch_back(site: Site) -> None:
    """Two ranks have other batches: staged leaves, which a placement made at attach holds."""
    daemons = [each.address for each in site.add(2)]
    plain = run(Spec(daemons[0], job="plain", steps=STEPS, options=SEALED), *daemons)
    again = restarted(Spec(daemons[0], steps=STEPS, options=KILLED), *daemons)
    check_equal(again, plain)
    assert again[0]["end"]["batch"] != again[1]["end"]["batch"]


def test_a_killed_loop_that_marks_by_itself_is_told_which_generator_moved(daemon: DaemonProcess) -> None:
    (again,) = restarted(Spec(daemon.address, job="marked", steps=STEPS, options={**KILLED, "marks": True}))
    assert "the global torch generator moved between attach and the first forward" in again["said"]
