"""Calls one method of a daemon. It turns gRPC errors into errors of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from reft.config import Config
from reft.errors import AttachError, DaemonUnavailable, FormatError
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

OWN_DAEMON = "start a job: attach starts this daemon; or name another one: --daemon unix:PATH"
DEADLINE_S = 5.0  # a daemon asks all others at the same time and waits one second for them


class NoSuchJob(AttachError):
    """The daemon holds no job of that name."""


def local_address(daemon: str | None) -> str:
    """Returns the address of this node's daemon.

    The order is: the argument, then REFT_DAEMON, then the socket of this user.

    Args:
        daemon: the value of --daemon, or None.

    Raises:
        ConfigError: the address is not valid.
    """
    config = Config.load(daemon=daemon)
    return rpc.check_local_address(config.daemon or own_address(config))


def own_address(config: Config) -> str:
    """Returns the address of the daemon that attach finds, or starts, by itself."""
    return f"unix:{Path(config.runtime_dir) / 'daemon.sock'}"


def ask(address: str, method: str, request: Any, deadline_s: float = DEADLINE_S) -> Any:
    """Returns the daemon's reply.

    Raises:
        DaemonUnavailable: no daemon answers in time.
        UnknownJob: the daemon does not hold the job.
        ReftError: the daemon refused; the message is the daemon's.
    """
    with rpc.channel(address) as channel:
        try:
            return getattr(pb_grpc.DaemonStub(channel), method)(request, timeout=deadline_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NoSuchJob(
                    error.details() or "", "reft-cli status lists the jobs that the daemon holds"
                ) from error
            failure = rpc.error_of(error, address)
            # What a daemon refuses may have such a remedy, too: "start reft-daemon with --persist".
            is_silent = isinstance(failure, DaemonUnavailable) and failure.hint.startswith("start reft-daemon")
            if is_silent and address == own_address(Config.load()):
                raise DaemonUnavailable(failure.message, OWN_DAEMON) from error
            raise failure from error


def job_status(address: str, job: str, deep: bool = True) -> tuple[pb.JobStatus, str]:
    """Returns the status of one job, and the name of the asked daemon's node.

    Args:
        address: of a daemon that holds the job.
        job: name of the job.
        deep: whether the daemon asks the other nodes, too.

    Raises:
        FormatError: the job's record on that node is damaged, so that its daemon knows no ranks.
        ReftError: the daemon does not answer, or does not hold the job.
    """
    reply: pb.StatusReply = ask(address, "Status", pb.StatusRequest(job=job, deep=deep))
    if reply.damaged:
        raise FormatError(
            f"the record of job {job} on node {reply.node} is damaged: {reply.damaged[0].reason}.",
            f"reft-cli purge {job} on that node frees its memory; or ask another node of the job",
        )
    return reply.jobs[0], reply.node
