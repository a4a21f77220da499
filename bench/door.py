"""The price of the acceptor in front of gRPC: of one call, and for the bandwidth of a Read.

    python bench/door.py [--quick] [--json FILE]

One process serves the same methods twice: at a port of gRPC's own, and behind the acceptor, each
with and without TLS. Another process calls them by turns, so that a busy machine slows all of them
alike. `call` is one small call after the other, `read` a stream of pieces of 1 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import result
from bench.common import median, table
from bench.options import output
from bench.result import Row
from reft.wire import rpc
from reft.wire.tls import Tls
from reft_daemon.server.acceptor import AcceptorThread
from reft_daemon.server.callers import Door
from reft_daemon.server.relayed_server import RelayedServer, listen_at
from tests.support.certificates import Certificates

PIECE = bytes(1 << 20)
READ_PIECES = 256
CALL, READ = "/bench.Door/Call", "/bench.Door/Read"
NOTES = [
    "Other work ran on the two cores, so only what was measured by turns compares: prices and ratios.",
    "Client, server and acceptor share two cores. The server only sends the same bytes again and again.",
    "A slot of 256 MiB of a real daemon, read without TLS as another daemon reads it, by turns with a "
    "daemon without the acceptor: 0.99 of the bandwidth (20 turns, 2026-11-26). There the daemon's own "
    "work and the proofs take most of the time.",
    "Other sizes of a piece, a shorter switch interval of Python, splice and TCP_CORK changed no ratio "
    "beyond its spread.",
]
CALLS = 200
Case = tuple[bool, bool]  # with TLS, behind the acceptor


async def serve(folder: Path, pipe: Connection) -> None:
    """Serves until the pipe ends; sends the ports: (TLS?, behind the acceptor?) → port."""
    thread = AcceptorThread()

    async def call(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
        thread.callers.note_proved(context.peer())
        return b""

    async def read(pieces: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        thread.callers.note_proved(context.peer())
        for _ in range(int(pieces)):
            yield PIECE

    methods: dict[str, grpc.RpcMethodHandler] = {
        "Call": grpc.unary_unary_rpc_method_handler(call), "Read": grpc.unary_stream_rpc_method_handler(read),
    }  # fmt: skip
    ports = {}
    servers: list[object] = []
    for tls in (None, tls_of(folder)):
        for is_relayed in (False, True):
            own = grpc.aio.server(options=rpc.OPTIONS)
            own.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Door", methods),))
            if is_relayed:
                relayed = RelayedServer(own, folder / "private")
                listeners = listen_at("127.0.0.1", 0)
                ports[bool(tls), True] = listeners[0].getsockname()[1]
                await relayed.start(thread, Door.REMOTE, listeners, tls)
                servers.append(relayed)
            else:
                ports[bool(tls), False] = (
                    own.add_secure_port("127.0.0.1:0", credentials_of(tls))
                    if tls
                    else own.add_insecure_port("127.0.0.1:0")
                )
                await own.start()
                servers.append(own)
    pipe.send(ports)
    await asyncio.to_thread(pipe.poll, None)


def tls_of(folder: Path) -> Tls:
    cert, key, ca = Certificates(folder).flags("ca")[1::2]
    return Tls(Path(cert), Path(key), Path(ca))


def credentials_of(tls: Tls) -> grpc.ServerCredentials:
    """Returns what gRPC's own server needs for mutual TLS."""
    cert, key, ca = (path.read_bytes() for path in tls.paths)
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def serve_in_process(folder: Path, pipe: Connection) -> None:
    asyncio.run(serve(folder, pipe))


def call_of(channel: grpc.Channel) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
    return channel.unary_unary(CALL)


class Figures:
    """What each case took, by turns."""

    def __init__(self, channels: dict[Case, grpc.Channel]) -> None:
        self._channels = channels
        self.calls_ms: dict[Case, list[float]] = {case: [] for case in channels}
        self.reads: dict[Case, list[float]] = {case: [] for case in channels}  # MB/s
        for channel in channels.values():
            call_of(channel)(b"", timeout=60)  # makes the connection

    def measure(self) -> None:
        for case, channel in self._channels.items():
            call = call_of(channel)
            for _ in range(CALLS):
                began = time.perf_counter()
                call(b"", timeout=60)
                self.calls_ms[case].append((time.perf_counter() - began) * 1e3)
        for case, channel in self._channels.items():
            began = time.perf_counter()
            read: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(READ)
            nbytes = sum(len(piece) for piece in read(b"%d" % READ_PIECES, timeout=60))
            self.reads[case].append(nbytes / (time.perf_counter() - began) / 1e6)

    def rows(self) -> list[Row]:
        rows = []
        for tls, name in ((False, "plain"), (True, "TLS")):
            own, relayed = (median(self.calls_ms[tls, is_relayed]) for is_relayed in (False, True))
            ratios = [mine / its for its, mine in zip(self.reads[tls, False], self.reads[tls, True], strict=True)]
            rows += [
                Row(f"{name}: a call at gRPC's own port", "ms", None, own),
                Row(f"{name}: a call behind the acceptor", "ms", None, relayed),
                Row(f"{name}: price of a call", "ms", "<= 0.25", relayed - own),
                Row(f"{name}: Read at gRPC's own port", "MB/s", None, median(self.reads[tls, False])),
                Row(f"{name}: Read over that of gRPC's own port", "ratio", ">= 0.9", median(ratios),
                    min=min(ratios), max=max(ratios)),
            ]  # fmt: skip
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="reft-bench-") as folder:
        tls = tls_of(Path(folder))
        ours, theirs = context.Pipe()
        server = context.Process(target=serve_in_process, args=(Path(folder), theirs))
        server.start()
        theirs.close()
        ports: dict[Case, int] = ours.recv()
        figures = Figures(
            {case: rpc.channel(f"127.0.0.1:{port}", tls if case[0] else None) for case, port in ports.items()}
        )
        for _ in range(3 if options.quick else 25):
            figures.measure()
        server.terminate()
        server.join()
    rows = figures.rows()
    print(
        table(["", "unit", "goal", "value"], [[row.name, row.unit, row.goal or "", f"{row.value:.3g}"] for row in rows])
    )
    if options.json:
        result.write(options.json, __file__, "The acceptor in front of gRPC", rows, notes=NOTES)


if __name__ == "__main__":
    main()
