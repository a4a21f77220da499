"""Real torchrun agents for tests, each with a folder and a log.

All are removed at the end. The agents are forked from a server that has imported torch, because the
import costs three seconds of a core.

    with Agents(folder, "--rdzv-backend=reft", …) as agents:
        agents.start("--local-addr=127.0.0.1")

Unless a test gives another script, the workers run one without torch: they begin at once, and write
    who they are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from reft.cli.demo import clean_up
from reft.cli.demo.cluster import short_folder
from reft.config import child_environment
from tests.support.daemons import ROOT, until
from tests.support.trainers import FORKS

# Writes a line into the folder named by its argument, and stays until a file `done` or `done-NODE`
# lies there.
WORKER = """
import os, sys, time
folder = sys.argv[1]
me = [os.environ.get(name, "") for name in ("NODE", "RANK", "WORLD_SIZE", "REFT_ROUND")]
line = " ".join([me[0], str(os.getpid()), *me[1:]])
with open(os.path.join(folder, "workers"), "a") as out:
    out.write(line + "\\n")
ends = [os.path.join(folder, name) for name in ("done", "done-" + me[0])]
while not any(map(os.path.exists, ends)):
    time.sleep(0.05)
"""


def torchrun(arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """Runs an agent's process from its fork to its end."""
    from reft.client.attach.launcher import die_with_parent

    os.setsid()
    die_with_parent()  # the parent is the server, which always ends with the test's process
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environment)
    from torch.distributed import run

    sys.argv = [run.__file__, *arguments]
    run.main()


class Agent:
    """One agent's process, with the methods of Popen."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.touch()
        self._process: ForkServerProcess = FORKS.Process(
            target=torchrun, args=(arguments, dict(environment), str(log)), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, deadline_s: float = 60.0) -> int:
        self._process.join(deadline_s)
        code = self._process.exitcode
        assert code is not None, f"agent {self.pid} did not end within {deadline_s} s"
        return code

    def kill(self) -> None:
        self._process.kill()


class Agents:
    """The agents of one job; see the module.

    Args:
        folder: the folder for the workers' lines and for logs.
        flags: the flags of torchrun, for all agents.
        script: the script of the workers with its arguments; the folder is added as the last
            argument.
    """

    def __init__(self, folder: Path, *flags: str, script: Sequence[str] = ()) -> None:
        self.folder, self.flags = folder, flags
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self._words = list(script)
        self.runtime = short_folder()
        self._keeper = clean_up.start([self.runtime])
        self.agents: list[Agent] = []

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()

    def start(self, name: str, *flags: str, environment: dict[str, str] | None = None) -> Agent:
        """Starts the agent of the node with this name."""
        words = self._words or [str(self.script)]
        own = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]), "OMP_NUM_THREADS": "1", "NODE": name}
        own |= {clean_up.MARK: str(self.runtime), **(environment or {})}
        arguments = [*self.flags, *flags, *words, str(self.folder)]
        agent = Agent(arguments, {**child_environment(), **own}, self.log(name))
        self.agents.append(agent)
        return agent

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def finish(self, node: str = "") -> None:
        """Makes the workers of a node end, or all."""
        (self.folder / (f"done-{node}" if node else "done")).touch()

    def workers(self) -> list[tuple[str, int, int, int, int]]:
        """Returns every worker that ever began: node, pid, rank, world, round (-1: unknown)."""
        try:
            lines = (self.folder / "workers").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = [line.split(" ") for line in lines]
        return [(row[0], int(row[1]), int(row[2]), int(row[3]), int(row[4] or -1)) for row in rows if len(row) == 5]

    def ranks(self, world: int, after: int = 0, deadline_s: float = 90.0) -> dict[str, int]:
        """Waits until a round has `world` workers; returns node → rank of these workers.

        Args:
            world: the world size of the round.
            after: how many of the oldest workers are ignored.
        """

        def newest() -> dict[str, int]:
            rows = self.workers()[after:]
            last = {row[0]: row for row in rows}
            by_node = {row[0]: row[2] for row in last.values() if row[3] == world and row[4] == rows[-1][4]}
            return by_node if len(by_node) == world else {}

        try:
            return dict(until(newest, deadline_s, f"{world} workers"))
        except AssertionError as error:
            raise AssertionError(f"{error}; workers: {self.workers()}\n{self.story()}") from error

    def story(self) -> str:
        """Returns the end of every log."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
