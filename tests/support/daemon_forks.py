"""Forks real daemons from a process that has imported `reft_daemon`.

That process imports gRPC, but never uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forks import Fork, enter, enter_node, serve, server


def daemon_fork(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, network: str = "",
    marks: Mapping[str, str] | None = None, inside: int = 0,
) -> Fork:  # fmt: skip
    """Starts a daemon.

    Args:
        arguments: the flags of reft-daemon.
        environment: the whole environment.
        log: the file for the daemon's output.
        network: path of the daemon's network namespace; empty is the one of this process.
        marks: variables that other processes look for in /proc/PID/environ.
        inside: a process whose namespaces the daemon enters, as nsenter does; 0 is none.
    """
    return Fork(
        server(__name__), log, environment, arguments=list(arguments), network=network, marks=dict(marks or {}),
        inside=inside,
    )  # fmt: skip


def become(request: Mapping[str, Any]) -> int | None:
    from reft_daemon.main import main

    if request["network"]:
        enter(request["network"])
    if (code := enter_node(request["inside"], request["cwd"])) is not None:
        return code
    return main(args=request["arguments"], prog_name="reft-daemon")


if __name__ == "__main__":
    import reft_daemon.main  # noqa: F401

    serve(become)
