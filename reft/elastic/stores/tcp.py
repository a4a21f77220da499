"""--rdzv-endpoint=host:port: torch's TCPStore in a separate process that outlives the agents.

    agent on the endpoint's host                           store_host, detached
       no process listens there? ──── starts ─────────────►  TCPStore
    agents of all nodes ──── state and heartbeats ────────►  exits if none comes for a while

torch runs the store inside an agent. Then the end of that agent ends the job within half a second.

An agent has two connections. A connection serves one call at a time, and torch's agent waits in one
call for up to five minutes for the others to finish. Its keep-alives must not wait with it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from reft.config import Config, child_environment
from reft.console import say
from reft.elastic.options import number
from reft.elastic.stores.store_host import BEATS
from reft.elastic.torch_internals import is_own_hostname
from reft.errors import ConfigError
from reft.wire.daemon_launcher import own_folder

BEATS_IN_PATIENCE = 8  # heartbeats that may be lost before the store's process exits
PROBE_S = 2.0
# The key and its first value are those of torch's backend. So agents with torch's backend, or with
# an older reft, meet this state and refuse it.
PREFIX = "torch.rendezvous."
NOTHING = b"Y2FuaW1hZGFt"


class TcpBackend(RendezvousBackend):
    """The job's state under one key; also sends heartbeats to the store's process.

    torch's backend fails on bytes that are no text, which anybody may write there.

    Args:
        store: torch's store.
        rendezvous_id: separates the job from other jobs.
        idle_s: how long the store's process waits for a heartbeat.
    """

    def __init__(self, store: Store, rendezvous_id: str, idle_s: float = 60.0) -> None:
        self._store, self._key = store, PREFIX + rendezvous_id
        self._every_s = idle_s / BEATS_IN_PATIENCE
        self._beat_s = float("-inf")
        self._why_lost = ""  # once the connection is broken

    @property
    def name(self) -> str:
        return "reft"

    def get_state(self) -> tuple[bytes, Any] | None:
        self._beat()
        # `get` would wait for a key that is missing: not written yet, or deleted.
        held = self._call("compare_set", self._key, b"", NOTHING)
        return None if held == NOTHING else (held, held)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if token is not None and not isinstance(token, bytes):
            # The token is not from this backend, so the caller does not know the current state.
            # Nothing is written.
            current = self.get_state()
            return None if current is None else (*current, False)
        self._beat()
        expected = NOTHING if token is None else token
        held = self._call("compare_set", self._key, expected, state)
        if held == expected != state and self.get_state() is None:
            # Of a missing key TCPStore says that it holds what was expected. Now there is a key
            # again, so the next write of a caller that expects no state succeeds.
            return None
        return None if held == NOTHING else (held, held, held == state)

    def _beat(self) -> None:
        if time.monotonic() - self._beat_s >= self._every_s:
            self._call("add", BEATS, 1)
            self._beat_s = time.monotonic()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Returns the store's answer.

        Raises:
            RendezvousConnectionError: the store does not answer, or refuses.
        """
        if self._why_lost:
            raise RendezvousConnectionError(self._why_lost)
        try:
            return getattr(self._store, method)(*arguments)
        except DistNetworkError as error:
            # torch never connects again, and prints twenty lines at each further call: five times a
            # second, until training ends.
            self._why_lost = f"the rendezvous store fails: {error}"
            raise RendezvousConnectionError(self._why_lost) from error
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(f"the rendezvous store fails: {error}") from error


def connect(parameters: RendezvousParameters, rendezvous_id: str) -> tuple[TcpBackend, Store]:
    """Returns the backend for an endpoint host:port, and its store.

    Raises:
        ConfigError: the endpoint is missing, and there is more than one node.
        RendezvousConnectionError: no store answers there in time.
    """
    timeout = timedelta(seconds=number(parameters, "read_timeout"))
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    if not parameters.endpoint or not port:
        if parameters.max_nodes > 1:
            given = f"; in {parameters.endpoint} the port is missing" if parameters.endpoint else ""
            raise ConfigError(
                f"a job of {parameters.max_nodes} nodes needs --rdzv-endpoint{given}.",
                "--rdzv-endpoint=HOST:PORT of the most reliable host, or etcd://HOST:PORT,…",
            )
        # A job of one agent: no other agent needs the store, the store need not outlive the agent,
        # and nobody waits for others. Port 0 is torch's way to ask for such a store.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return TcpBackend(store, rendezvous_id), store
    is_host = parameters.get_as_bool("is_host")
    if _leads_here(host) if is_host is None else is_host:
        _ensure_host(host, port, number(parameters, "store_idle_exit"))
    try:
        store, other = _connected(host, port, timeout)
        return TcpBackend(store, rendezvous_id, number(parameters, "store_idle_exit")), other
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(
            f"no store answers at {host}:{port} within {timeout.seconds} s. The agent on that host starts the store. Check: "
            f"does torchrun run on {host}? Does another program use port {port}? Is the port open? If {host} "
            f"is not that machine's own name, add --rdzv-conf=is_host=true there."
        ) from error


def _connected(host: str, port: int, timeout: timedelta) -> tuple[Store, Store]:
    """Returns torch's store over two connections, made in a thread.

    If another program listens at the endpoint, torch waits for ever and ignores its timeout.
    """
    future: Future[tuple[Store, Store]] = Future()

    def make() -> None:
        try:
            one, other = (TCPStore(host, port, is_master=False, timeout=timeout) for _ in range(2))
            future.set_result((one, other))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=make, name="reft-store", daemon=True).start()
    if not wait(
        [future], timeout.total_seconds() + PROBE_S
    ).done:  # longer than torch's timeout, since torch's error says more
        raise TimeoutError("a program that is no store listens there")
    return future.result()


def _leads_here(host: str) -> bool:
    """Returns whether the host of an endpoint is this machine: its name, or one of its addresses.

    torch compares with the addresses of the machine's name alone: a second network card has others,
    and a name that nothing resolves is an error there.
    """
    with contextlib.suppress(OSError):
        if is_own_hostname(host):
            return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: Any) -> bool:
    """Returns whether an interface of this machine has a socket's address.

    Loopback does not count: behind it may lie a tunnel to the store's host.
    """
    number = ipaddress.ip_address(address[0].partition("%")[0])
    if number.is_loopback or number.is_unspecified:
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.bind(address)  # to port 0: any free one
        return True
    return False


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_S):
            return True
    except OSError:
        return False


def _ensure_host(host: str, port: int, idle_s: int) -> None:
    """Returns when a process listens at the endpoint; starts the store if none does."""
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
            f"the rendezvous store of {host}:{port} is process {process.pid}, log {log_path}. It exits {idle_s} s after "
            "its last agent has ended."
        )
    elif not _listens(host, port):  # else another agent on this host has started the store
        tail = log_path.read_text(errors="replace")[-600:]
        raise RendezvousConnectionError(
            f"the store of {host}:{port} could not be started. The end of {log_path}:\n{tail}"
        )
