"""Forks torchrun's agents into the namespaces of a node. The forking process has imported torch."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reft.cli.demo.cluster import LOCAL_ONLY
from tests.support.agent import PRELOADED
from tests.support.forks import Fork, enter, serve, server


def agent_fork(
    arguments: Sequence[str], environment: Mapping[str, str], marks: Mapping[str, str], log: Path, inside: int
) -> Fork:
    """Starts an agent.

    Args:
        arguments: the arguments of `python -m`.
        environment: the whole environment.
        marks: variables that other processes look for in /proc/PID/environ.
        log: the file for the agent's output.
        inside: a process whose namespaces the agent enters, as nsenter does; 0 is none.
    """
    return Fork(
        server(__name__, **LOCAL_ONLY), log, environment, marks=dict(marks), arguments=list(arguments), inside=inside
    )


def become(request: Mapping[str, Any]) -> int:
    if request["inside"]:
        # Mounts are the last: in that namespace /proc is another one.
        for kind in ("net", "pid", "mnt"):
            enter(f"/proc/{request['inside']}/ns/{kind}")
        if child := os.fork():  # only a child is a process of the new namespace
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255
        os.chdir(request["cwd"])
    module, *arguments = request["arguments"]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
    return 0


if __name__ == "__main__":
    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    serve(become)
