"""torchrun with workers forked from a server that has imported torch.

    python -m tests.support.agent …

It takes torchrun's command line, and uses torchrun's own agent, rendezvous and restarts. Eight
trainers that import torch on two cores need half a minute. Forked workers begin at once, so tests
can afford several restarts. A worker's parent is the server, which ends with the agent. The server
is forked from the agent after the agent's imports, so that torch is imported only once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import socket
import sys
import traceback
from multiprocessing import connection, forkserver, resource_tracker

PRELOADED = [
    "torch._dynamo", "torch.distributed.run", "torch.nn.parallel", "torch.optim.lr_scheduler", "reft.client.attach.api",
    "reft.client.restore.materialize", "reft.demo.data", "reft.demo.model",
]  # fmt: skip
ALSO = {
    "tests.support.recorded": [
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "torch.distributed.fsdp",
    ]
}


def work(script: str, *arguments: str) -> None:
    """Runs one worker: a module as `python -m` does, or a path ending in .py as `python` does."""
    sys.argv = [script, *arguments]
    try:
        if script.endswith(".py"):
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except Exception:
        # Into the agent's log, as a script does; torch would wrap the exception.
        traceback.print_exc()
        sys.exit(1)


def fork_server() -> None:
    """Gives multiprocessing a fork server: a fork of this process, which has no threads yet."""
    resource_tracker.ensure_running()  # before the fork, so that both processes share it
    server = forkserver._forkserver  # type: ignore[attr-defined]
    # Python 3.14 authenticates, with a key that is private to it.
    if hasattr(server, "_forkserver_authkey"):
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.arbitrary_address("AF_UNIX"))
        listener.listen()
        # The server ends when the write end is closed in all processes.
        alive_r, alive_w = os.pipe()
        server._forkserver_pid = os.fork()
        if not server._forkserver_pid:
            os.close(alive_w)
            try:
                forkserver.main(listener.fileno(), alive_r, [])
            finally:
                os._exit(0)
        os.close(alive_r)
        server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), alive_w


def main() -> None:
    """Runs the agent of one node."""
    for module in [*PRELOADED, *(name for each in sys.argv for name in ALSO.get(each, ()))]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    fork_server()
    # Not at the head of the file, because every worker imports this module again.
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    options = parse_args(sys.argv[1:])
    config, _, _ = config_from_args(options)
    config.start_method = "forkserver"
    elastic_launch(config, work)(options.training_script, *options.training_script_args)


if __name__ == "__main__":
    main()
