"""One training with its faults: launch, watch, kill, until the agents end. What is to be killed when is plain data."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reft.cli.demo.cluster import Cluster, DemoError, Training
from reft.cli.demo.records import RecoveryTimes, TrainingResult, recovery
from reft.core.status.health import LAG_STEPS

POLL_S = 0.1
STALL_S = 90.0  # without a new record from any rank, the run has failed


@dataclass(frozen=True)
class KillInCopy:
    """SIGKILLs one rank from inside, while it copies a chunk of the snapshot of `step`, in the job's first attach."""

    rank: int
    step: int
    chunk: int = 1

    @property
    def failpoint(self) -> str:
        """What REFT_FAILPOINTS must say."""
        return f"snapshot.chunk:kill:rank={self.rank}:step={self.step}:chunk={self.chunk}:epoch=1"

    def __str__(self) -> str:
        return f"SIGKILL of rank {self.rank} in mid-copy of the snapshot of step {self.step}"


@dataclass(frozen=True)
class KillFromOutside:
    """SIGKILLs ranks from outside, once all ranks have completed `step` and have recovered from earlier faults."""

    ranks: tuple[int, ...]
    step: int

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.ranks))
        return f"SIGKILL of rank{'s' * (len(self.ranks) > 1)} {numbers} from outside"


Fault = KillInCopy | KillFromOutside


@dataclass(frozen=True)
class Scenario:
    """A training of `steps` steps, and the faults that hit it, in order."""

    job: str
    steps: int
    faults: Sequence[Fault] = ()


@dataclass
class SeenFault:
    """A fault that was seen to happen: which processes ended, when, and how training came back."""

    fault: Fault
    killed_s: float
    pids: dict[int, int]
    recovery: RecoveryTimes | None = None

    @property
    def is_overcome(self) -> bool:
        """Whether all ranks went on from memory: from a recent step, but not from the snapshot that was torn."""
        back = self.recovery
        if back is None or back.source != "memory" or back.base < self.fault.step - LAG_STEPS:
            return False
        return isinstance(self.fault, KillFromOutside) or back.base < self.fault.step


@dataclass(frozen=True)
class ScenarioOutcome:
    """How a training ended."""

    result: TrainingResult
    happened: Sequence[SeenFault]
    seconds: float


Watch = Callable[[TrainingResult, Sequence[SeenFault]], None]


def run(cluster: Cluster, scenario: Scenario, watch: Watch = lambda result, happened: None) -> ScenarioOutcome:
    """Trains the scenario to its end.

    Args:
        watch: called about ten times a second with what the ranks have written and which faults have happened.

    Raises:
        DemoError: an agent failed, or nothing was trained for STALL_S; the end of the logs is in the message.
    """
    began = time.monotonic()
    failpoints = ",".join(fault.failpoint for fault in scenario.faults if isinstance(fault, KillInCopy))
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
            raise DemoError(f"job {scenario.job} has done nothing for {STALL_S:.0f} s.\n{training.tail()}")
    return ScenarioOutcome(_ended(training, scenario), happened, time.monotonic() - began)


def _ended(training: Training, scenario: Scenario) -> TrainingResult:
    codes = [agent.returncode for agent in training.agents]
    if any(codes):
        raise DemoError(f"job {scenario.job} failed: its agents ended with {codes}.\n{training.tail()}")
    return training.result()


def _next_fault(cluster: Cluster, scenario: Scenario, result: TrainingResult, happened: list[SeenFault]) -> None:
    """Makes the next fault happen if it is due, or notes that it has."""
    if len(happened) == len(scenario.faults) or not all(each.recovery for each in happened):
        return
    fault = scenario.faults[len(happened)]
    if isinstance(fault, KillInCopy):
        first = next((each for each in result.attempts[fault.rank] if each.steps), None)
        # Its last line stands right before the snapshot in which it dies; that it did, the daemon tells.
        if first and first.steps[-1].step == fault.step and first.pid not in cluster.pids(scenario.job).values():
            happened.append(SeenFault(fault, first.steps[-1].time_s, {fault.rank: first.pid}))
    elif result.completed >= fault.step:
        try:
            now = time.monotonic()
            pids = cluster.signal_ranks(scenario.job, fault.ranks, signal.SIGKILL)
        except (DemoError, ProcessLookupError):
            return  # a rank is being restarted just now: try again at the next look
        happened.append(SeenFault(fault, now, pids))
