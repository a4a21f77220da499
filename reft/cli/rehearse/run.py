"""What `reft-cli rehearse` does: run A undisturbed, run B with a kill, and the judgement."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reft.cli.rehearse.records import RehearsalError
from reft.cli.rehearse.training import (
    RehearsedCommand,
    RehearsedTraining,
    check_fresh_folder,
    check_one_host,
    command_in,
)
from reft.cli.signals import deferring, unwinding
from reft.core.rehearsal.judge import Attempts, RehearsalOutcome, RehearsalResult, judge
from reft.core.text import counted
from reft.errors import ConfigError

FEWEST_STEPS = 4  # with fewer, too little is left before or after the kill
KILLED = {
    "rank": "SIGKILL of one rank",
    "all": "SIGKILL of all ranks and of what started them",
    "daemon": "SIGKILL of the daemon, then of one rank",
}


@dataclass(frozen=True)
class RehearsalRequest:
    """What the user asked for.

    Attributes:
        arguments: the command.
        steps: to compare.
        kill: rank, all or daemon.
        folder: a fresh folder for the script's outputs; None: they go where the command runs.
        timeout_s: of each run.
    """

    arguments: Sequence[str]
    steps: int
    kill: str
    folder: Path | None
    timeout_s: float


@dataclass(frozen=True)
class RehearsalReport:
    """The judgement, and what only the command line knows.

    Attributes:
        steps: that were to be compared; fewer than asked for if the script is shorter.
        is_short: whether the script is shorter.
        killed_after: the step whose end all ranks had reached before the kill.
        logs: the folder with logs and records; None if it was removed.
    """

    request: RehearsalRequest
    result: RehearsalResult
    steps: int
    is_short: bool
    killed_after: int
    logs: Path | None


def rehearse(request: RehearsalRequest, say: Callable[[str], None]) -> RehearsalReport:
    """Runs the command twice, and compares.

    Args:
        request: what to run and to kill.
        say: shows a line to a person.

    Raises:
        ConfigError: the command can't be rehearsed.
        RehearsalError: a run failed; the logs are kept.
    """
    check_one_host(request.arguments)
    with unwinding(), contextlib.ExitStack() as undo:
        with deferring():
            try:
                logs = Path(tempfile.mkdtemp(prefix="reft-rehearse-logs-"))
            except OSError as error:
                raise ConfigError(
                    f"no folder for logs can be made: {error}.", "TMPDIR=DIR, with room in DIR"
                ) from error
            undo.callback(shutil.rmtree, logs, ignore_errors=True)
        commands = _commands(request)
        try:
            report = _both(request, commands, logs, say)
        except ConfigError:
            for folder in _folders(request):  # nothing ran there: the corrected command may use them
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        except RehearsalError as error:
            undo.pop_all()
            raise RehearsalError(f"{error.message}\nLogs and records are in {logs}.", error.hint) from error
        if report.logs is not None:
            undo.pop_all()
        return report


def _both(
    request: RehearsalRequest, commands: Sequence[RehearsedCommand], logs: Path, say: Callable[[str], None]
) -> RehearsalReport:
    say(f"run A: undisturbed, {request.steps} steps")
    with RehearsedTraining("a", commands[0], logs, request.timeout_s) as training:
        completed = training.follow(request.steps)
        undisturbed = training.attempts()
    steps = min(completed, request.steps)
    if steps < FEWEST_STEPS:
        raise RehearsalError(
            f"run A ended after {counted(steps, 'step')} of all ranks, and a rehearsal needs {FEWEST_STEPS}.\n"
            f"{training.tail()}",
            f"let the script train {FEWEST_STEPS} steps or more"
            if steps
            else "call reft.attach, and mark each step: for step in session.steps(n)",
        )
    check_fresh("A", undisturbed)
    if steps < request.steps:
        say(f"The script has only {counted(steps, 'step')}.")
    victim_step = kill_step(steps)
    say(f"run B: {KILLED[request.kill]} after step {victim_step}; {counted(len(undisturbed), 'rank')}")
    with RehearsedTraining("b", commands[1], logs, request.timeout_s, stop_after=victim_step) as training:
        killed_after, killed_s, killed = _killed(training, request.kill, victim_step, steps)
    result = judge(undisturbed, killed, killed_s=killed_s, last_step=steps)
    is_equal = result.outcome is RehearsalOutcome.EQUAL
    return RehearsalReport(request, result, steps, steps < request.steps, killed_after, None if is_equal else logs)


def kill_step(steps: int) -> int:
    """Returns the step after which run B is killed: a little before the middle.

    A short epoch of 16 batches, say, must not end just there: a loader without position would do
    no harm.
    """
    return steps * 9 // 20


def _killed(training: RehearsedTraining, kill: str, step: int, steps: int) -> tuple[int, float, Attempts]:
    """Follows run B through its kill, after `step`, to the last step.

    Returns:
        The step of all ranks at the kill, the time of the kill, and all attempts.
    """
    if training.follow(step) < step:
        raise RehearsalError(f"run B ended before step {step}, and run A did not.\n{training.tail()}")
    check_fresh("B", training.attempts())
    training.await_whole(step)
    before = training.attempts()
    killed_s = training.kill(kill)
    completed = training.follow(steps, {rank: len(each) for rank, each in before.items()})
    attempts = training.attempts()
    began = {rank: each[-1].attach.step for rank, each in attempts.items() if len(each) > len(before[rank])}
    if not began:
        raise RehearsalError(
            f"run B: the command ended with code 0 after the kill, and no rank began again.\n{training.tail()}",
            "a wrapper of the training must end with the training's own code, as exec does: then the rehearsal starts "
            "it again",
        )
    if not completed or max(began.values()) >= steps:
        raise RehearsalError(
            f"run B made no step up to {steps} after the kill; its ranks began at {began}.\n{training.tail()}",
            "more --steps, if the ranks began too late",
        )
    last_steps = [max(attempts[rank][len(each) - 1].marks) for rank, each in before.items()]
    return min(last_steps), killed_s, attempts


def check_fresh(name: str, attempts: Attempts) -> None:
    """Checks that a run did not begin from an older one, and has attached once.

    Raises:
        RehearsalError: attach has restored something, or a rank has attached again. Its first
            attach alone would be compared, and steps of another attach have the same numbers.
    """
    restored = [each[0].attach for each in attempts.values() if each[0].attach.restored_from is not None]
    if restored:
        raise RehearsalError(
            f"run {name} began from step {restored[0].step} of an older run.",
            "remove daemon= and job= from reft.attach for the rehearsal",
        )
    again = {rank: len(each) for rank, each in attempts.items() if len(each) > 1}
    if again:
        raise RehearsalError(
            f"run {name}: rank {min(again)} has attached {again[min(again)]} times, and a rehearsal compares one attach.",
            "a command that attaches once; if ranks were started again, the log says why",
        )


def _commands(request: RehearsalRequest) -> tuple[RehearsedCommand, RehearsedCommand]:
    here, folders = Path.cwd(), _folders(request)
    for each in folders:  # all of them first: a refusal leaves nothing behind
        check_fresh_folder(each)
    first, second = (command_in(request.arguments, here, each) for each in folders or (None, None))
    return first, second


def _folders(request: RehearsalRequest) -> list[Path]:
    """Returns the folders in which the two runs are to work; none without --cwd."""
    return [request.folder.absolute() / name for name in ("a", "b")] if request.folder else []
