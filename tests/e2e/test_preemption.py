"""All processes and all memory are gone, several times: how many steps are trained twice.

    train ─► preempted at a step ─► the same command ─► … ─► the end, equal to an undisturbed run

The scenario has 1,600 steps and four preemptions (make soak); `make test-jobs` has a smaller one.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from reft.cli.main import main
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.trainers import Spec, Trainers, run

WORLD = 2  # each rank on a node of its own
STEP_S = 0.02  # a step of a small model is faster than a round of messages on a busy machine
PERSIST_EACH = 50
RESTORED = re.compile(r"GOES ON FROM STORAGE: step (\d+) ")


@dataclass(frozen=True)
class Scenario:
    """A training that is preempted.

    Attributes:
        steps: of the training.
        preemptions: how often it is preempted.
    """

    steps: int
    preemptions: int

    @property
    def preempted_at(self) -> list[int]:
        return [self.steps * number // (self.preemptions + 1) for number in range(1, self.preemptions + 1)]


SCENARIOS = [
    pytest.param(Scenario(160, 2), id="160 steps"),
    pytest.param(Scenario(1600, 4), id="1600 steps", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
]


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


def wasted_steps(
    site: Site, storage: Path, scenario: Scenario, flags: Sequence[str],
    preempt: Callable[[Trainers, Sequence[DaemonProcess]], None], persist_each: int = 0,
) -> int:  # fmt: skip
    """Trains with preemptions; returns how many steps were trained more than once.

    Fails unless the result equals an undisturbed run.

    Args:
        site: adds nodes.
        storage: the folder of `--persist`.
        scenario: what is trained.
        flags: further flags of the daemons.
        preempt: ends all trainers and daemons; their memory is removed afterwards.
        persist_each: steps between two calls of `session.persist`; 0: none.
    """

    def start(*pause_at: int) -> tuple[list[DaemonProcess], Trainers]:
        # The step before is whole at the preemption: how late a round is must decide nothing.
        options = {"step_s": STEP_S, "pause_at": pause_at, "seal_at": pause_at}
        options["persist_each"] = persist_each or scenario.steps
        daemons = site.add(WORLD, "--persist", str(storage), *flags)
        addresses = [daemon.address for daemon in daemons]
        return daemons, Trainers(Spec(addresses[0], steps=scenario.steps, options=options), WORLD, addresses)

    began, wasted = 0, 0
    for step in scenario.preempted_at:
        daemons, job = start(step)
        job.wait_for(step)
        if persist_each:
            wait_for_checkpoint(storage, step - step % persist_each)
        preempt(job, daemons)
        assert began == 0 or restored_step(job) == began
        for daemon in daemons:
            shutil.rmtree(daemon.folder)
        began = newest_checkpoint(storage)
        wasted += step + 1 - began
    daemons, job = start()
    assert job.wait() == [0] * WORLD, job.errors()[-3000:]
    plain = DaemonProcess()
    try:
        expected = run(Spec(plain.address, steps=scenario.steps), WORLD)
    finally:
        plain.close()
    for one, other in zip(job.results(), expected, strict=True):
        assert (one["began"], one["from"]) == (began, "storage")
        assert one["digests"] == other["digests"]
        assert one["losses"] == other["losses"][began:]
        assert one["random"] == other["random"]
    return wasted


def restored_step(job: Trainers) -> int:
    """Returns the step that a run has begun with."""
    return int(RESTORED.findall(job.errors())[0])


def newest_checkpoint(storage: Path) -> int:
    """Returns the newest step that has a complete checkpoint."""
    manifests = storage.glob("job/*/e*-s*/MANIFEST.json")
    return max((int(path.parent.name.rpartition("-s")[2]) for path in manifests), default=0)


def wait_for_checkpoint(storage: Path, step: int) -> None:
    """Waits for a checkpoint: how fast storage is must not decide how many steps are lost."""
    until(lambda: newest_checkpoint(storage) >= step, what=f"the checkpoint of step {step}")


def terminate(job: Trainers, daemons: Sequence[DaemonProcess]) -> None:
    """Sends SIGTERM to all processes at once, as a scheduler does; the daemons have a grace."""
    for daemon in daemons:
        daemon.process.send_signal(signal.SIGTERM)
    for process in job.processes:
        process.terminate()
        process.join(60)
    for daemon in daemons:
        assert daemon.process.wait(60) == 0, daemon.log.read_text()
        assert "can't be flushed" not in (log := daemon.log.read_text()) and "within the grace" not in log, log


def kill(job: Trainers, daemons: Sequence[DaemonProcess]) -> None:
    """Kills all processes, without a grace."""
    job.kill()
    for daemon in daemons:
        daemon.kill()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_flush_in_the_grace_wastes_few_steps(site: Site, storage: Path, scenario: Scenario) -> None:
    wasted = wasted_steps(site, storage, scenario, ["--flush-on-exit", "--grace", "25s"], terminate)
    assert wasted == scenario.preemptions, "the step that was under way, each time"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_a_grace_the_steps_since_the_checkpoint_are_wasted(
    site: Site, storage: Path, scenario: Scenario
) -> None:
    wasted = wasted_steps(site, storage, scenario, [], kill, PERSIST_EACH)
    assert wasted <= PERSIST_EACH * scenario.preemptions


def test_a_purge_is_followed_by_a_fresh_start(site: Site, storage: Path) -> None:
    flags = ["--persist", str(storage), "--flush-on-exit"]
    (lost,) = site.add(1, *flags)
    job = Trainers(Spec(lost.address, options={"seal_at": [4], "pause_at": [4]}))
    job.wait_for(4)
    terminate(job, [lost])
    shutil.rmtree(lost.folder)
    (daemon,) = site.add(1, *flags)
    (result,) = run(Spec(daemon.address))
    assert (result["began"], result["from"]) == (4, "storage")
    purge = ["purge", "job", "--yes", "--daemon", daemon.address]
    assert CliRunner().invoke(main, purge, catch_exceptions=False).exit_code == 0
    vanish(daemon)
    (daemon,) = site.add(1, *flags)
    (result,) = run(Spec(daemon.address))
    assert (result["began"], result["from"]) == (0, None)
