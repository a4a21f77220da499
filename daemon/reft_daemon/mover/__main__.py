"""`python -m reft_daemon.mover`: the mover's process. Only a daemon starts it."""

from __future__ import annotations

import argparse
import functools
import os
import socket
from pathlib import Path

from reft.log_lines import begin_log
from reft.wire.tls import Tls
from reft_daemon.child.child_setup import become_child
from reft_daemon.mover.child import CommandServer
from reft_daemon.mover.range_server import RangeServer

OOM_SCORE = 900  # a lost mover costs one turn of the exchange
NICE = 10
BACKLOG = 128


def main() -> None:
    """Serves one daemon until the channel to the daemon ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bytes-per-s", type=int, default=0)
    parser.add_argument("--tls", type=Path, nargs=3)
    settings = parser.parse_args()
    begin_log()
    become_child(OOM_SCORE, NICE)
    # Each connection reads the files as they are now: they may be replaced while jobs run.
    tls = functools.partial(Tls, *settings.tls) if settings.tls else None
    family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    server = RangeServer(listener, tls, settings.bytes_per_s)
    channel = socket.socket(fileno=settings.channel)
    try:
        CommandServer(channel, server, tls).run()
    finally:
        os._exit(0)  # threads may be waiting for other nodes


if __name__ == "__main__":
    main()
