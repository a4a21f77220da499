"""Finds this node's daemon, or starts one that outlives trainers and agents.

The daemon is started detached, in a session of its own. If it dies, the process that started it
starts another one. No other process does.

    report or beat ─► no daemon listens ─► a thread: find, or start ─► adopts slots and trainers
                                           the next report or beat is heard

No caller waits for this thread. A daemon that was named by an address, or that does not leave when
idle, has another owner, who restarts it. A daemon that was stopped removes its socket, and stays
stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.config import Config, child_environment
from reft.errors import ConfigError, DaemonUnavailable, ReftError
from reft.folders import claim_folder
from reft.wire import daemon_launcher, messages, rpc
from reft.wire.v1 import daemon_pb2 as pb

log = logging.getLogger("reft")
IDLE_EXIT_S = 600  # a daemon that a trainer or an agent started leaves so long after its last job
# Time to start, or to answer on an overloaded machine. A call fails at once where no daemon
# listens.
START_DEADLINE_S = 30.0
HELLO_DEADLINE_S = 5.0
LOCK_DEADLINE_S = 60.0  # for another process of this node, which starts a daemon or purges
LOCK_PAUSE_S = 0.05
# Time for a named daemon to be started by its owner, beside an agent, or after it died with
# trainers.
BACK_S = 15.0
BACK_PAUSE_S = 0.2
Call = Callable[[str, str, Any, float], Any]


def hello(
    address: str,
    deadline_s: float = HELLO_DEADLINE_S,
    agent_pid: int = 0,
    job: str = "",
    launch: str = "",
    call: Call = rpc.call,
) -> pb.HelloReply:
    """Returns the daemon's HelloReply, which also says whether it holds `job`.

    Args:
        address: of the daemon.
        deadline_s: for the answer.
        agent_pid: of a torchrun agent, as the daemon sees it; the daemon stays while that agent
            lives. 0: none.
        job: the job that the answer covers; empty: none.
        launch: of the calling trainer, which then gets the job's token if its agent has a job key.
        call: makes the call, as `rpc.call` does.

    Raises:
        DaemonUnavailable: no daemon answered in time.
        AttachError: a daemon of another protocol.
    """
    reply: pb.HelloReply = call(address, "Hello", messages.hello(job, agent_pid, launch), deadline_s)
    messages.check_protocol(reply.protocol, reply.oldest, f"the daemon at {address} speaks", "this program")
    return reply


def find(
    config: Config, flags: Sequence[str] = (), job: str = "", call: Call = rpc.call, is_restart: bool = False
) -> tuple[str, pb.HelloReply]:
    """Returns the unix address of this node's daemon, and its HelloReply.

    Starts a daemon if none was named and none runs. A named one has an owner who restarts it.

    Args:
        config: settings that name the daemon, or its folder.
        flags: for a daemon that is started.
        job: the job that the answer covers; empty: none.
        call: makes the call, as `rpc.call` does.
        is_restart: whether the named daemon may be just starting, or have died just now, too. Then
            it gets some seconds.

    Raises:
        DaemonUnavailable: the named daemon does not answer, or none could be started.
        ConfigError: the named address is no unix socket.
    """
    answer_s = min(START_DEADLINE_S, config.attach_deadline_s)
    if config.daemon:
        end = time.monotonic() + (min(BACK_S, config.attach_deadline_s / 2) if is_restart else 0.0)
        address = rpc.check_local_address(config.daemon)
        while True:
            try:
                return address, hello(address, answer_s, job=job, call=call)
            except DaemonUnavailable:
                if time.monotonic() >= end:
                    raise
                time.sleep(BACK_PAUSE_S)
    folder = own_folder(Path(config.runtime_dir))
    address = rpc.check_address(f"unix:{folder / 'daemon.sock'}")
    try:
        return address, hello(address, answer_s, job=job, call=call)
    except DaemonUnavailable:
        try:
            return address, _start(folder, address, flags, min(LOCK_DEADLINE_S, config.attach_deadline_s))
        except OSError as error:
            raise DaemonUnavailable(
                f"a reft-daemon could not be started: {error}.",
                f"make {folder} writable, and room in it, or set REFT_RUNTIME_DIR to another folder",
            ) from error


def own_folder(folder: Path) -> Path:
    """Returns the runtime folder, and makes it if it is missing.

    Raises:
        ConfigError: the folder can't be made, or others can write it.
    """
    try:
        return claim_folder(folder)
    except OSError as error:
        raise ConfigError(f"the runtime folder {folder} can't be made: {error}.", "set REFT_RUNTIME_DIR") from error


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """Holds the lock that lets one process of this node start a daemon.

    Raises:
        DaemonUnavailable: another process has held the lock for `wait_s`; it may be stopped.
        OSError: the file can't be made.
    """
    with open(path, "w") as lock:
        end_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    raise DaemonUnavailable(
                        f"another process of this node has locked {path} for {wait_s:g} s: it starts a reft-daemon, "
                        "or is stopped.",
                        f"see which one it is (fuser {path}), let it go on or end it, then try again",
                    ) from None
                time.sleep(LOCK_PAUSE_S)
        yield


def _start(folder: Path, address: str, flags: Sequence[str], wait_s: float) -> pb.HelloReply:
    """Starts a daemon, unless another process of this node was faster.

    Raises:
        DaemonUnavailable: it does not answer in time, or another process holds the lock.
        OSError: lock or log can't be opened, or no process can be made.
    """
    with _locked(folder / "start.lock", wait_s):
        try:
            return hello(address)
        except DaemonUnavailable:
            pass
        log_path = folder / "daemon.log"
        command = [sys.executable, "-m", "reft_daemon", "--socket", str(folder / "daemon.sock"),
                   "--idle-exit", str(IDLE_EXIT_S), "--log", str(log_path), *flags]  # fmt: skip
        with open(log_path, "ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                env=child_environment(REFT_FAILPOINTS=""),
            )
        reply = _await_daemon(process, address, log_path)
        log.info(
            "no reft-daemon was running: started one (pid %d, log %s); it leaves %d s after its last job is gone.",
            process.pid,
            log_path,
            IDLE_EXIT_S,
        )
        return reply


def _await_daemon(process: subprocess.Popen[bytes], address: str, log_path: Path) -> pb.HelloReply:
    end = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end and process.poll() is None:
        try:
            return hello(address, deadline_s=1.0)
        except DaemonUnavailable:
            time.sleep(0.05)
    tail = log_path.read_text(errors="replace")[-600:]
    raise DaemonUnavailable(
        f"a reft-daemon could not be started; the end of {log_path}:\n{tail}",
        f"reft-daemon --socket {address.removeprefix('unix:')} shows the whole error",
    )


PAUSE_S = 10.0  # between two attempts


@dataclass
class DaemonRestarter:
    """Restarts the daemon that this process had started.

    Several processes of a node may try; one of them starts the daemon.

    Args:
        settings: the settings that found the daemon.
        unattended: whether a trainer or an agent started the daemon, from its HelloReply.
        flags: for a daemon that is started.
        agent_pid: of the torchrun agent for which the daemon stays, by that agent's own view; 0:
            none.
    """

    settings: Config
    unattended: bool
    flags: Sequence[str] = ()
    agent_pid: int = 0
    _thread: threading.Thread | None = None
    _last_attempt_s: float = float("-inf")

    def refused(self, address: str) -> None:
        """Starts a daemon in a thread if none listens at the address. Returns at once.

        One thread at a time may call it.
        """
        now_s = time.monotonic()
        is_busy = self._thread is not None and self._thread.is_alive()
        if self.settings.daemon or not self.unattended or is_busy or now_s - self._last_attempt_s < PAUSE_S:
            return
        if not Path(address.removeprefix("unix:")).exists():
            return  # the daemon was stopped on purpose
        self._last_attempt_s = now_s
        self._thread = threading.Thread(target=self._restart, name="reft-revive", daemon=True)
        self._thread.start()

    def _restart(self) -> None:
        try:
            address, hello = daemon_launcher.find(self.settings, self.flags)
            if self.agent_pid:
                daemon_launcher.hello(address, agent_pid=self.agent_pid)
            log.warning("the daemon had died; process %d has taken over its slots.", hello.pid)
        except ReftError as error:
            log.warning("the daemon has died and can't be started again: %s", error)
