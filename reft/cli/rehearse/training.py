"""One run of the user's command: its processes, its daemon, its folders, and the kill.

The run has a runtime folder of its own, so attach starts a daemon of its own. Every process of the
run inherits the name of that folder, and a clean-up process ends them all, as in the demo.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import psutil

from reft.cli.ask import ask
from reft.cli.demo import clean_up
from reft.cli.demo.cluster import short_folder, slots_folder
from reft.cli.rehearse.records import RecordReader, RehearsalError
from reft.cli.signals import deferring
from reft.config import Config, child_environment
from reft.core.rehearsal.records import RehearsedAttempt
from reft.errors import ConfigError, DaemonUnavailable
from reft.wire import daemon_launcher
from reft.wire.v1 import daemon_pb2 as pb

POLL_S = 0.02
STATUS_S = 2.0
WHOLE_S = 2.0  # so long the kill waits for its own step to be whole; then an earlier one will do
# A loader's workers listen on such sockets of Python's multiprocessing.
LONGEST_SOCKET = "tmp/pymp-12345678/listener-12345678"
LOG_LINES = 25
FRESH = "name a fresh folder: --cwd DIR"
# Settings that would join the run to another daemon, job or storage.
_REPLACED: Final = {"daemon", "runtime_dir", "job", "failpoints", "restore", "lineage", "rehearse"}


@dataclass(frozen=True)
class RehearsedCommand:
    """What the user wants to run.

    Attributes:
        arguments: the command, unchanged.
        folder: where the command runs.
        import_path: a folder to import modules from; empty: none is added.
    """

    arguments: Sequence[str]
    folder: Path
    import_path: str = ""


class RehearsedTraining:
    """One run. Leaving the block ends every process of the run, and removes its folders.

    Args:
        name: a or b; the log and the records are NAME.log and NAME.<rank>.jsonl.
        command: what to run.
        logs: a folder for logs and records.
        timeout_s: for the whole run.
        stop_after: with a step, each rank stops itself while it copies the next step. Only the
            first attach does so. It keeps a fast script from ending before the kill.
    """

    def __init__(
        self, name: str, command: RehearsedCommand, logs: Path, timeout_s: float, stop_after: int | None = None
    ) -> None:
        self._command = command
        self._name, self._log = name, logs / f"{name}.log"
        self._reader = RecordReader(logs / name)
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._relaunches = 0
        self._survivors: list[psutil.Process] = []  # the ranks of run B that were not killed
        with contextlib.ExitStack() as undo:
            with deferring():  # a signal must not leave folders without a clean-up process
                self.folder = short_folder("reft-rehearse-", LONGEST_SOCKET)
                undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
                self._slots = slots_folder(0, self.folder, "reft-rehearse-")
                undo.callback(shutil.rmtree, self._slots, ignore_errors=True)
                self._clean_up = clean_up.start([self.folder, self._slots])
                undo.callback(self.close)
                self._changes = self._changed_environment(logs, stop_after)
                self._process = self._launch()
            undo.pop_all()

    def _changed_environment(self, logs: Path, stop_after: int | None) -> dict[str, str]:
        # SIGKILL leaves temporary files: those of a DataLoader's workers, for example.
        (self.folder / "tmp").mkdir()
        changes = {
            clean_up.MARK: str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "REFT_DIR": str(self._slots / "slots"),
            "REFT_JOB": f"rehearsal-{self.folder.name.removeprefix('reft-rehearse-')}",
            "REFT_REHEARSAL": "1",
            "REFT_REHEARSE": str(logs / self._name),
        }
        if stop_after is not None:
            changes["REFT_FAILPOINTS"] = f"snapshot.chunk:stop:from={stop_after + 1}:times=1:epoch=1"
        if self._command.import_path:
            changes["PYTHONPATH"] = self._command.import_path
        return changes

    def __enter__(self) -> RehearsedTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the run with SIGKILL, and removes its folders."""
        clean_up.finish(self._clean_up)

    def _launch(self) -> subprocess.Popen[bytes]:
        try:
            with open(self._log, "ab") as output:
                return subprocess.Popen(
                    self._command.arguments, cwd=self._command.folder, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=output, start_new_session=True, env={**own_environment(), **self._changes},
                )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"{self._command.arguments[0]!r} can't be started: {error}.",
                "reft-cli rehearse -- python train.py",
            ) from error

    # What the ranks have done

    def attempts(self) -> dict[int, list[RehearsedAttempt]]:
        """Returns what the ranks have recorded until now."""
        self._reader.poll()
        return self._reader.attempts()

    def completed(self, after: Mapping[int, int] | None = None) -> int:
        """Returns how many steps all ranks have completed in their newest attempts.

        Args:
            after: rank → attempts that don't count.
        """
        attempts = self.attempts()
        if not attempts or len(attempts) < attempts[min(attempts)][-1].attach.world:
            return 0
        if any(len(attempts[rank]) <= count for rank, count in (after or {}).items()):
            return 0
        return min(max(each[-1].marks, default=0) for each in attempts.values())

    def follow(self, step: int, after: Mapping[int, int] | None = None) -> int:
        """Waits until all ranks have completed a step, or the script has ended.

        Args:
            step: the step.
            after: rank → attempts that don't count: those before the kill. Then a command that
                failed is started again, once.

        Returns:
            How many steps all ranks have completed.

        Raises:
            RehearsalError: the script failed, or the time is over.
        """
        while True:
            code = self._process.poll()  # asked first: what was written before the end counts
            completed = self.completed(after)
            self._resume_survivors()
            if completed >= step or code == 0:
                return completed
            if code is not None:
                if after is None:
                    raise RehearsalError(f"{self._title}: the command ended with code {code}.\n{self.tail()}")
                if self._relaunches:
                    raise RehearsalError(
                        f"{self._title}: started again after the kill, the command ended with code {code}.\n"
                        f"{self.tail()}",
                        "a script that can start again beside the files that its killed run has left",
                    )
                self._relaunches += 1
                self._process = self._launch()
            if time.monotonic() > self._end_s:
                raise self._late(step, completed)
            time.sleep(POLL_S)

    def _late(self, step: int, completed: int) -> RehearsalError:
        within = f"within {self._timeout_s:.0f} s.\n{self.tail()}"
        if not self._reader.records:
            return RehearsalError(
                f"{self._title}: reft.attach has not returned on any rank {within}",
                "call reft.attach on all ranks, before the first step; or a longer --timeout",
            )
        return RehearsalError(
            f"{self._title} reached step {completed} of {step} {within}", "a longer --timeout, or fewer --steps"
        )

    def await_whole(self, step: int) -> None:
        """Waits until the daemon knows that a step is whole: this one if it can be, else any.

        Raises:
            RehearsalError: no step is whole in time, or the trainers have another daemon.
        """
        patient_until_s = time.monotonic() + WHOLE_S
        while True:
            is_over = time.monotonic() > self._end_s or self._process.poll() is not None
            try:
                jobs = ask(self._address, "Status", pb.StatusRequest(), STATUS_S).jobs
                # Ranks that stand still in a copy make no other step whole.
                is_over |= time.monotonic() > patient_until_s and self._stands_still()
            except DaemonUnavailable as error:
                if not self._socket.exists():
                    raise RehearsalError(
                        "the script names a daemon of its own.", "remove daemon= from reft.attach for the rehearsal"
                    ) from error
                jobs = []  # a busy machine
            whole = max((job.whole for job in jobs), default=-1)
            if whole >= step or (whole >= 1 and time.monotonic() > patient_until_s):
                return
            if is_over:
                raise RehearsalError(
                    f"{self._title}: the kill comes after step {step}, and no step is whole by then.\n{self.tail()}",
                    "with every=N in reft.attach: --steps of 3*N, or a smaller N; else the log says why ranks have no "
                    "snapshot",
                )
            time.sleep(POLL_S)

    def _stands_still(self) -> bool:
        """Whether all ranks are stopped: see stop_after."""
        pids = [attempts[-1].attach.pid for attempts in self.attempts().values()]
        try:
            return all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids)
        except psutil.NoSuchProcess:
            return False

    @property
    def _title(self) -> str:
        return f"run {self._name.upper()}"

    def tail(self) -> str:
        """Returns the end of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"--- the end of {self._log}", *lines])

    # The kill

    @property
    def _address(self) -> str:
        return f"unix:{self._socket}"

    @property
    def _socket(self) -> Path:
        return self.folder / "daemon.sock"

    def kill(self, what: str) -> float:
        """Kills a rank, all ranks with what started them, or the daemon and a rank.

        Returns:
            The time of the kill.

        Raises:
            RehearsalError: a process has ended by itself.
        """
        pids = {rank: attempts[-1].attach.pid for rank, attempts in self.attempts().items()}
        daemon = daemon_launcher.hello(self._address).pid
        living = {each.pid: each for each in clean_up.marked(self.folder)}
        victims = [pids[max(pids)]]
        if what == "all":
            kept = {daemon, *(each.pid for each in living[daemon].children(recursive=True))}
            victims = [pid for pid in living if pid not in kept]
        elif what == "daemon":
            victims = [daemon, *victims]
        if ended := {*pids.values(), *victims} - living.keys():
            raise RehearsalError(f"{self._title}: process {min(ended)} ended before the kill.\n{self.tail()}")
        killed_s = time.time()
        for pid in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # its parent took it along
                living[pid].kill()
        self._survivors = [living[pid] for pid in set(pids.values()) - set(victims)]
        self._resume_survivors()
        return killed_s

    def _resume_survivors(self) -> None:
        """Resumes ranks that stand still in a copy: see stop_after. They must hear their agent.

        A rank may stop after the kill only. So `follow` calls this again and again.
        """
        for each in self._survivors:
            with contextlib.suppress(psutil.NoSuchProcess):  # the agent was faster
                each.resume()


def own_environment() -> dict[str, str]:
    """Returns the user's environment, without what joins a trainer to a daemon, job or storage."""
    kept = {f"REFT_{each.name.upper()}" for each in fields(Config) if each.name not in _REPLACED}
    return {name: value for name, value in child_environment().items() if not name.startswith("REFT_") or name in kept}


def command_in(arguments: Sequence[str], here: Path, folder: Path | None) -> RehearsedCommand:
    """Returns the command as it runs in a folder.

    Args:
        arguments: the user's command.
        here: the folder in which the user typed the command.
        folder: a folder to make; None: the command runs here.

    Raises:
        ConfigError: the folder exists, or can't be made.
    """
    if folder is None:
        return RehearsedCommand(arguments, here)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}.", FRESH) from error
    # The script and its other files are named from where the user is. A program without a slash is
    # looked up in PATH.
    absolute = [
        str(here / each) if (index or os.sep in each) and os.path.isfile(here / each) else each
        for index, each in enumerate(arguments)
    ]
    path = os.pathsep.join(filter(None, [str(here), child_environment().get("PYTHONPATH", "")]))
    return RehearsedCommand(absolute, folder, path)


def check_fresh_folder(folder: Path) -> None:
    """Checks that nothing is there yet.

    Raises:
        ConfigError: something has this name.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists.", FRESH)


def check_one_host(arguments: Collection[str]) -> None:
    """Checks that the command needs one node only.

    Raises:
        ConfigError: torchrun would wait for other nodes.
    """
    listed = list(arguments)
    values = [child_environment().get("PET_NNODES", "1")]
    for index, argument in enumerate(listed):
        name, equals, value = argument.partition("=")
        if name == "--nnodes":
            values.append(value if equals else "".join(listed[index + 1 : index + 2]))
    fewest = values[-1].partition(":")[0]
    if fewest != "1":
        raise ConfigError(
            f"the command needs {fewest} nodes, and a rehearsal has one host.",
            "--nnodes=1 with as many --nproc-per-node as this host can run",
        )
