"""A real etcd of some members, on loopback, in a folder of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from reft.cli.demo.cluster import free_port
from tests.support.daemons import until


def why_not() -> str:
    """Why there is no etcd here; empty if there is one."""
    return "" if shutil.which("etcd") else "there is no etcd (Debian: apt-get install etcd-server)"


class EtcdCluster:
    """Members that can be killed and started again.

    Args:
        size: how many.
        host: where they listen.
        within: words before each member's command, such as nsenter's; by default none.
    """

    def __init__(self, size: int, host: str = "127.0.0.1", within: list[list[str]] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="reft-etcd-"))
        self.host, self.within = host, within or [[] for _ in range(size)]
        self.clients, self.peers = [free_port() for _ in range(size)], [free_port() for _ in range(size)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * size

    @property
    def members(self) -> list[str]:
        return [f"{self.host}:{port}" for port in self.clients]

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
        for process in self.processes:
            if process and process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def heal(self) -> None:
        """Starts the members that do not run; returns when all answer."""
        for i, process in enumerate(self.processes):
            if process is None or process.poll() is not None:
                self.processes[i] = self._start(i)
        for i in range(len(self.processes)):
            until(lambda i=i: self._is_healthy(i), 60, f"a healthy member {i} of etcd")

    def kill(self, member: int) -> None:
        process = self.processes[member]
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()

    def leader(self) -> int:
        """The member that leads."""
        statuses = [self._post(i, "maintenance/status") for i in range(len(self.processes))]
        return next(i for i, status in enumerate(statuses) if status["header"]["member_id"] == status["leader"])

    def _start(self, member: int) -> subprocess.Popen[bytes]:
        peers = [f"http://{self.host}:{port}" for port in self.peers]
        client = f"http://{self.host}:{self.clients[member]}"
        command = [
            *self.within[member], "etcd", f"--name=m{member}", f"--data-dir={self.folder}/m{member}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peers[member]}", f"--initial-advertise-peer-urls={peers[member]}",
            "--initial-cluster=" + ",".join(f"m{i}={peer}" for i, peer in enumerate(peers)),
            "--heartbeat-interval=100", "--election-timeout=1000", "--log-level=warn",
        ]  # fmt: skip
        with open(self.folder / f"m{member}.log", "ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _is_healthy(self, member: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.clients[member]}/health", timeout=2) as answer:
                return json.loads(answer.read())["health"] == "true"
        except OSError:
            return False

    def _post(self, member: int, path: str) -> dict:
        request = urllib.request.Request(
            f"http://{self.host}:{self.clients[member]}/v3/{path}", b"{}", {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read())
