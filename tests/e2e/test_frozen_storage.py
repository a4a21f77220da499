"""Storage is frozen while a checkpoint is written: no step waits, and no child is added."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from reft.wire.v1 import daemon_pb2 as pb
from tests.e2e.test_preemption import newest_checkpoint
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.frozen import freeze, loop_disk, thaw
from tests.support.trainers import Spec, Trainers, run

WORLD = 2
STEP_S = 0.03
STEPS = 100_000  # never reached
BEFORE_S = 5.0
# Below the freeze. Without load no step takes a tenth of a second; busy cores may take a second.
WAIT_S = 3.0
LOOK = threading.Event()  # never set


@pytest.fixture
def storage() -> Iterator[Path]:
    with loop_disk() as folder:
        yield folder


@pytest.mark.parametrize("frozen_s", [4.0, pytest.param(120.0, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_training_goes_on_while_storage_is_frozen(storage: Path, site: Site, frozen_s: float) -> None:
    """The state that comes back afterwards equals an undisturbed run."""
    daemons = site.add(WORLD, "--persist", str(storage), "--persist-every", "500ms")
    addresses = [daemon.address for daemon in daemons]
    job = Trainers(Spec(addresses[0], steps=STEPS, options={"step_s": STEP_S, "tells": True}), WORLD, addresses)
    until(lambda: newest_checkpoint(storage) > 0, what="a checkpoint")
    began_s = time.monotonic()
    watch(daemons, BEFORE_S)
    frozen_at_s = freeze_a_checkpoint(storage, daemons[0])
    try:
        held = storage_of(daemons[0])
        said = watch(daemons, frozen_s)
        assert storage_of(daemons[0]).persisted == held.persisted
    finally:
        thawed_s = time.monotonic()
        thaw(storage)
    until(lambda: storage_of(daemons[0]).persisted > held.step, 90, what="a checkpoint after the thaw")
    longest = [
        (job.longest_step(began_s, frozen_at_s, rank), job.longest_step(frozen_at_s, thawed_s, rank))
        for rank in range(WORLD)
    ]
    print(f"frozen for {frozen_s:g} s; longest step of each rank before, and meanwhile: {longest}; said: {said}")
    assert max(meanwhile for _, meanwhile in longest) < WAIT_S
    if frozen_s > 60:
        assert any("taken nothing for" in words or "still waits for" in words for words in said), said
    job.kill()
    check_restored(site, storage, daemons)


def storage_of(daemon: DaemonProcess) -> pb.StorageStatus:
    return daemon.status("job").storage


def freeze_a_checkpoint(storage: Path, daemon: DaemonProcess) -> float:
    """Freezes storage while a checkpoint is written, or before; returns when that was.

    A freeze may also meet the removal of old checkpoints. Then no new one begins, and the next try
    comes after one more checkpoint.
    """
    for _ in range(5):
        persisted, frozen_at_s = storage_of(daemon).persisted, time.monotonic()
        freeze(storage)
        with contextlib.suppress(AssertionError):
            until(lambda: storage_of(daemon).since_s > 1, 15, what="a checkpoint that waits")
            return frozen_at_s
        thaw(storage)
        until(lambda persisted=persisted: storage_of(daemon).persisted > persisted, what="one more checkpoint")
    raise AssertionError("no checkpoint waits for storage that is frozen")


def watch(daemons: Sequence[DaemonProcess], seconds: float) -> list[str]:
    """Looks at the daemons for a time: each answers, and has one child for storage at most.

    Returns:
        What `status` said was wrong.
    """
    said: list[str] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        assert all(len(psutil.Process(daemon.process.pid).children()) <= 1 for daemon in daemons)
        words = storage_of(daemons[0]).trouble
        if words and words not in said:
            said.append(words)
        LOOK.wait(0.2)
    return said


def check_restored(site: Site, storage: Path, daemons: Sequence[DaemonProcess]) -> None:
    """Goes on from storage on new nodes; compares some steps with an undisturbed run."""
    vanish(*daemons)
    began = newest_checkpoint(storage)
    addresses = [daemon.address for daemon in site.add(WORLD, "--persist", str(storage))]
    results = run(Spec(addresses[0], steps=began + 10), WORLD, addresses)
    (plain,) = site.add(1)
    expected = run(Spec(plain.address, steps=began + 10), WORLD)
    for one, other in zip(results, expected, strict=True):
        assert (one["began"], one["from"]) == (began, "storage")
        assert one["digests"] == other["digests"] and one["losses"] == other["losses"][began:]
