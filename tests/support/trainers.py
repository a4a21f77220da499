"""Real trainer processes that start in a tenth of a second: forked from a server that has imported torch once."""

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
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from reft.cli.demo.cluster import free_port
from tests.support.daemons import until
from tests.support.forks import enter

FORKS = multiprocessing.get_context("forkserver")
# torch._dynamo is what the first optimizer of a process imports, for three seconds.
FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch",
        "torch.distributed",
        "torch.distributed.run",
        "reft.client.attach.api",
        "reft.elastic.handler",
        "tests.support.train_mlp",
    ]
)


@dataclass
class Spec:
    """One trainer: what `tests.support.train_mlp.train` is called with."""

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
    """A rank's process: what it says is kept beside its results."""
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
        spec: of every rank; rank, port and out are filled in.
        world: how many ranks.
        daemons: a rank's daemon address, if they differ.
    """

    target: Callable[[dict[str, Any]], None] | None = None  # what runs in each process; None: train_mlp's

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
        """The exit codes, once one rank has died the others are killed, as an agent would."""
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
        """Waits until every rank has reached `step`, at which options["pause_at"] makes it pause."""
        gates = [self.folder / f"{rank}.gate{step}" for rank in range(len(self.processes))]
        # One that dies early has not said anything yet, and leaves the others waiting for it.
        codes = lambda: [process.exitcode for process in self.processes]  # noqa: E731
        try:
            until(lambda: any(code is not None for code in codes()) or all(gate.exists() for gate in gates), 100)
        except AssertionError:
            waited = [gate.name for gate in gates if not gate.exists()]
            raise AssertionError(f"{waited} did not come: {self.errors()[-3000:]}") from None
        assert codes() == [None] * len(gates), (codes(), self.errors()[-3000:])

    def step(self, rank: int = 0) -> int:
        """Where a rank is, if options["tells"] makes it tell."""
        path = self.folder / f"{rank}.step"
        return int(path.read_text() or 0) if path.exists() else 0

    def let_go(self, step: int) -> None:
        """Lets every rank go on from `step`."""
        for rank in range(len(self.processes)):
            (self.folder / f"{rank}.gate{step}").write_text("")

    def errors(self) -> str:
        """What all ranks wrote to stderr."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.err")))

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, 9)
            process.join(60)

    def results(self) -> list[dict[str, Any]]:
        """What every rank wrote at its end."""
        found = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(self.processes))]
        return [{**each, "said": (self.folder / f"{rank}.err").read_text()} for rank, each in enumerate(found)]


def run(spec: Spec, world: int = 1, daemons: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Trains to the end; the results of all ranks."""
    trainers = Trainers(spec, world, daemons)
    codes = trainers.wait()
    assert codes == [0] * world, (codes, trainers.errors()[-3000:])
    return trainers.results()
