"""Forks real daemons from a process that has imported `reft_daemon`.

That process imports gRPC, but never uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forks import Fork, enter, serve, server


def daemon_fork(arguments: Sequence[str], environment: Mapping[str, str], log: Path, network: str = "") -> Fork:
    """Starts a daemon.

    Args:
        arguments: the flags of reft-daemon.
        environment: the whole environment.
        log: the file for the daemon's output.
        network: path of the daemon's network namespace; empty is the one of this process.
    """
    return Fork(server(__name__), log, environment, arguments=list(arguments), network=network)


def become(request: Mapping[str, Any]) -> None:
    from reft_daemon.main import main

    if request["network"]:
        enter(request["network"])
    main(args=request["arguments"], prog_name="reft-daemon")


if __name__ == "__main__":
    import reft_daemon.main  # noqa: F401

    serve(become)
