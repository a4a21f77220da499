"""torchrun, but its workers are forked from a server that has imported torch once: `python -m tests.support.agent …`.

Takes torchrun's own command line and is torchrun's own agent, rendezvous and restarts. Eight trainers that import torch
on two cores need half a minute; forked ones begin at once, so tests can afford several restarts. A worker's parent is
the server, which ends with the agent.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
import traceback
from multiprocessing import forkserver

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


def work(module: str, *arguments: str) -> None:
    """One worker: runs `module` as `python -m` does."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # into the agent's log, as of any script; torch would wrap it
        sys.exit(1)


def main() -> None:
    """The agent of one node."""
    workers = multiprocessing.get_context("forkserver")
    workers.set_forkserver_preload([*PRELOADED, *(name for each in sys.argv for name in ALSO.get(each, ()))])
    forkserver.ensure_running()  # before our own imports, so that both go on at once
    # Here, not above: every worker imports this module again.
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    options = parse_args(sys.argv[1:])
    config, _, _ = config_from_args(options)
    config.start_method = "forkserver"
    elastic_launch(config, work)(options.training_script, *options.training_script_args)


if __name__ == "__main__":
    main()
