"""make chaos: daemons and trainers are stopped, starved, killed and cut off for a while.

After the storm every step becomes whole again. A fault lasts for a number of training steps, so a
busy machine has the same storm.
"""

from __future__ import annotations

import random
import signal

import psutil
import pytest

from tests.support.daemons import DaemonProcess, Site, until
from tests.support.trainers import Spec, Trainers

CALM, STEPS = 1500, 2500
# After the storm the newest whole step may be this number of steps behind. Steps take milliseconds,
# so some 16 steps are skipped.
MOST_STEPS_BEHIND = 40


class Storm:
    """Faults that end no trainer.

    Args:
        rng: the random source that chooses the faults.
        trainers: the trainers that run meanwhile.
        daemons: the daemons of their nodes.
    """

    def __init__(self, rng: random.Random, trainers: Trainers, daemons: list[DaemonProcess]) -> None:
        self.rng, self.trainers, self.daemons = rng, trainers, daemons
        self.faults: list[str] = []

    def rage(self, until_step: int) -> None:
        kinds = [self.pulse, self.pulse, self.pulse, self.starve, self.restart, self.cut, self.hold]
        while self.trainers.step() < until_step:
            fault, daemon = self.rng.choice(kinds), self.rng.choice(self.daemons)
            self.faults.append(f"{self.trainers.step()}: {fault.__name__} {self.daemons.index(daemon)}")
            fault(daemon)

    def wait_steps(self, steps: int) -> None:
        """Waits until training has made `steps` more steps."""
        end = self.trainers.step() + steps
        until(lambda: self.trainers.step() >= end, 60, "steps beside a fault")

    def pulse(self, daemon: DaemonProcess) -> None:
        daemon.kill(signal.SIGSTOP)
        self.wait_steps(self.rng.choice([2, 10, 50, 150]))
        daemon.kill(signal.SIGCONT)
        self.wait_steps(self.rng.choice([0, 1, 5, 30]))

    def starve(self, daemon: DaemonProcess) -> None:
        for _ in range(8):
            daemon.kill(signal.SIGSTOP)
            self.wait_steps(self.rng.choice([10, 40]))
            daemon.kill(signal.SIGCONT)
            self.wait_steps(self.rng.choice([0, 1]))

    def restart(self, daemon: DaemonProcess) -> None:
        daemon.kill()
        self.wait_steps(self.rng.choice([0, 30, 150]))
        daemon.start()

    def cut(self, daemon: DaemonProcess) -> None:
        for path in daemon.home.glob("d.sock*"):
            path.unlink(missing_ok=True)
        if self.rng.random() < 0.5:
            until(daemon.answers, what="new sockets of the daemon")

    def hold(self, _: DaemonProcess) -> None:
        """Suspends one trainer for a moment, and with it all others.

        Snapshots under way become whole or void meanwhile.
        """
        pid = self.rng.choice(self.trainers.processes).pid
        process = psutil.Process(pid)
        process.suspend()
        until(lambda: process.status() == "stopped", what="its stop")
        process.resume()


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(20))
def test_every_step_becomes_whole_after_the_storm(seed):
    rng = random.Random(seed)
    site = Site()
    try:
        daemons = site.add(3)
        options = {"pause_at": [2, STEPS - 100], "tells": True, "slots": rng.choice([2, 3])}
        trainers = Trainers(Spec("", steps=STEPS, options=options), 3, [daemon.address for daemon in daemons])
        trainers.wait_for(2)
        trainers.let_go(2)
        storm = Storm(rng, trainers, daemons)
        storm.rage(CALM)
        until(lambda: trainers.step() >= STEPS - 100, 120, f"the calm after {storm.faults}")
        trainers.wait_for(STEPS - 100)
        # A trainer pauses after the fence, so no more slots will be sealed now. The round may still
        # be deciding.
        for daemon in daemons:
            goal = f"a whole step at most {MOST_STEPS_BEHIND} back after {storm.faults}"
            until(lambda d=daemon: d.answers() and d.status("job").whole > STEPS - 100 - MOST_STEPS_BEHIND, what=goal)
        trainers.let_go(STEPS - 100)
        assert trainers.wait(120) == [0] * 3, trainers.errors()
        assert [result["sealed"] for result in trainers.results()] == [[True, STEPS]] * 3, storm.faults
    finally:
        site.close()
