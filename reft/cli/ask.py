"""One call of a daemon, and the errors that a command line can end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from reft.config import Config
from reft.errors import AttachError
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

DEADLINE_S = 5.0  # a daemon that asks the others waits one second for each of them, at the same time


class UnknownJob(AttachError):
    """The daemon holds no job of that name."""


def local_address(given: str | None) -> str:
    """Where this node's daemon is: as given, else REFT_DAEMON, else this user's own socket.

    Raises:
        ConfigError: the address is none.
    """
    config = Config.load(daemon=given)
    return rpc.check_address(config.daemon or f"unix:{Path(config.runtime_dir) / 'daemon.sock'}")


def ask(address: str, method: str, request: Any, deadline_s: float = DEADLINE_S) -> Any:
    """The daemon's reply.

    Raises:
        DaemonUnavailable: nobody answers in time.
        UnknownJob: the daemon does not hold the job.
        ReftError: the daemon refused; its own words.
    """
    with rpc.channel(address) as channel:
        try:
            return getattr(pb_grpc.DaemonStub(channel), method)(request, timeout=deadline_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise UnknownJob(error.details() or "", "reft-cli status lists the jobs that are held") from error
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise AttachError(
                    f"the daemon at {address} tells nothing over TCP to a caller without the job's token.",
                    "ask on that node, over its unix socket",
                ) from error
            raise rpc.error_of(error, address) from error
