"""make chaos: daemons and trainers are stopped, starved, killed and cut off, until it is over: then every step counts again.

Faults last as long as training takes for some steps, so a busy machine has the same storm.
"""

from __future__ import annotations

import random
import signal

import psutil
import pytest

from tests.support.daemons import DaemonProcess, Site, until
from tests.support.trainers import Spec, Trainers

CALM, STEPS = 1500, 2500
NEAR = (
    40  # steps that the newest whole one may be behind once it is over: some 16 are left out, steps take milliseconds
)


class Storm:
    """Faults that end no trainer.

    Args:
        chance: what happens.
        trainers: that train meanwhile.
        daemons: of their nodes.
    """

    def __init__(self, chance: random.Random, trainers: Trainers, daemons: list[DaemonProcess]) -> None:
        self.chance, self.trainers, self.daemons = chance, trainers, daemons
        self.happened: list[str] = []

    def rage(self, until_step: int) -> None:
        faults = [self.pulse, self.pulse, self.pulse, self.starve, self.restart, self.cut, self.hold]
        while self.trainers.step() < until_step:
            fault, daemon = self.chance.choice(faults), self.chance.choice(self.daemons)
            self.happened.append(f"{self.trainers.step()}: {fault.__name__} {self.daemons.index(daemon)}")
            fault(daemon)

    def last(self, steps: int) -> None:
        """Lets training go on for so many steps."""
        end = self.trainers.step() + steps
        until(lambda: self.trainers.step() >= end, 60, "steps beside a fault")

    def pulse(self, daemon: DaemonProcess) -> None:
        daemon.kill(signal.SIGSTOP)
        self.last(self.chance.choice([2, 10, 50, 150]))
        daemon.kill(signal.SIGCONT)
        self.last(self.chance.choice([0, 1, 5, 30]))

    def starve(self, daemon: DaemonProcess) -> None:
        for _ in range(8):
            daemon.kill(signal.SIGSTOP)
            self.last(self.chance.choice([10, 40]))
            daemon.kill(signal.SIGCONT)
            self.last(self.chance.choice([0, 1]))

    def restart(self, daemon: DaemonProcess) -> None:
        daemon.kill()
        self.last(self.chance.choice([0, 30, 150]))
        daemon.start()

    def cut(self, daemon: DaemonProcess) -> None:
        for path in daemon.home.glob("d.sock*"):
            path.unlink(missing_ok=True)
        if self.chance.random() < 0.5:
            until(daemon.answers, what="its doors are made again")

    def hold(self, _: DaemonProcess) -> None:
        """A trainer stands still, and with it all others: what is under way gets its outcome meanwhile."""
        held = self.chance.choice(self.trainers.processes).pid
        other = psutil.Process(held)
        other.suspend()
        until(lambda: other.status() == "stopped", what="its stop")
        other.resume()


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(20))
def test_when_the_storm_is_over_every_step_counts(seed):
    chance = random.Random(seed)
    site = Site()
    try:
        daemons = site.add(3)
        options = {"pause_at": [2, STEPS - 100], "tells": True, "slots": chance.choice([2, 3])}
        trainers = Trainers(Spec("", steps=STEPS, options=options), 3, [daemon.address for daemon in daemons])
        trainers.wait_for(2)
        trainers.let_go(2)
        storm = Storm(chance, trainers, daemons)
        storm.rage(CALM)
        until(lambda: trainers.step() >= STEPS - 100, 120, f"the calm after {storm.happened}")
        trainers.wait_for(STEPS - 100)
        # A trainer pauses behind the fence, so what is sealed now is all that will be; outcomes may still be on their way.
        for daemon in daemons:
            near = f"a whole step at most {NEAR} back after {storm.happened}"
            until(lambda d=daemon: d.answers() and d.status("job").whole > STEPS - 100 - NEAR, what=near)
        trainers.let_go(STEPS - 100)
        assert trainers.wait(120) == [0] * 3, trainers.errors()
        assert [result["sealed"] for result in trainers.results()] == [[True, STEPS]] * 3, storm.happened
    finally:
        site.close()
