"""Pretend nodes on this computer: each has a daemon and a torchrun agent as real processes.

    with Cluster(nodes=2, ranks_per_node=2) as cluster:
        training = cluster.launch("job-1", steps=30, environment={"REFT_FAILPOINTS": "…"})
        cluster.signal_ranks("job-1", [0, 3], signal.SIGKILL)
        codes = training.wait(deadline_s=60)
        training.result()          # every line and digest that the ranks wrote

Nodes and ranks are numbered from 0. Node i runs the global ranks from i*ranks_per_node on: torchrun
sorts agents by address and pid, and the agents are started in order. Leaving the block ends every
process and removes every file.
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

from reft.cli.ask import NoSuchJob, ask
from reft.cli.demo import clean_up
from reft.cli.demo.records import TrainingResult, read_result
from reft.cli.signals import deferring
from reft.config import child_environment
from reft.errors import DaemonUnavailable, ReftError
from reft.wire import daemon_launcher, rpc
from reft.wire.v1 import daemon_pb2 as pb

TRAINER = "reft.demo.train"
PREFIX = "reft-demo-"  # of the folders' names
RESTARTS = 10  # how often an agent may restart its workers
ROOM_PER_RANK = 48 << 20  # bytes; three slots of the demo's model take 10 MiB
DAEMON_START_S = 30.0
STATUS_S = 1.0
POLL_S = 0.05
PORTS_FROM = 15_000  # lower ports belong to well-known services
# Prefixes of variables of another launcher or of reft. They must not reach the pretend nodes.
FOREIGN = ("REFT_", "TORCHELASTIC_", "SLURM_", "MASTER_", "GROUP_", "LOCAL_", "ROLE_", "PET_")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE")
LOCAL_ONLY = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # torchrun 2.13 gives restarted workers the store of the round before, with old addresses in it.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class DemoError(ReftError):
    """The pretend nodes could not do their task."""


@dataclass
class PretendNode:
    """One pretend node: its name, the folder of its slots, the socket and process of its daemon."""

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
    """One job: an agent on each node, and the files that its ranks write."""

    job: str
    world: int
    out: Path
    agents: Sequence[subprocess.Popen[bytes]]
    logs: Sequence[Path]

    @property
    def is_running(self) -> bool:
        return any(agent.poll() is None for agent in self.agents)

    def wait(self, deadline_s: float) -> list[int]:
        """Returns the agents' exit codes.

        Raises:
            DemoError: the agents did not end in time. They are left running.
        """
        end = time.monotonic() + deadline_s
        try:
            return [agent.wait(max(end - time.monotonic(), 0)) for agent in self.agents]
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"job {self.job} did not end within {deadline_s:.0f} s.\n{self.tail()}") from error

    def result(self) -> TrainingResult:
        """Returns the ranks' records so far."""
        return read_result(self.out, self.world)

    def tail(self, lines: int = 30) -> str:
        """Returns the last lines of every agent's log, to find the cause of a failure."""
        texts = []
        for log in self.logs:
            last = log.read_text(errors="replace").splitlines()[-lines:]
            texts += [f"--- the end of {log.name}", *last]
        return "\n".join(texts)


class Cluster:
    """The pretend nodes; see the module.

    Args:
        nodes: number of nodes.
        ranks_per_node: trainers on each node.
        keep: a folder for logs and records that is not removed; None: nothing is kept.
        daemon_environment: more variables of the daemons, such as REFT_FAILPOINTS.
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
        with contextlib.ExitStack() as undo:
            with deferring():  # a signal must not leave folders without a clean-up process
                self.folder = short_folder()
                undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
                self.slots = slots_folder(self.world * ROOM_PER_RANK, self.folder)
                undo.callback(shutil.rmtree, self.slots, ignore_errors=True)
                self._clean_up = clean_up.start([self.folder, self.slots])
                undo.callback(self.close)
            undo.pop_all()
        self.kept = keep or self.folder
        self._daemon_environment = dict(daemon_environment or {})
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
        """Ends every process and removes the folders; returns when that is done."""
        clean_up.finish(self._clean_up)

    def _spawn_daemon(self, node: PretendNode) -> None:
        command = [sys.executable, "-m", "reft_daemon", "--node", node.name, "--socket", str(node.socket),
                   "--listen", "127.0.0.1:0", "--dir", str(node.slots)]  # fmt: skip
        node.daemon = spawn(command, node.log, self.folder, self._daemon_environment)

    # Jobs

    def launch(
        self, job: str, steps: int, *, environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
    ) -> Training:
        """Starts a job's agents, and returns at once.

        Args:
            job: torchrun's --rdzv-id, and so the job's name.
            steps: given to the script as --steps.
            environment: more variables of the trainers, such as REFT_FAILPOINTS.
            arguments: more arguments of the script, after --out FOLDER and --steps N.
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

    # Status, signals, end

    def statuses(self, job: str) -> list[pb.JobStatus]:
        """Returns each daemon's status of its part of a job.

        Daemons that do not answer, or hold nothing of the job, are left out.
        """
        statuses = []
        for node in self.nodes:
            try:
                statuses += ask(node.address, "Status", pb.StatusRequest(job=job), STATUS_S).jobs
            except (DaemonUnavailable, NoSuchJob):
                continue
        return statuses

    def pids(self, job: str) -> dict[int, int]:
        """Returns rank → pid of every living trainer, as the daemons know it."""
        ranks = (rank for status in self.statuses(job) for rank in status.ranks)
        return {rank.rank: rank.pid for rank in ranks if rank.alive}

    def signal_ranks(self, job: str, ranks: Iterable[int], number: int) -> dict[int, int]:
        """Sends a signal to trainers, and returns their pids by rank.

        Raises:
            DemoError: a rank has no living trainer now. No trainer was signalled.
        """
        pids = self.pids(job)
        wanted = list(ranks)
        missing = [rank for rank in wanted if rank not in pids]
        if missing:
            raise DemoError(f"ranks {missing} of job {job} have no trainer now. Living ranks: {sorted(pids)}.")
        for rank in wanted:
            os.kill(pids[rank], number)
        return {rank: pids[rank] for rank in wanted}

    def purge(self, job: str) -> None:
        """Frees everything that the daemons hold of a job that has ended."""
        for node in self.nodes:
            ask(node.address, "Purge", pb.PurgeRequest(job=job))


def spawn(
    command: Sequence[str], log: Path, mark: Path, environment: Mapping[str, str], stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process in its own session. The clean-up process of the folder `mark` will end it.

    Args:
        command: program and arguments.
        log: gets stderr, and stdout unless `stdout` is given.
        mark: the first folder that was given to the clean-up process.
        environment: added to this process's environment, without the variables of other launchers.
        stdout: a file descriptor for stdout; None: the log.
    """
    inherited = {
        name: value
        for name, value in child_environment().items()
        if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
    }
    with open(log, "ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output if stdout is None else stdout, stderr=output,
            start_new_session=True, env={**inherited, clean_up.MARK: str(mark), **environment},
        )  # fmt: skip


def await_daemon(node: PretendNode) -> None:
    """Returns when a node's daemon answers.

    Raises:
        DemoError: the daemon ended, or does not answer in time; the message has the end of its log.
    """
    assert node.daemon is not None
    end = time.monotonic() + DAEMON_START_S
    while time.monotonic() < end and node.daemon.poll() is None:
        try:
            daemon_launcher.hello(node.address, STATUS_S)
            return
        except DaemonUnavailable:
            time.sleep(POLL_S)
    raise DemoError(f"the daemon of {node.name} did not start:\n{node.log.read_text(errors='replace')[-2000:]}")


def short_folder(prefix: str = PREFIX, longest: str = "daemon.sock.ln") -> Path:
    """Returns a new folder for sockets, with a short path: socket paths have a limit.

    Args:
        prefix: of the folder's name.
        longest: the longest path of a socket in the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(folder / longest)) <= rpc.UNIX_PATH_MAX:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))


def slots_folder(need_bytes: int, otherwise: Path, prefix: str = PREFIX) -> Path:
    """Returns a new folder in shared memory if there is room, else in `otherwise`.

    Containers often have 64 MiB of shared memory, or none.
    """
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= need_bytes:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=shared))
    folder = otherwise / "slots"
    folder.mkdir()
    return folder


def free_port() -> int:
    """Returns a free TCP port outside the range that the kernel assigns.

    So the port stays free until a process listens on it.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = PORTS_FROM + secrets.randbelow(first - PORTS_FROM) if first > 2 * PORTS_FROM else 0
        with socket.socket() as probe, contextlib.suppress(OSError):  # the port is in use
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise DemoError(f"none of 100 ports between {PORTS_FROM} and {first} is free.")
