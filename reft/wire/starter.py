"""Finds this node's daemon, or starts one: detached, in a session of its own, so that it outlives trainers and agents."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from reft.config import Config, child_environment
from reft.errors import ConfigError, DaemonUnavailable
from reft.wire import messages, rpc
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
