"""Runs one training with its faults until the agents end. The faults are plain data."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reft.cli.demo.cluster import Cluster, DemoError, Training
from reft.cli.demo.records import RecoveryTimes, TrainingResult, recovery
from reft.core.status.health import LAG_STEPS

POLL_S = 0.1
STALL_S = 90.0  # the run has failed if no rank writes a record for so long


@dataclass(frozen=True)
class CopyKill:
    """SIGKILLs one rank from inside, while it copies a chunk of the snapshot of `step`.

    Only in the first attach of the job.
    """

    rank: int
    step: int
    chunk: int = 1

    @property
    def failpoint(self) -> str:
        """Returns the entry for REFT_FAILPOINTS."""
        return f"snapshot.chunk:kill:rank={self.rank}:step={self.step}:chunk={self.chunk}:epoch=1"

    def __str__(self) -> str:
        return f"SIGKILL of rank {self.rank} in mid-copy of the snapshot of step {self.step}"


@dataclass(frozen=True)
class OutsideKill:
    """SIGKILLs ranks after all ranks completed `step` and recovered from earlier faults."""

    ranks: tuple[int, ...]
    step: int

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.ranks))
        return f"SIGKILL of rank{'s' * (len(self.ranks) > 1)} {numbers} from outside"


Fault = CopyKill | OutsideKill


@dataclass(frozen=True)
class Scenario:
    """A training of `steps` steps, and its faults in order."""

    job: str
    steps: int
    faults: Sequence[Fault] = ()


@dataclass
class SeenFault:
    """A fault that has happened: when, which processes ended, and how training recovered."""

    fault: Fault
    killed_s: float
    pids: dict[int, int]
    recovery: RecoveryTimes | None = None

    @property
    def is_overcome(self) -> bool:
        """Returns whether all ranks continued from memory, from a recent step.

        The torn snapshot of the killed rank must not be restored.
        """
        recovery = self.recovery
        if recovery is None or recovery.source != "memory" or recovery.base < self.fault.step - LAG_STEPS:
            return False
        return isinstance(self.fault, OutsideKill) or recovery.base < self.fault.step


@dataclass(frozen=True)
class ScenarioOutcome:
    """The result of a training."""

    result: TrainingResult
    happened: Sequence[SeenFault]
    seconds: float


Watch = Callable[[TrainingResult, Sequence[SeenFault]], None]


def run(cluster: Cluster, scenario: Scenario, watch: Watch = lambda result, happened: None) -> ScenarioOutcome:
    """Runs the scenario to its end.

    Args:
        cluster: the pretend nodes.
        scenario: the training and its faults.
        watch: called about ten times a second with the records of the ranks, and the faults so far.

    Raises:
        DemoError: an agent failed, or no rank wrote a record for STALL_S. The message has the end
            of the logs.
    """
    began = time.monotonic()
    failpoints = ",".join(fault.failpoint for fault in scenario.faults if isinstance(fault, CopyKill))
    training = cluster.launch(scenario.job, scenario.steps, environment={"REFT_FAILPOINTS": failpoints})
    happened: list[SeenFault] = []
    changed_s, size = began, -1
    while training.is_running:
        time.sleep(POLL_S)
        result = training.result()
        _next_fault(cluster, scenario, result, happened)
        for each in happened:
            each.recovery = each.recovery or recovery(result, each.killed_s)
        watch(result, happened)
        written = sum(len(a.steps) + (a.attached_s is not None) for many in result.attempts.values() for a in many)
        if written != size:
            changed_s, size = time.monotonic(), written
        if time.monotonic() - changed_s > STALL_S:
            raise DemoError(f"job {scenario.job} has made no progress for {STALL_S:.0f} s.\n{training.tail()}")
    return ScenarioOutcome(_final_result(training, scenario), happened, time.monotonic() - began)


def _final_result(training: Training, scenario: Scenario) -> TrainingResult:
    codes = [agent.returncode for agent in training.agents]
    if any(codes):
        raise DemoError(f"job {scenario.job} failed: its agents ended with {codes}.\n{training.tail()}")
    return training.result()


def _next_fault(cluster: Cluster, scenario: Scenario, result: TrainingResult, happened: list[SeenFault]) -> None:
    """Causes the next fault if it is due, or notes that it has happened."""
    if len(happened) == len(scenario.faults) or not all(each.recovery for each in happened):
        return
    fault = scenario.faults[len(happened)]
    if isinstance(fault, CopyKill):
        first = next((each for each in result.attempts[fault.rank] if each.steps), None)
        # The last line comes just before the snapshot in which the rank dies. The daemon knows
        # whether it died.
        if first and first.steps[-1].step == fault.step and first.pid not in cluster.pids(scenario.job).values():
            happened.append(SeenFault(fault, first.steps[-1].time_s, {fault.rank: first.pid}))
    elif result.completed >= fault.step:
        try:
            now = time.monotonic()
            pids = cluster.signal_ranks(scenario.job, fault.ranks, signal.SIGKILL)
        except (DemoError, ProcessLookupError):
            return  # a rank is being restarted just now: try again later
        happened.append(SeenFault(fault, now, pids))
