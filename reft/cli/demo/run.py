"""`reft-cli demo`: trains twice, once with two kinds of SIGKILL; then compares every bit."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.cli.demo.cluster import Cluster
from reft.cli.demo.records import BitComparison, TrainingResult, compare
from reft.cli.demo.scenario import CopyKill, OutsideKill, Scenario, ScenarioOutcome, SeenFault, run
from reft.cli.demo.screen import Progress, Screen
from reft.cli.signals import unwinding

SCHEMA_VERSION = 1
STATUS_S = 0.5  # between two status requests while a training runs
FAILURES_SHOWN = 20


@dataclass(frozen=True)
class DemoReport:
    """The result of the demo.

    `passed` is true only if both kills happened, training recovered from both, and all bits are
    equal.
    """

    scenario: Scenario
    disturbed: ScenarioOutcome
    plain: ScenarioOutcome
    comparison: BitComparison
    seconds: float
    logs: Path | None

    @property
    def failures(self) -> list[str]:
        """Returns why the demo did not pass; empty if it passed."""
        failures = list(self.comparison.differences)
        for fault in self.scenario.faults:
            outcome = next((seen_fault for seen_fault in self.disturbed.happened if seen_fault.fault == fault), None)
            if outcome is None:
                failures.append(f"{fault}: did not happen")
            elif not outcome.is_overcome:
                failures.append(f"{fault}: the expected restore from memory did not follow ({outcome.recovery})")
        return failures

    @property
    def passed(self) -> bool:
        return not self.failures

    def document(self) -> dict[str, Any]:
        """Returns the document of `demo --json`."""
        comparison = self.comparison
        return {
            "schema_version": SCHEMA_VERSION,
            "passed": self.passed,
            "failures": self.failures,
            "steps": self.scenario.steps,
            "nodes": 2,
            "ranks": comparison.ranks,
            "losses_compared": comparison.losses,
            "parameters_compared": comparison.parameters,
            "optimizer_tensors_compared": comparison.optimizer_tensors,
            "steps_trained_twice": comparison.trained_twice,
            "faults": [_fault_document(each) for each in self.disturbed.happened],
            "disturbed_s": round(self.disturbed.seconds, 1),
            "undisturbed_s": round(self.plain.seconds, 1),
            "total_s": round(self.seconds, 1),
            "logs": str(self.logs) if self.logs else None,
        }


def _fault_document(seen: SeenFault) -> dict[str, Any]:
    recovery = seen.recovery
    return {
        "fault": str(seen.fault),
        "pids": {str(rank): pid for rank, pid in sorted(seen.pids.items())},
        "restored_from": recovery.source if recovery else None,
        "restored_step": recovery.base if recovery else None,
        "ranks_up_s": round(recovery.up_s, 2) if recovery else None,
        "load_s": round(recovery.load_s, 2) if recovery else None,
        "first_step_s": round(recovery.first_step_s, 2) if recovery else None,
    }


def scenario_of(steps: int, world: int) -> Scenario:
    """Returns the training: rank 1 dies in mid-copy after 1/3 of the steps, all ranks after 2/3."""
    everyone = OutsideKill(tuple(range(world)), 2 * steps // 3)
    return Scenario("demo-faults", steps, (CopyKill(rank=1, step=steps // 3), everyone))


def demonstrate(steps: int, keep_logs: bool, quiet: bool) -> DemoReport:
    """Runs the whole demo, and shows it.

    Args:
        steps: of each of the two trainings.
        keep_logs: keeps logs and records in a folder, whose path is printed.
        quiet: stdout is only for the document; lines for people go to stderr.

    Raises:
        DemoError: a training did not end.
    """
    began = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="reft-demo-logs-")) if keep_logs else None
    with unwinding(), Screen(sys.stderr if quiet else sys.stdout) as screen:
        screen.say(
            "reft demo: 2 pretend nodes x 2 ranks on this computer (CPU, gloo). Ctrl-C stops everything.", "bold"
        )
        screen.say("  model   Llama-style, 0.25 M parameters, bytes of Python's own manual; nothing is downloaded")
        if logs:
            screen.say(f"  logs    {logs}")
        with Cluster(nodes=2, ranks_per_node=2, keep=logs) as cluster:
            screen.say(
                f"  daemons {', '.join(f'{node.name} pid {node.daemon.pid}' for node in cluster.nodes if node.daemon)}"
            )
            report = _both(cluster, screen, steps, logs, began)
        summarise(report, screen)
    return report


def _both(cluster: Cluster, screen: Screen, steps: int, logs: Path | None, began: float) -> DemoReport:
    """Runs the training with faults, then the training without."""
    scenario = scenario_of(steps, cluster.world)
    plain_scenario = Scenario("demo-plain", steps)
    screen.say()
    screen.say(f"1. {steps} steps with two faults; a snapshot after every step")
    disturbed = run(cluster, scenario, DemoWatcher(cluster, screen, scenario))
    screen.end()
    cluster.purge(scenario.job)
    screen.say()
    screen.say(f"2. the same {steps} steps without faults, for comparison")
    plain = run(cluster, plain_scenario, DemoWatcher(cluster, screen, plain_scenario))
    screen.end()
    comparison = compare(disturbed.result, plain.result, steps)
    return DemoReport(scenario, disturbed, plain, comparison, time.monotonic() - began, logs)


class DemoWatcher:
    """Shows rows and events from the ranks' records and the daemons' status."""

    def __init__(self, cluster: Cluster, screen: Screen, scenario: Scenario) -> None:
        self._cluster, self._screen, self._scenario = cluster, screen, scenario
        self._asked_s = 0.0
        self._held: tuple[int | None, float | None] = (None, None)
        self._killed = self._recovered = 0
        screen.begin()

    def __call__(self, result: TrainingResult, happened: Sequence[SeenFault]) -> None:
        """Shows new rows and events."""
        if len(happened) > self._killed:
            self._killed = len(happened)
            self._screen.say(f"  ──── {happened[-1].fault}", "bold red")
        recovered = [each for each in happened if each.recovery]
        if len(recovered) > self._recovered:
            self._recovered = len(recovered)
            self._screen.say(f"  ──── {sentence(recovered[-1])}", "bold green")
        if time.monotonic() - self._asked_s >= STATUS_S:
            self._held, self._asked_s = self._ask(), time.monotonic()
        losses = result.losses(10)
        loss = sum(losses) / len(losses) if losses else None
        self._screen.progress(Progress(result.completed, loss, *self._held))

    def _ask(self) -> tuple[int | None, float | None]:
        """Returns the newest whole step of any daemon, and the oldest snapshot's age."""
        statuses = self._cluster.statuses(self._scenario.job)
        whole = max(
            (max(status.whole, status.base.step if status.HasField("base") else -1) for status in statuses), default=-1
        )
        ages = [rank.sealed_age_s for status in statuses for rank in status.ranks if rank.HasField("sealed")]
        return (whole if whole >= 0 else None), max(ages, default=None)


def sentence(seen: SeenFault) -> str:
    """Returns how the training recovered from a fault, in one line."""
    recovery = seen.recovery
    if recovery is None:
        return "training did not recover"
    return (
        f"step {recovery.base} restored from {recovery.source}; all ranks run again after {recovery.up_s:.1f} s, "
        f"first new step after {recovery.first_step_s:.1f} s (loading the state took {recovery.load_s:.1f} s)"
    )


def summarise(report: DemoReport, screen: Screen) -> None:
    """Prints the result of the demo."""
    equal, steps = report.comparison, report.scenario.steps
    screen.say()
    for seen in report.disturbed.happened:
        screen.say(f"  {seen.fault}:")
        screen.say(f"      {sentence(seen)}")
    if report.passed:
        good = "bold green"
        screen.say(f"  steps trained twice: {equal.trained_twice}, with the same losses both times")
        screen.say(f"  {equal.losses} losses ({equal.ranks} ranks x {steps} steps) equal in every bit   ✓", good)
        tensors = f"{equal.parameters} parameters and {equal.optimizer_tensors} optimizer tensors"
        screen.say(f"  {tensors} of every rank equal in every bit   ✓", good)
    for failure in report.failures[:FAILURES_SHOWN]:
        screen.say(f"  FAILED  {failure}", "bold red")
    parts = f"{report.disturbed.seconds:.0f} s with faults, {report.plain.seconds:.0f} s without"
    screen.say(f"  {report.seconds:.0f} s in total: {parts}")
    if report.failures and not report.logs:
        screen.say("  run again with --keep-logs to keep the logs of the trainers")
