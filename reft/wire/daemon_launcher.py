"""Finds this node's daemon, or starts one: detached, in a session of its own, so that it outlives trainers and agents.

A daemon that has died is started again by the process that had started it: nobody else does.

    report or beat ─► nobody listens ─► a thread: find, or start ─► adopts slots and trainers ─► the next one is heard

Never waited for. A daemon that was named, or that does not leave by itself when it is idle, belongs to somebody else, who
starts it again; one that was stopped takes its socket away, and stays stopped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from reft.config import Config, child_environment
from reft.errors import ConfigError, DaemonUnavailable, ReftError
from reft.wire import daemon_launcher, messages, rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

log = logging.getLogger("reft")
IDLE_EXIT_S = 600  # a daemon that was started by itself leaves so long after its last job is gone
START_DEADLINE_S = (
    30.0  # to start, or to answer at last on a machine that is overloaded; where nobody listens none is waited
)
HELLO_DEADLINE_S = 5.0


def hello(address: str, deadline_s: float = HELLO_DEADLINE_S, agent_pid: int = 0, job: str = "") -> pb.HelloReply:
    """Who answers at `address`, and whether he holds `job`.

    Args:
        agent_pid: of a torchrun agent, as the daemon sees it, which stays as long as that one lives.
        job: that the answer says something of; empty: of none.

    Raises:
        DaemonUnavailable: nobody, in time.
        AttachError: a daemon of another protocol.
    """
    with rpc.channel(address) as channel:
        try:
            request = pb.HelloRequest(protocol=messages.PROTOCOL, agent_pid=agent_pid, job=job)
            reply: pb.HelloReply = pb_grpc.DaemonStub(channel).Hello(request, timeout=deadline_s, wait_for_ready=False)
            return reply
        except grpc.RpcError as error:
            raise rpc.error_of(error, address) from error


def find(config: Config, flags: Sequence[str] = (), job: str = "") -> tuple[str, pb.HelloReply]:
    """The unix address of this node's daemon and its answer; starts a daemon if none was named and none runs.

    Args:
        flags: for a daemon that is started.
        job: that the answer says something of; empty: of none.

    Raises:
        DaemonUnavailable: the named one does not answer, or none could be started.
        ConfigError: the named address is none, or belongs to a daemon of another host.
    """
    answer_s = min(START_DEADLINE_S, config.attach_deadline_s)
    if config.daemon:
        reply = hello(rpc.check_address(config.daemon), answer_s, job=job)
        if config.daemon.startswith("unix:"):
            return config.daemon, reply
        unix = [address for address in reply.addresses if address.startswith("unix:")]
        if not unix or not Path(unix[0].removeprefix("unix:")).exists():
            raise ConfigError(
                f"the daemon at {config.daemon} runs on another host or in another mount namespace.",
                "name the daemon of this node: slots are memory that both map",
            )
        return unix[0], reply
    folder = own_folder(Path(config.runtime_dir))
    address = rpc.check_address(f"unix:{folder / 'daemon.sock'}")
    try:
        return address, hello(address, answer_s, job=job)
    except DaemonUnavailable:
        return address, _start(folder, address, flags)


def own_folder(folder: Path) -> Path:
    """The runtime folder, made if missing.

    Raises:
        ConfigError: it can't be made, or it belongs to somebody else.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise ConfigError(f"the runtime folder {folder} can't be made: {error}.", "set REFT_RUNTIME_DIR") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(f"{folder} is not a folder that only you can write.", "set REFT_RUNTIME_DIR to one")
    return folder


def _start(folder: Path, address: str, flags: Sequence[str]) -> pb.HelloReply:
    """Starts a daemon unless another process of this node was faster."""
    with open(folder / "start.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return hello(address)
        except DaemonUnavailable:
            pass
        log_path = folder / "daemon.log"
        command = [sys.executable, "-m", "reft_daemon", "--socket", str(folder / "daemon.sock"),
                   "--idle-exit", str(IDLE_EXIT_S), *flags]  # fmt: skip
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
        reply = _await(process, address, log_path)
        log.info(
            "no reft-daemon was running: started one (pid %d, log %s); it leaves %d s after its last job is gone.",
            process.pid,
            log_path,
            IDLE_EXIT_S,
        )
        return reply


def _await(process: subprocess.Popen[bytes], address: str, log_path: Path) -> pb.HelloReply:
    end = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end and process.poll() is None:
        try:
            return hello(address, deadline_s=1.0)
        except DaemonUnavailable:
            time.sleep(0.05)
    tail = log_path.read_text(errors="replace")[-600:]
    raise DaemonUnavailable(
        f"a reft-daemon could not be started; the end of {log_path}:\n{tail}", "start reft-daemon by hand"
    )


PAUSE_S = 10.0  # between two tries


@dataclass
class DaemonRestarter:
    """Of one process; all of a node may try, and one of them starts it.

    Args:
        settings: by which the daemon was found.
        unattended: whether it was started by a trainer or an agent: what it said in its HelloReply.
        flags: with which it was started, or would have been.
        agent_pid: of the torchrun agent for which it is to stay, as it sees that one; 0: for none.
    """

    settings: Config
    unattended: bool
    flags: Sequence[str] = ()
    agent_pid: int = 0
    _thread: threading.Thread | None = None
    _tried_s: float = float("-inf")

    def refused(self, address: str) -> None:
        """Nobody listens at the daemon's address. Returns at once; called by one thread at a time."""
        now_s = time.monotonic()
        is_busy = self._thread is not None and self._thread.is_alive()
        if self.settings.daemon or not self.unattended or is_busy or now_s - self._tried_s < PAUSE_S:
            return
        if not Path(address.removeprefix("unix:")).exists():
            return  # it was stopped
        self._tried_s = now_s
        self._thread = threading.Thread(target=self._revive, name="reft-revive", daemon=True)
        self._thread.start()

    def _revive(self) -> None:
        try:
            address, hello = daemon_launcher.find(self.settings, self.flags)
            if self.agent_pid:
                daemon_launcher.hello(address, agent_pid=self.agent_pid)
            log.warning("the daemon had died; process %d has taken over what it held.", hello.pid)
        except ReftError as error:
            log.warning("the daemon has died and can't be started again: %s", error)
