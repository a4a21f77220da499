"""`python -m reft_daemon.mover`: the mover's process. Only a daemon starts it."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import socket
import ssl
import sys
from pathlib import Path

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
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    become_child(OOM_SCORE, NICE)
    files = tuple(settings.tls or ())
    # Each connection reads the files as they are now: they may be replaced while jobs run.
    server_tls, client_tls = (functools.partial(_context, is_server, *files) for is_server in (True, False))
    family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    server = RangeServer(listener, server_tls if files else None, settings.bytes_per_s)
    channel = socket.socket(fileno=settings.channel)
    try:
        CommandServer(channel, server, client_tls if files else None).run()
    finally:
        os._exit(0)  # threads may be waiting for other nodes


def _context(is_server: bool, cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
    """Returns a context for plain sockets: mutual TLS, as on the channels.

    Raises:
        OSError: a file can't be read, or the files do not fit together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key, password=_refuse)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _refuse() -> str:
    raise OSError("the key is encrypted")


if __name__ == "__main__":
    main()
