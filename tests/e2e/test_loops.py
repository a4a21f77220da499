"""Loops of tutorials go on bit for bit: a prefetched batch, a best loss, iter() after attach."""

from __future__ import annotations

from typing import Any

from tests.support.daemons import DaemonProcess
from tests.support.train_loop import LoopTrainers
from tests.support.trainers import Spec

STEPS = 9
SEALED = {"seal_at": [3, 4, 5]}


def run(spec: Spec) -> dict[str, Any]:
    trainers = LoopTrainers(spec)
    assert trainers.wait() == [0], trainers.errors()
    return trainers.results()[0]


def test_a_killed_loop_goes_on_with_its_batch_its_best_loss_and_its_draws():
    """The batch is a leaf. The DataLoader of each process draws a seed between attach and loop."""
    daemon = DaemonProcess()
    try:
        plain = run(Spec(daemon.address, job="plain", steps=STEPS, options=SEALED))
        killed = LoopTrainers(Spec(daemon.address, steps=STEPS, options={**SEALED, "die_at": 5}))
        assert killed.wait() == [-9], killed.errors()
        again = run(Spec(daemon.address, steps=STEPS, options={**SEALED, "die_at": 5}))
        began = again["began"]["step"]
        assert 4 <= began <= 6, "step 5 was sealed"
        assert again["losses"] == plain["losses"][began:] and again["end"] == plain["end"]
        assert again["began"]["best"] == min(map(float.fromhex, plain["losses"][:began]))
    finally:
        daemon.close()
