"""`python -m reft_replayer`: the replayer's process. Only a daemon starts it."""

from __future__ import annotations

import argparse
import os
import socket

import torch

from reft.failpoints import Failpoints
from reft.log_lines import begin_log
from reft.replay.fold import load_optimizers
from reft_daemon.child.child_setup import become_child
from reft_replayer.child import serve

OOM_SCORE = 950  # a lost replayer costs one turn of the exchange
NICE = 19
THREADS = 1  # see `fold`: the number can change bits


def main() -> None:
    """Serves one daemon until the channel to the daemon ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--failpoints", default="")
    settings = parser.parse_args()
    begin_log()
    load_optimizers()  # before this process is nice: on busy cores the first order would last half a minute
    become_child(OOM_SCORE, NICE)
    torch.set_num_threads(THREADS)
    try:
        serve(socket.socket(fileno=settings.channel), Failpoints(settings.failpoints))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
