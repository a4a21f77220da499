"""--rdzv-endpoint=host:port: torch's TCPStore, in a process of its own that outlives the agents.

    agent, on the host that the endpoint names          store_host, detached
       nobody listens there? ──── starts ──────────────►  TCPStore
    agents of all nodes ──── state, and "I am here" ───►  leaves when nobody has said that for a while

A store inside an agent, as torch has it, takes the whole job down with that agent within half a second.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from reft.config import Config, child_environment
from reft.console import say
from reft.elastic.options import number
from reft.elastic.stores.store_host import BEATS
from reft.errors import ConfigError
from reft.wire.daemon_launcher import own_folder

BEATS_IN_PATIENCE = 8  # signs of life that may be late or lost before the store's process leaves
PROBE_S = 2.0


class TcpBackend(C10dRendezvousBackend):
    """torch's backend, which also tells the store's process that it is in use.

    Args:
        store: torch's.
        rendezvous_id: keeps the job apart from others.
        idle_s: how long the store's process waits for a sign.
    """

    def __init__(self, store: Store, rendezvous_id: str, idle_s: float = 60.0) -> None:
        super().__init__(store, rendezvous_id)
        self._every_s = idle_s / BEATS_IN_PATIENCE
        self._beat_s = float("-inf")

    @property
    def name(self) -> str:
        return "reft"

    def get_state(self) -> tuple[bytes, Any] | None:
        self._beat()
        return super().get_state()

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        self._beat()
        return super().set_state(state, token)

    def _beat(self) -> None:
        if time.monotonic() - self._beat_s >= self._every_s:
            self._call_store("add", BEATS, 1)
            self._beat_s = time.monotonic()


def connect(parameters: RendezvousParameters, rendezvous_id: str) -> tuple[TcpBackend, Store]:
    """The backend for an endpoint host:port, and its store.

    Raises:
        ConfigError: there is no endpoint, and more than one node.
        RendezvousConnectionError: no store answers there in time.
    """
    timeout = timedelta(seconds=number(parameters, "read_timeout"))
    if not parameters.endpoint:
        if parameters.max_nodes > 1:
            raise ConfigError(
                f"{parameters.max_nodes} nodes need a place to meet, and there is no --rdzv-endpoint.",
                "--rdzv-endpoint=HOST:PORT, a host that outlives the others, or etcd://HOST:PORT,…",
            )
        # Nobody else must find it, and nothing outlives a job's only agent.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return TcpBackend(store, rendezvous_id), store
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    is_host = parameters.get_as_bool("is_host")
    if _matches_machine_hostname(host) if is_host is None else is_host:
        _ensure_host(host, port, number(parameters, "store_idle_exit"))
    try:
        store = _connected(host, port, timeout)
        return TcpBackend(store, rendezvous_id, number(parameters, "store_idle_exit")), store
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(
            f"no store answers at {host}:{port} within {timeout.seconds} s. It is started by the agent on that host: "
            f"is one running there and nothing else at that port, does the name lead to it (else give it "
            f"--rdzv-conf=is_host=true), is the port open?"
        ) from error


def _connected(host: str, port: int, timeout: timedelta) -> Store:
    """torch's store, made in a thread: where something listens that is no store, torch waits for ever, whatever its timeout."""
    made: Future[Store] = Future()

    def make() -> None:
        try:
            made.set_result(TCPStore(host, port, is_master=False, timeout=timeout))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=make, name="reft-store", daemon=True).start()
    if not wait([made], timeout.total_seconds() + PROBE_S).done:  # torch's own error, which says more, comes first
        raise TimeoutError("something listens there that does not answer as a store")
    return made.result()


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_S):
            return True
    except OSError:
        return False


def _ensure_host(host: str, port: int, idle_s: int) -> None:
    """Returns when something listens at the endpoint, after starting it if need be."""
    if _listens(host, port):
        return
    log_path = own_folder(Path(Config.load().runtime_dir)) / f"store-{port}.log"
    command = [sys.executable, "-m", "reft.elastic.stores.store_host", "--port", str(port), "--idle-exit", str(idle_s)]
    with open(log_path, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env=child_environment(),
        )
    assert process.stdout is not None
    with process.stdout:
        is_ready = process.stdout.readline() == b"ready\n"
    if is_ready:
        say(
            f"the rendezvous store of {host}:{port} is process {process.pid}, log {log_path}; it leaves {idle_s} s after "
            "its last agent is gone."
        )
    elif not _listens(host, port):  # else another agent of this host was faster
        tail = log_path.read_text(errors="replace")[-600:]
        raise RendezvousConnectionError(
            f"the store of {host}:{port} could not be started; the end of {log_path}:\n{tail}"
        )
