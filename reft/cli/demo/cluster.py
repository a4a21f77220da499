"""Pretend nodes on this computer: a daemon and a torchrun agent each, as real processes in folders of their own.

    with Cluster(nodes=2, ranks_per_node=2) as cluster:
        training = cluster.launch("job-1", steps=30, environment={"REFT_FAILPOINTS": "…"})
        cluster.signal_ranks("job-1", [0, 3], signal.SIGKILL)
        codes = training.wait(deadline_s=60)
        training.result()          # every line and digest that the ranks wrote

Nodes and ranks are numbered from 0. Node i runs global ranks i*ranks_per_node and up: torchrun sorts agents by address
and pid, and agents are started in order. Leaving the block ends every process and removes every file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reft.cli.ask import UnknownJob, ask
from reft.cli.demo import clean_up
from reft.cli.demo.records import TrainingResult, read_result
from reft.config import child_environment
from reft.errors import DaemonUnavailable, ReftError
from reft.wire import messages, rpc
from reft.wire.v1 import daemon_pb2 as pb

TRAINER = "reft.demo.train"
RESTARTS = 10  # how often an agent may restart its workers
ROOM_PER_RANK = 48 << 20  # bytes; three slots of the demo's model take 10 MiB
DAEMON_START_S = 30.0
STATUS_S = 1.0
POLL_S = 0.05
PORTS_FROM = 15_000  # below them lie those of well-known services
# What a launcher around us may have set, and what would change reft's behaviour: neither may reach the pretend nodes.
FOREIGN = ("REFT_", "TORCHELASTIC_", "SLURM_", "MASTER_", "GROUP_", "LOCAL_", "ROLE_", "PET_")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE")
LOCAL_ONLY = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Stock torchrun 2.13 hands restarted workers the store of the round before, with stale addresses in it.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class DemoError(ReftError):
    """The pretend nodes could not do what was asked of them."""


@dataclass
class PretendNode:
    """One pretend node: its name, the folder of its slots, its daemon's socket and process."""

    name: str
    slots: Path
    socket: Path
    log: Path
    daemon: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"


@dataclass
class Training:
    """One job: an agent on each node, and what its ranks write."""

    job: str
    world: int
    out: Path
    agents: Sequence[subprocess.Popen[bytes]]
    logs: Sequence[Path]

    @property
    def is_running(self) -> bool:
        return any(agent.poll() is None for agent in self.agents)

    def wait(self, deadline_s: float) -> list[int]:
        """The agents' exit codes.

        Raises:
            DemoError: they did not end in time; they are left running.
        """
        end = time.monotonic() + deadline_s
        try:
            return [agent.wait(max(end - time.monotonic(), 0)) for agent in self.agents]
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"job {self.job} did not end within {deadline_s:.0f} s.\n{self.tail()}") from error

    def result(self) -> TrainingResult:
        """What the ranks have written up to now."""
        return read_result(self.out, self.world)

    def tail(self, lines: int = 30) -> str:
        """The last lines of every agent's log, for a person who must find out what happened."""
        texts = []
        for log in self.logs:
            last = log.read_text(errors="replace").splitlines()[-lines:]
            texts += [f"--- the end of {log.name}", *last]
        return "\n".join(texts)


class Cluster:
    """See the module.

    Args:
        nodes: how many.
        ranks_per_node: trainers on each.
        keep: a folder for logs and records that is not removed; None means that nothing is kept.
        daemon_environment: further variables of the daemons, such as REFT_FAILPOINTS.
    """

    def __init__(
        self,
        nodes: int = 2,
        ranks_per_node: int = 2,
        keep: Path | None = None,
        daemon_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.ranks_per_node = ranks_per_node
        self.world = nodes * ranks_per_node
        self.folder = short_folder()
        self.kept = keep or self.folder
        self.slots = slots_folder(self.world * ROOM_PER_RANK, self.folder)
        self._daemon_environment = dict(daemon_environment or {})
        self._keeper = clean_up.start([self.folder, self.slots])
        names = [f"node-{chr(ord('a') + i)}" for i in range(nodes)]
        self.nodes = [
            PretendNode(n, self.slots / n, self.folder / f"{n}.sock", self.kept / f"{n}.daemon.log") for n in names
        ]

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes:
                self._spawn_daemon(node)
            for node in self.nodes:
                await_daemon(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process at once and removes the folders; returns when that is done."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()

    def _spawn_daemon(self, node: PretendNode) -> None:
        command = [sys.executable, "-m", "reft_daemon", "--node", node.name, "--socket", str(node.socket),
                   "--listen", "127.0.0.1:0", "--dir", str(node.slots)]  # fmt: skip
        node.daemon = spawn(command, node.log, self.folder, self._daemon_environment)

    # Jobs

    def launch(
        self, job: str, steps: int, *, environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
    ) -> Training:
        """Starts a job's agents; returns at once.

        Args:
            job: becomes torchrun's --rdzv-id, and so the job's name.
            steps: passed to the script as --steps.
            environment: further variables of the trainers, such as REFT_FAILPOINTS.
            arguments: further arguments of the script, which gets --out FOLDER and --steps N first.
        """
        out = self.kept / job
        out.mkdir()
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.nodes)}",
            f"--nproc-per-node={self.ranks_per_node}", "--rdzv-backend=c10d", f"--rdzv-id={job}",
            f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1", f"--max-restarts={RESTARTS}",
            "-m", TRAINER, "--out", str(out), "--steps", str(steps), *arguments,
        ]  # fmt: skip
        logs = [out / f"{node.name}.log" for node in self.nodes]
        agents = [
            spawn(command, log, self.folder, {**LOCAL_ONLY, "REFT_DAEMON": node.address, **(environment or {})})
            for node, log in zip(self.nodes, logs, strict=True)
        ]
        return Training(job, self.world, out, agents, logs)

    # Looking, and ending

    def statuses(self, job: str) -> list[pb.JobStatus]:
        """What each daemon says of its own part of a job; those that do not answer, or hold nothing, are left out."""
        found = []
        for node in self.nodes:
            try:
                found += ask(node.address, "Status", pb.StatusRequest(job=job), STATUS_S).jobs
            except (DaemonUnavailable, UnknownJob):
                continue
        return found

    def pids(self, job: str) -> dict[int, int]:
        """The process of every rank that lives, as the daemons know it."""
        ranks = (rank for status in self.statuses(job) for rank in status.ranks)
        return {rank.rank: rank.pid for rank in ranks if rank.alive}

    def signal_ranks(self, job: str, ranks: Iterable[int], number: int) -> dict[int, int]:
        """Signals trainers from outside; the pids of those that it reached, by rank.

        Raises:
            DemoError: a rank has no living trainer now; none was signalled.
        """
        pids = self.pids(job)
        wanted = list(ranks)
        missing = [rank for rank in wanted if rank not in pids]
        if missing:
            raise DemoError(f"ranks {missing} of job {job} have no trainer now; living are {sorted(pids)}.")
        for rank in wanted:
            os.kill(pids[rank], number)
        return {rank: pids[rank] for rank in wanted}

    def purge(self, job: str) -> None:
        """Frees what all daemons hold of a job that has ended."""
        for node in self.nodes:
            ask(node.address, "Purge", pb.PurgeRequest(job=job))


def spawn(
    command: Sequence[str], log: Path, mark: Path, environment: Mapping[str, str], stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, which the keeper of the folder `mark` will end.

    Args:
        log: gets stderr, and stdout unless `stdout` says otherwise.
        mark: the first folder that the keeper was given.
        environment: added to ours, from which everything is gone that another launcher set.
    """
    own = {
        name: value
        for name, value in child_environment().items()
        if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
    }
    with open(log, "ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output if stdout is None else stdout, stderr=output,
            start_new_session=True, env={**own, clean_up.MARK: str(mark), **environment},
        )  # fmt: skip


def await_daemon(node: PretendNode) -> None:
    """Returns when a node's daemon answers.

    Raises:
        DemoError: it ended, or does not answer in time; the end of its log is in the message.
    """
    assert node.daemon is not None
    end = time.monotonic() + DAEMON_START_S
    hello = pb.HelloRequest(protocol=messages.PROTOCOL)
    while time.monotonic() < end and node.daemon.poll() is None:
        try:
            ask(node.address, "Hello", hello, STATUS_S)
            return
        except DaemonUnavailable:
            time.sleep(POLL_S)
    raise DemoError(f"the daemon of {node.name} did not start:\n{node.log.read_text(errors='replace')[-2000:]}")


def short_folder() -> Path:
    """A new folder for sockets: their paths have a hard limit, and TMPDIR may be long."""
    folder = Path(tempfile.mkdtemp(prefix="reft-demo-"))
    if len(os.fsencode(folder / "node-a.sock.ln")) <= rpc.UNIX_PATH_MAX:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="reft-demo-", dir="/tmp"))


def slots_folder(need_bytes: int, otherwise: Path) -> Path:
    """A new folder in shared memory if there is room: containers often have 64 MiB of it, or none."""
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= need_bytes:
        return Path(tempfile.mkdtemp(prefix="reft-demo-", dir=shared))
    folder = otherwise / "slots"
    folder.mkdir()
    return folder


def free_port() -> int:
    """A TCP port that is free now, and that the kernel gives nobody who asks for any: until somebody listens, it stays free."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = PORTS_FROM + secrets.randbelow(first - PORTS_FROM) if first > 2 * PORTS_FROM else 0
        with socket.socket() as probe, contextlib.suppress(OSError):  # taken
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise DemoError(f"of 100 ports between {PORTS_FROM} and {first} none is free.")
