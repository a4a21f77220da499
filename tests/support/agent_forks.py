"""Forks torchrun's agents into the namespaces of a node. The forking process has imported torch."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reft.cli.demo.cluster import LOCAL_ONLY
from tests.support.agent import PRELOADED
from tests.support.forks import Fork, enter_node, serve, server


def agent_fork(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, marks: Mapping[str, str], inside: int
) -> Fork:
    """Starts an agent.

    Args:
        arguments: the arguments of `python -m`.
        environment: the whole environment.
        log: the file for the agent's output.
        marks: variables that other processes look for in /proc/PID/environ.
        inside: a process whose namespaces the agent enters, as nsenter does; 0 is none.
    """
    return Fork(
        server(__name__, **LOCAL_ONLY), log, environment, marks=dict(marks), arguments=list(arguments), inside=inside
    )


def become(request: Mapping[str, Any]) -> int:
    if (code := enter_node(request["inside"], request["cwd"])) is not None:
        return code
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
