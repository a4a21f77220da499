"""A real daemon process for tests. It has folders of its own, which are removed at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reft.wire import messages, rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemon_forks import daemon_fork
from tests.support.forks import Fork

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], Any], deadline_s: float = 60.0, what: str = "the condition") -> Any:
    """Calls `condition` until it returns a true value.

    Returns that value, or fails after the deadline.
    """
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true within {deadline_s} s")
        pause.wait(0.02)


# Goes in front of a command. A background job of a shell ignores SIGINT, a job under nohup ignores
# SIGHUP, and child processes inherit this. Popen's preexec_fn could reset it too, but then a fork
# runs gRPC's handlers, which at times hang.
HEEDFUL = ("env", "--default-signal=INT,HUP")


def purge_and_stop(socket: Path) -> None:
    """Purges all jobs of a daemon that a trainer started, and ends the daemon."""
    with rpc.channel(f"unix:{socket}") as channel:
        stub = pb_grpc.DaemonStub(channel)
        status = stub.Status(pb.StatusRequest(), timeout=10)
        for job in status.jobs:
            stub.Purge(pb.PurgeRequest(job=job.job), timeout=10)
    os.kill(status.pid, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{status.pid}").exists(), what="the daemon's end")
    assert not Path(status.directory).exists(), "an empty arena must not stay behind"


class DaemonProcess:
    """A daemon with its own socket and arena.

    Args:
        flags: further command-line flags.
        environment: changes to the environment.
        folder: where slots lie; None makes a folder in /dev/shm.
        network: path of the daemon's network namespace; empty is the one of this process.
    """

    is_forked = True  # False starts `python -m` with `module`, which takes half a second of a core
    module = "reft_daemon"

    def __init__(
        self, *flags: str, environment: dict[str, str] | None = None, folder: Path | None = None, network: str = ""
    ) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="reft-test-"))
        shm = Path("/dev/shm")
        self.folder = folder or Path(
            tempfile.mkdtemp(prefix="reft-test-", dir=shm if os.access(shm, os.W_OK) else None)
        )
        self.socket = self.home / "d.sock"
        self.log = self.home / "log"
        self.flags, self.network = flags, network
        self.environment = environment or {}
        self.process: subprocess.Popen[bytes] | Fork | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        """Starts the daemon, and waits until it answers."""
        flags = ["--node", "test", "--socket", str(self.socket), "--dir", str(self.folder), *self.flags]
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        environment = {**os.environ, "PYTHONPATH": path, **self.environment}
        if self.is_forked:
            self.process = daemon_fork(flags, environment, self.log, self.network)
        else:
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", self.module, *flags], stdout=log, stderr=log, env=environment,
                    start_new_session=True,
                )  # fmt: skip
        until(lambda: self.process.poll() is not None or self.answers(), what="the daemon's start")
        if self.process.poll() is not None:
            raise RuntimeError(self.log.read_text())

    def answers(self) -> bool:
        try:
            self.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL), timeout=10)
            return True
        except Exception:
            return False

    def call(self, method: str, request: Any, timeout: float = 10.0) -> Any:
        with rpc.channel(self.address) as channel:
            return getattr(pb_grpc.DaemonStub(channel), method)(request, timeout=timeout)

    def status(self, job: str) -> pb.JobStatus:
        return self.call("Status", pb.StatusRequest(job=job)).jobs[0]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal.

        Waits for the daemon's end unless the signal only stops or continues it.
        """
        self.process.send_signal(number)
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for folder in (self.home, self.folder):
            shutil.rmtree(folder, ignore_errors=True)


class Site:
    """Daemons that pretend to be on different nodes: they reach each other over TCP."""

    def __init__(self) -> None:
        self.daemons: list[DaemonProcess] = []

    def add(self, count: int, *flags: str, environment: dict[str, str] | None = None) -> list[DaemonProcess]:
        """Adds new, empty nodes, with further flags and changes to their environment."""
        made = [DaemonProcess("--listen", "127.0.0.1:0", *flags, environment=environment) for _ in range(count)]
        self.daemons += made
        return made

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()


def vanish(*daemons: DaemonProcess) -> None:
    """Kills nodes, and removes their memory."""
    for daemon in daemons:
        daemon.kill()
        shutil.rmtree(daemon.folder)
