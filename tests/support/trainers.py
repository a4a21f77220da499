"""Real trainer processes that start in a tenth of a second: forks of a server with torch."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from reft.cli.demo.cluster import free_port
from tests.support.daemons import until
from tests.support.forks import enter

FORKS = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes three seconds.
FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch",
        "torch.distributed",
        "torch.distributed.run",
        "torch.distributed.optim",  # with torch.jit: a third of a second in each rank of ZeRO-1
        "torch.distributed.pipelining",
        "torch.distributed.checkpoint.state_dict",
        "reft.client.attach.api",
        "reft.elastic.handler",
        "tests.support.train_mlp",
    ]
)


@dataclass
class Spec:
    """One trainer: the argument of `tests.support.train_mlp.train`, as a dataclass."""

    daemon: str
    job: str = "job"
    steps: int = 12
    rank: int = 0
    world: int = 1
    port: int = 0
    failpoints: str = ""
    out: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def _heard(train: Callable[[dict[str, Any]], None], spec: dict[str, Any]) -> None:
    """Runs a rank's process, with its output in a file beside its results."""
    log = open(Path(spec["out"]).with_suffix(".err"), "w")
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    try:
        if "network" in spec["options"]:
            enter(spec["options"]["network"])
        train(spec)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class Trainers:
    """All ranks of one run of one job.

    Args:
        spec: the spec of every rank; rank, port and out are filled in.
        world: the number of ranks.
        daemons: the daemon address of each rank, if the ranks have different ones.
    """

    # Runs in each process; None is train_mlp.train.
    target: Callable[[dict[str, Any]], None] | None = None

    def __init__(self, spec: Spec, world: int = 1, daemons: Sequence[str] = ()) -> None:
        from tests.support import train_mlp

        self.folder = Path(tempfile.mkdtemp(prefix="reft-test-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        port = free_port() if world > 1 else 0
        self.processes: list[ForkServerProcess] = []
        for rank in range(world):
            own = {**asdict(spec), "rank": rank, "world": world, "port": port, "out": str(self.folder / f"{rank}.json")}
            if daemons:
                own["daemon"] = daemons[rank]
            process = FORKS.Process(target=_heard, args=(self.target or train_mlp.train, own), daemon=True)
            process.start()
            self.processes.append(process)

    def wait(self, deadline_s: float = 100.0) -> list[int]:
        """Returns the exit codes. Once a rank has failed, kills the others as an agent does."""
        for process in self._until_one_ends(deadline_s):
            process.kill()
        for process in self.processes:
            process.join(60)
        return [process.exitcode for process in self.processes]

    def _until_one_ends(self, deadline_s: float) -> list[ForkServerProcess]:
        from multiprocessing.connection import wait

        left = list(self.processes)
        while left:
            done = wait([process.sentinel for process in left], deadline_s)
            if not done:
                for process in left:
                    process.kill()
                pids = [process.pid for process in left]
                raise AssertionError(f"trainers {pids} did not end within {deadline_s} s: {self.errors()[-3000:]}")
            ended = [process for process in left if process.sentinel in done]
            left = [process for process in left if process not in ended]
            if any(process.exitcode != 0 for process in ended):
                return left
        return []

    def wait_for(self, step: int) -> None:
        """Waits until every rank has reached `step`, where options["pause_at"] pauses it."""
        gates = [self.folder / f"{rank}.gate{step}" for rank in range(len(self.processes))]
        # A rank that dies early creates no gate, and the other ranks wait for it.
        codes = lambda: [process.exitcode for process in self.processes]  # noqa: E731
        try:
            until(lambda: any(code is not None for code in codes()) or all(gate.exists() for gate in gates), 100)
        except AssertionError:
            waited = [gate.name for gate in gates if not gate.exists()]
            raise AssertionError(f"{waited} did not come: {self.errors()[-3000:]}") from None
        assert codes() == [None] * len(gates), (codes(), self.errors()[-3000:])

    def step(self, rank: int = 0) -> int:
        """Returns the step of a rank, if options["tells"] makes it write its steps."""
        path = self.folder / f"{rank}.step"
        return int(path.read_text() or 0) if path.exists() else 0

    def longest_step(self, began_s: float, ended_s: float, rank: int = 0) -> float:
        """Returns the longest step between two times; needs options["tells"]."""
        lines = (self.folder / f"{rank}.times").read_text().splitlines()
        times = [began_s, *(at_s for at_s in map(float, lines) if began_s < at_s < ended_s), ended_s]
        return max(later - earlier for earlier, later in pairwise(times))

    def let_go(self, step: int) -> None:
        """Lets every rank go on from `step`."""
        for rank in range(len(self.processes)):
            (self.folder / f"{rank}.gate{step}").write_text("")

    def errors(self) -> str:
        """Returns the stderr of all ranks."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.err")))

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, 9)
            process.join(60)

    def results(self) -> list[dict[str, Any]]:
        """Returns what every rank wrote at its end, with its output as "said"."""
        results = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(self.processes))]
        return [{**each, "said": (self.folder / f"{rank}.err").read_text()} for rank, each in enumerate(results)]


def run(spec: Spec, world: int = 1, daemons: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Trains to the end; returns the results of all ranks."""
    trainers = Trainers(spec, world, daemons)
    codes = trainers.wait()
    assert codes == [0] * world, (codes, trainers.errors()[-3000:])
    return trainers.results()
