"""Nodes with the code of an older commit, or with this code and a newer protocol.

    old = extract(folder / "old", FIRST_RANGE)
    new = Side.make(folder / "new", ROOT, protocol=NEWER)
    with MixedNodes(2, old) as nodes:
        nodes.launch("job", …)                       # agents and trainers of the old code
        nodes.replace_daemon(nodes.machines[0], new)

Each side has a virtual environment of its own, with the packages of this one, and begins in its own
tree. So all that its processes start is of that side, too.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from reft.cli.ask import ask
from reft.cli.demo.cluster import child_environment, spawn
from reft.errors import DaemonUnavailable
from reft.wire.messages import OLDEST, PROTOCOL
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import ROOT, until
from tests.support.netns import STORE, Switch
from tests.support.nodes import CHUNK_BYTES, LOCAL_ONLY, STATUS_S, Machine, Nodes, Training

# The first commit that speaks a range of protocols, proofs, and leases that are bound to callers.
FIRST_RANGE = "4c18d563c0413fd2611fc16f3f05a81e2a75f4f5"
NEWER = PROTOCOL + 1
STORE_PORT = 29600  # of the store of a later launch
PACKAGES = sysconfig.get_paths()["purelib"]
# Python runs the last line at each start, before any module of reft is imported.
PATHS = "{root}\n{root}/daemon\n{packages}\nimport reft.wire.messages as m; m.PROTOCOL, m.OLDEST = {numbers}\n"
PROBE = "import reft, reft_daemon, reft.wire.messages as m; print(reft.__file__, reft_daemon.__file__, m.PROTOCOL, m.OLDEST)"


@dataclass(frozen=True)
class Side:
    """One version of reft.

    Attributes:
        root: the tree of the code.
        python: the interpreter that imports that tree.
        protocol: the newest protocol that the side speaks.
        oldest: the oldest one.
    """

    root: Path
    python: Path
    protocol: int
    oldest: int

    @classmethod
    def make(cls, folder: Path, root: Path, protocol: int, oldest: int = OLDEST) -> Side:
        """Makes the environment of a side, and checks that it imports the side's code."""
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        packages = folder / Path(PACKAGES).relative_to(sys.prefix)
        (packages / "side.pth").write_text(PATHS.format(root=root, packages=PACKAGES, numbers=(protocol, oldest)))
        side = cls(root, python, protocol, oldest)
        environment = {**child_environment(), "PYTHONPATH": ""}
        said = subprocess.run(
            side.command("-c", PROBE), env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
        package, daemon = root / "reft/__init__.py", root / "daemon/reft_daemon/__init__.py"
        assert said == [str(package), str(daemon), str(protocol), str(oldest)], said
        return side

    def command(self, *arguments: str) -> list[str]:
        """Returns a command that runs the side's interpreter, in the side's tree."""
        return ["env", f"--chdir={self.root}", str(self.python), *arguments]


def extract(folder: Path, commit: str) -> Side:
    """Returns the side of an older commit of this repository.

    The test is skipped where the commit can't be had.
    """
    git = ["git", "-C", str(ROOT)]
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("the older code comes from git, and this is no clone")
    known = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, timeout=60)
    if known.returncode:
        pytest.skip(f"this clone does not have commit {commit}: git fetch --unshallow")
    root = folder / "tree"
    root.mkdir(parents=True)
    archive = subprocess.run([*git, "archive", commit], stdout=subprocess.PIPE, check=True, timeout=60).stdout
    subprocess.run(["tar", "-x", "-C", str(root)], input=archive, check=True, timeout=60)
    memory = Path("reft/client/memory")
    for built in (ROOT / memory).glob("_*.so"):  # modules in C, where their sources are the same
        source = memory / f"{built.name.partition('.')[0]}.c"
        if (root / source).exists() and (root / source).read_bytes() == (ROOT / source).read_bytes():
            shutil.copy(built, root / memory)
    return Side.make(folder / "venv", root, PROTOCOL)


def answers(machine: Machine) -> bool:
    """Returns whether a node's daemon answers, whatever its protocol is."""
    try:
        ask(machine.address, "Status", pb.StatusRequest(), STATUS_S)
    except DaemonUnavailable:
        return False
    return True


def has_ended(process: psutil.Process) -> bool:
    """Returns whether a process has ended, perhaps between two looks."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class MixedNodes(Nodes):
    """Nodes with daemons, agents and trainers of two sides.

    Args:
        count: the number of nodes, with one trainer each.
        first: the side of all daemons and agents at first.
    """

    def __init__(self, count: int, first: Side) -> None:
        super().__init__(count, ranks_per_node=1)
        self._daemons: dict[str, Side] = {}
        self._first = self._agents = first
        self.earlier: list[Path] = []  # folders of earlier launches

    def start_daemon(self, machine: Machine) -> subprocess.Popen[bytes]:  # type: ignore[override]
        side = self._daemons.setdefault(machine.name, self._first)
        command = side.command("-m", "reft_daemon", *machine.flags)
        return self._spawn(machine, command, machine.log, {"PYTHONPATH": ""})

    def replace_daemon(self, machine: Machine, side: Side) -> None:
        """Ends a node's daemon as a service manager does, and starts the daemon of another side."""
        running = self.daemon_process(machine)
        running.send_signal(signal.SIGTERM)
        until(lambda: has_ended(running), what="the end of the daemon")
        self._daemons[machine.name] = side
        machine.daemon = self.start_daemon(machine)
        until(lambda: answers(machine), what="an answer of the next daemon")
        assert self.daemon_process(machine).cmdline()[0] == str(side.python)
        self.note(f"{machine.name} has a daemon of protocol {side.protocol}")

    def replace_with(self, side: Side) -> Machine:
        """Adds an empty node, whose agent joins the running job.

        Args:
            side: of the daemon; the agent is of the side of the launch.
        """
        first, self._first = self._first, side
        (machine,) = self.replace()
        self._first = first
        return machine

    def side_of(self, machine: Machine) -> Side:
        """Returns the side of a node's daemon."""
        return self._daemons[machine.name]

    def launch_side(self, side: Side, steps: int, **options: object) -> Training:
        """Starts the job's agents from this side, after those of an earlier launch were stopped."""
        if self._launch is not None:
            self._stop_agents()
            self._training.out.rename(self.folder / f"launch-{len(self.earlier) + 1}")
            self.earlier.append(self.folder / f"launch-{len(self.earlier) + 1}")
        self._agents = side
        # Each launch has a store of its own, because torch closes the rendezvous of stopped agents.
        assert isinstance(self._switch, Switch), "daemons on loopback take a new port when they are replaced"
        address, port = self._switch.endpoint.partition(":")[0], str(STORE_PORT + len(self.earlier))
        store = self._switch.enter([sys.executable, "-c", STORE, address, port])
        spawn(store, self.folder / "store.log", self.folder, {})
        endpoint = f"{address}:{port}"
        return self.launch("job", steps, endpoint=endpoint, **options)  # type: ignore[arg-type]

    def _stop_agents(self) -> None:
        for machine in self.living:
            assert machine.agent is not None
            (agent,) = psutil.Process(machine.agent.pid).children()  # the child of nsenter
            agent.send_signal(signal.SIGTERM)
        until(lambda: all(each.agent.poll() is not None for each in self.living if each.agent), what="the agents' end")
        until(lambda: not self.trainers(), what="the end of the trainers")
        self.note("the agents were stopped")

    def _start_agent(self, machine: Machine, environment_now: Mapping[str, str] | None = None) -> None:
        if self._launch is None:
            return
        _, *words = self._launch.command
        command = self._agents.command(*words, f"--local-addr={machine.living.address}", *self._launch.script)
        environment = {
            **LOCAL_ONLY, "GLOO_SOCKET_IFNAME": self._switch.interface, "REFT_DAEMON": machine.inside,
            "REFT_CHUNK_BYTES": str(CHUNK_BYTES), "PYTHONPATH": "", **self._launch.environment,
        }  # fmt: skip
        log = self._launch.training.out / f"{machine.name}.log"
        machine.agent = self._spawn(machine, command, log, environment)
        self._launch.agents.append(machine.agent)
        self._launch.logs.append(log)

    def check_trainers(self) -> None:
        """Fails unless each trainer runs the code of its agent's side."""
        assert {each.cmdline()[0] for each in self.trainers().values()} == {str(self._agents.python)}
