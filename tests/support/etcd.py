"""A real etcd cluster on loopback, in a folder of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from reft.cli.demo.cluster import free_port
from tests.support.daemons import until

ASK = """
import sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=5).read().decode())
"""


def why_not() -> str:
    """Returns why etcd is not available; empty if it is."""
    return "" if shutil.which("etcd") else "there is no etcd (Debian: apt-get install etcd-server)"


class EtcdCluster:
    """An etcd cluster whose members can be killed and started again.

    Args:
        size: the number of members.
        places: for each member, the host where it listens, and the words before each of its
            commands, such as nsenter's. By default all members are on loopback.
    """

    def __init__(self, size: int, places: Sequence[tuple[str, list[str]]] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="reft-etcd-"))
        self.places = list(places) or [("127.0.0.1", [])] * size
        self.clients, self.peers = [free_port() for _ in range(size)], [free_port() for _ in range(size)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * size

    @property
    def members(self) -> list[str]:
        return self._at(self.clients)

    def _at(self, ports: Sequence[int]) -> list[str]:
        return [f"{host}:{port}" for (host, _), port in zip(self.places, ports, strict=True)]

    @property
    def endpoint(self) -> str:
        return f"etcd://{','.join(self.members)}"

    def __enter__(self) -> EtcdCluster:
        try:
            self.heal()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for member, process in enumerate(self.processes):
            if process and process.poll() is None:
                self.kill(member)
        shutil.rmtree(self.folder, ignore_errors=True)

    def heal(self) -> None:
        """Starts the members that do not run; waits until all answer."""
        for i, process in enumerate(self.processes):
            if process is None or process.poll() is not None:
                self.processes[i] = self._start(i)
        for i in range(len(self.processes)):
            until(lambda i=i: self._is_healthy(i), 60, f"a healthy member {i} of etcd")

    def kill(self, member: int) -> None:
        process = self.processes[member]
        assert process is not None
        for each in [*psutil.Process(process.pid).children(), process]:  # nsenter's child first
            each.send_signal(signal.SIGKILL)
        process.wait()

    def leader(self) -> int:
        """Returns the index of the member that leads."""
        statuses = [self._post(i, "maintenance/status") for i in range(len(self.processes))]
        return next(i for i, status in enumerate(statuses) if status["header"]["member_id"] == status["leader"])

    def _start(self, member: int) -> subprocess.Popen[bytes]:
        peers = [f"http://{each}" for each in self._at(self.peers)]
        client = f"http://{self.members[member]}"
        command = [
            *self.places[member][1], "etcd", f"--name=m{member}", f"--data-dir={self.folder}/m{member}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peers[member]}", f"--initial-advertise-peer-urls={peers[member]}",
            "--initial-cluster=" + ",".join(f"m{i}={peer}" for i, peer in enumerate(peers)),
            "--heartbeat-interval=100", "--election-timeout=1000", "--log-level=warn",
        ]  # fmt: skip
        with open(self.folder / f"m{member}.log", "ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _is_healthy(self, member: int) -> bool:
        try:
            return self._ask(member, "health")["health"] == "true"
        except (OSError, subprocess.SubprocessError):
            return False

    def _post(self, member: int, path: str) -> dict:
        return self._ask(member, f"v3/{path}", "{}")

    def _ask(self, member: int, path: str, body: str = "") -> dict:
        """Sends a POST if there is a body, else a GET, from the member's host.

        Returns the answer.
        """
        command = [sys.executable, "-SEc", ASK, f"http://{self.members[member]}/{path}", body]
        return json.loads(subprocess.run([*self.places[member][1], *command], capture_output=True, check=True).stdout)
