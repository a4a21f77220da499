"""make chaos: three random crashes in a row, and the result equals an undisturbed run.

Random ranks die at random points, and so do daemons.
"""

from __future__ import annotations

import random

import pytest

from tests.support.daemons import DaemonProcess
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

STEPS = 40
CHUNK = {"REFT_CHUNK_BYTES": "4096"}
POINTS = ["snapshot.begin", "snapshot.chunk", "snapshot.landing", "snapshot.landed", "snapshot.sealed", "restore.chunk"]


def crash(chance: random.Random, epoch: int) -> str:
    """Returns a failpoint for one attach: where, at which step, and on which rank."""
    point = chance.choice(POINTS)
    if point == "restore.chunk":
        return f"{point}:kill:epoch={epoch}:chunk={chance.randrange(14)}"
    step = f":from={chance.randrange(1, STEPS)}:after={chance.randrange(3)}"
    return f"{point}:kill:epoch={epoch}{step}" + chance.choice(["", ":rank=0", ":rank=1"])


@pytest.fixture(scope="module")
def undisturbed():
    process = DaemonProcess()
    yield run(Spec(process.address, job="plain", steps=STEPS, environment=CHUNK), 2)
    process.close()


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(60))
def test_random_crashes(daemon, undisturbed, seed):
    chance = random.Random(seed)
    for epoch in (1, 2, 3):
        trainers = Trainers(Spec(daemon.address, steps=STEPS, environment=CHUNK, failpoints=crash(chance, epoch)), 2)
        trainers.wait()
        if chance.random() < 0.3:
            daemon.kill()
            daemon.start()
    after = run(Spec(daemon.address, steps=STEPS, environment=CHUNK), 2)
    assert after[0]["began"] == after[1]["began"]
    assert_equal(after, undisturbed)


@pytest.mark.soak
def test_two_hundred_restarts_of_one_job(daemon, undisturbed):
    for count in range(200):
        Trainers(
            Spec(daemon.address, steps=STEPS, environment=CHUNK, failpoints=crash(random.Random(count), count + 1)), 2
        ).wait()
    after = run(Spec(daemon.address, steps=STEPS, environment=CHUNK), 2)
    assert after[0]["began"] == after[1]["began"]
    assert_equal(after, undisturbed)
