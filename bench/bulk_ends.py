"""Processes that bench/exchange_turn.py compares with the mover.

* Raw sockets: a process that sends from a mapping, and one that receives into one buffer.
* A mover that computes no digest and no XOR, but is the same program otherwise.
"""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from unittest import mock

from reft.wire.shm import map_file
from reft_daemon.mover import range_client, range_protocol, range_server
from reft_daemon.mover.__main__ import NICE, main

DEADLINE_S = 60.0


def run_plain_mover() -> None:
    """Runs a mover that computes no digest and no XOR; arguments are those of a mover."""
    with (
        mock.patch.object(range_server, "chunk_digest", lambda chunk: mock.ANY),  # equals each digest of the seal
        mock.patch.object(range_protocol, "frame_digest", lambda frame: 0),
        mock.patch.object(range_client, "fold_piece", lambda *_: None),
    ):
        main()


def send_raw(file: str, begin: int, nbytes: int, control: Connection) -> None:
    """Sends a part of a file to one process for each command of `control`; tells its port first."""
    os.nice(NICE)
    descriptor = os.open(file, os.O_RDWR)
    pages = map_file(descriptor, begin + nbytes)[1][begin:].data
    os.close(descriptor)
    listener = socket.create_server(("127.0.0.1", 0))
    control.send(listener.getsockname()[1])
    while control.recv():
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sent = 0
            while sent < nbytes:
                sent += connection.send(pages[sent : sent + range_protocol.RANGE_MAX])


def receive_raw(port: int, nbytes: int, control: Connection) -> None:
    """Receives so many bytes at each command of `control`, into one buffer, and answers."""
    os.nice(NICE)
    buffer = memoryview(bytearray(range_protocol.RANGE_MAX))
    while control.recv():
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = 0
            while received < nbytes:
                count = connection.recv_into(buffer[: min(len(buffer), nbytes - received)])
                if not count:
                    raise RuntimeError(f"the source has ended after {received} of {nbytes} bytes")
                received += count
        control.send(received)
