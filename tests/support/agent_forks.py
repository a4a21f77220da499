"""torchrun's agents, forked from a process that has imported torch, into the namespaces of a node."""

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
        arguments: of `python -m`.
        environment: all of it.
        marks: what of it others look for in /proc.
        log: gets what it says.
        inside: a process whose namespaces it enters, as nsenter would; 0 for none.
    """
    return Fork(
        server(__name__, **LOCAL_ONLY), log, environment, marks=dict(marks), arguments=list(arguments), inside=inside
    )


def become(request: Mapping[str, Any]) -> int:
    if request["inside"]:
        for kind in ("net", "pid", "mnt"):  # that of mounts is the last: /proc is another one there
            enter(f"/proc/{request['inside']}/ns/{kind}")
        if child := os.fork():  # which is the first that is among the node's processes
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
