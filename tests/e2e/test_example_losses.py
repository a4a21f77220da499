"""Every example loses a rank, all ranks, and a node.

Each loss comes in the middle of a copy. Each example must end like a run without reft, bit for bit.

make test    one run an example, with one seeded moment of each loss; ranks are forked, nodes are
             daemons on loopback
make chaos   three runs an example, with other moments; and the same under torchrun, on nodes with
             networks of their own
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from click.testing import CliRunner

from reft.cli.demo.records import TrainingResult, compare, read_result
from reft.cli.main import main
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.nodes import Machine, Nodes, stop_at
from tests.support.recorded import Ranks
from tests.support.trainers import Spec

SPANS = ((5, 9), (11, 16), (18, 23))  # the steps in which the first, second and third loss come
DEADLINE_S = 200.0
pytestmark = pytest.mark.timeout(900)  # a start of all ranks may take a minute where the cores are shared


class Example(NamedTuple):
    """One example script and the job that runs it.

    Under torchrun, where steps take milliseconds, the round is tens of steps behind. Steps without
    a free slot are not copied, so a moment in the middle of a copy may come that many steps later.
    The job must still run then, hence `steps`.

    Attributes:
        name: of the script in examples/.
        nodes: number of nodes.
        per_node: ranks on each node.
        is_exchanged: whether some state has one holder, so that a lost node takes the job back to
            the newest protected step, and else to the newest whole one.
        steps: number of steps to train.
    """

    name: str
    nodes: int
    per_node: int
    is_exchanged: bool
    steps: int = 26

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


LOSSES_OF_A_RUN = ["rank", "all", "node"]
EXAMPLES = [
    Example("ddp", 2, 1, False, steps=200),
    Example("fsdp2", 4, 1, True),
    Example("zero1", 4, 1, True),
    Example("hsdp", 2, 2, False),
    Example("tensor_pipeline_3d", 4, 2, False),
]
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])


class Moment(NamedTuple):
    """The moment of a loss: this rank stands still in the middle of a copy of a step."""

    kind: str
    rank: int
    step: int
    after: int
    apart: int = 1  # of two lost nodes, the second is so many after the first


def moments(example: Example, seed: int) -> list[Moment]:
    """Returns the losses of a seed, in random order."""
    chance = random.Random(f"{example.name} {seed}")
    kinds = chance.sample(LOSSES_OF_A_RUN, len(LOSSES_OF_A_RUN))
    return [
        Moment(kind, chance.randrange(example.world), chance.randrange(*span), chance.randrange(3))
        for kind, span in zip(kinds, SPANS, strict=False)
    ]


# Forked ranks


class Run:
    """A job of an example, over all its starts.

    Args:
        example: the example to run.
        folder: for the records of all ranks.
        nodes: the daemons, each for an equal block of ranks; empty for a run without reft.
        environment: environment variables of all ranks.
    """

    def __init__(self, example: Example, folder: Path, nodes: list[DaemonProcess], **environment: str) -> None:
        self.example, self.folder, self.nodes, self.environment = example, folder, nodes, environment
        self.protected = -1  # the newest step that was announced as protected, in any start
        folder.mkdir()

    def note_protected(self) -> bool:
        """Notes the newest step that a daemon announces as protected; whether there is one."""
        statuses = [node.status("job") for node in self.nodes]
        self.protected = max([self.protected, *(s.exchange.protected for s in statuses if s.HasField("exchange"))])
        return self.protected >= 0

    def start(self, failpoints: str = "", *seal_at: int) -> Ranks:
        options = {"example": self.example.name, "records": str(self.folder), "per_node": self.example.per_node}
        options["seal_at"] = [step for step in seal_at if step]
        environment = self.environment if self.nodes else {"REFT_MODE": "off"}
        spec = Spec("", steps=self.example.steps, failpoints=failpoints, environment=environment, options=options)
        daemons = [self.nodes[self.node_of(rank)].address for rank in range(self.example.world)] if self.nodes else []
        return Ranks(spec, self.example.world, daemons)

    def node_of(self, rank: int) -> int:
        return rank * len(self.nodes) // self.example.world

    def finish(self, ranks: Ranks) -> TrainingResult:
        codes = ranks.wait(DEADLINE_S)
        assert codes == [0] * self.example.world, (codes, ranks.errors()[-6000:])
        return read_result(self.folder, self.example.world)

    def lose(self, moment: Moment, seal_at: int, site: Site) -> int:
        """Starts the job and causes the loss of `moment`.

        It returns the oldest step that the job may go on from: the newest whole step; after
        a lost node, where state has one holder, the newest protected one.
        """
        point = f"snapshot.chunk:stop:rank={moment.rank}:from={moment.step}:after={moment.after}"
        ranks = self.start(point, seal_at, moment.step - 1)  # so there is a slot for the moment's step
        victim = ranks.processes[moment.rank]
        victim_process = psutil.Process(victim.pid)
        until(
            lambda: victim_process.status() == psutil.STATUS_STOPPED or not victim.is_alive(), DEADLINE_S, f"{moment}"
        )
        assert victim.is_alive(), ranks.errors()[-6000:]
        whole = max(node.status("job").whole for node in self.nodes)
        if self.example.is_exchanged:
            until(lambda: self.note_protected() and self.protected >= seal_at, DEADLINE_S, "a protected step")
            whole = self.protected if moment.kind in ("node", "nodes") else whole
        all_ranks = range(self.example.world)
        node, count = self.node_of(moment.rank), len(self.nodes)
        lost = {"node": [node], "nodes": [node, (node + moment.apart) % count]}.get(moment.kind, [])
        on_lost = [rank for rank in all_ranks if self.node_of(rank) in lost]
        for rank in {"rank": [moment.rank], "all": all_ranks}.get(moment.kind, on_lost):
            os.kill(ranks.processes[rank].pid, signal.SIGKILL)
        vanish(*(self.nodes[each] for each in lost))
        for each, replacement in zip(lost, site.add(len(lost)), strict=True):
            self.nodes[each] = replacement
        for process in ranks.processes:  # as a launcher ends the remaining ranks
            process.terminate()
            process.join(60)
        return whole


def run_plain(example: Example, folder: Path) -> None:
    """Runs an example without reft."""
    run = Run(example, folder, [])
    run.finish(run.start())


def check(example: Example, seed: int, plain: TrainingResult, site: Site, folder: Path) -> Run:
    """Causes the losses of a seed, each in its own start of the job.

    The last start trains to the end; its result must equal `plain`.
    """
    run = Run(example, folder / f"seed{seed}", site.add(example.nodes))
    wholes = [run.lose(moment, 0 if i else 3, site) for i, moment in enumerate(moments(example, seed))]
    assert_went_on(run.finish(run.start()), wholes, plain, example.steps)
    return run


def assert_went_on(result: TrainingResult, wholes: list[int], plain: TrainingResult, steps: int) -> None:
    """Fails unless all ranks went on from one step after each loss.

    That step must not be older than the step that was whole at the loss. The end result must equal
    `plain`.
    """
    assert 3 <= wholes[0]
    for i, whole in enumerate(wholes, 1):
        bases = {attempts[i].base for attempts in result.attempts.values()}
        assert len(bases) == 1 and min(bases) >= whole, (i, bases, wholes)
    assert compare(result, plain, steps).differences == []
    assert all(any(name.startswith("optimizer ") for name in digests) for digests in result.digests.values())


LONGEST = ("zero1", "tensor_pipeline_3d")


@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=[pytest.mark.slow] * (each.name in LONGEST), id=each.name) for each in EXAMPLES],
)
def test_an_example_survives_losses_bit_for_bit(example, plain, site, tmp_path):
    run = check(example, 0, plain(example), site, tmp_path)
    assert exposures(run.nodes[0]) == []


@pytest.mark.slow
def test_two_nodes_of_different_groups_are_lost_at_once(plain, site, tmp_path):
    """HSDP, one rank on each of four nodes.

    Ranks 0 and 2 hold one half of the state, ranks 1 and 3 the other. So each half survives one
    loss. All four ranks hold the optimizer's step counters, which must survive two losses.
    """
    (hsdp,) = [example for example in EXAMPLES if example.name == "hsdp"]
    run = Run(hsdp, tmp_path / "groups", site.add(hsdp.world), REFT_TOLERATE="2")
    whole = run.lose(Moment("nodes", rank=3, step=7, after=1), 3, site)
    assert_went_on(run.finish(run.start()), [whole], plain(hsdp), hsdp.steps)


@pytest.mark.slow
def test_two_nodes_of_different_stages_are_lost_at_once(plain, site, tmp_path):
    """TP x PP x DP on four nodes of two ranks.

    Nodes 0 and 2 hold one stage, nodes 1 and 3 the other. The stages have no leaf in common.
    """
    (pipeline,) = [example for example in EXAMPLES if example.name == "tensor_pipeline_3d"]
    run = Run(pipeline, tmp_path / "stages", site.add(pipeline.nodes))
    whole = run.lose(Moment("nodes", rank=3, step=7, after=1), 3, site)
    assert_went_on(run.finish(run.start()), [whole], plain(pipeline), pipeline.steps)


FSDP2_SIX = Example("fsdp2", 6, 1, True)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(5))
def test_any_two_nodes_of_an_exchange_are_lost_at_once(seed, plain, site, tmp_path):
    """FSDP2 on six nodes. Each rank's state has one holder, and survives two lost nodes."""
    chance = random.Random(f"two nodes {seed}")
    moment = Moment("nodes", chance.randrange(6), chance.randrange(7, 16), chance.randrange(3), chance.randrange(1, 6))
    run = Run(FSDP2_SIX, tmp_path / "six", site.add(6))
    whole = run.lose(moment, 3, site)
    assert_went_on(run.finish(run.start()), [whole], plain(FSDP2_SIX), FSDP2_SIX.steps)
    assert exposures(run.nodes[0]) == []


@pytest.mark.chaos
def test_two_lost_nodes_of_an_exchange_are_rebuilt_by_recover(plain, site, tmp_path):
    """Each replacement makes the slots of its lost node; then the job goes on."""
    nodes = [DaemonProcess("--node", f"n{i}", "--listen", "127.0.0.1:0") for i in range(6)]
    site.daemons += nodes
    run = Run(FSDP2_SIX, tmp_path / "rebuilt", nodes)
    whole = run.lose(Moment("nodes", rank=4, step=9, after=1, apart=3), 3, site)
    onto = [each for index in (1, 4) for each in ("--onto", f"n{index}={run.nodes[index].address}")]
    environment = {"REFT_DAEMON": run.nodes[0].address}
    done = CliRunner().invoke(main, ["recover", "job", "--yes", "--json", *onto], env=environment)
    assert done.exit_code == 0, done.output
    rebuilt = json.loads(done.stdout)["rebuilt"]
    assert sorted(rank for each in rebuilt for rank in each["ranks"]) == [1, 4]
    assert min(each["step"] for each in rebuilt) >= whole
    assert_went_on(run.finish(run.start()), [whole], plain(FSDP2_SIX), FSDP2_SIX.steps)


def exposures(node: DaemonProcess) -> list[tuple[str, list[int], int]]:
    """Returns the state that a lost node would take with it: reason, ranks, bytes."""
    done = CliRunner().invoke(main, ["status", "--json"], env={"REFT_DAEMON": node.address}, catch_exceptions=False)
    (job,) = json.loads(done.output)["jobs"]
    return [(each["reason"], each["ranks"], each["bytes"]) for each in job["protection"]["exposed"]]


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [1, 2, 3])
@each_example
def test_an_example_survives_losses_at_other_moments(example, seed, plain, site, tmp_path):
    check(example, seed, plain(example), site, tmp_path)


# Under torchrun


def one_rank(nodes: Nodes, machine: Machine, rank: int) -> float:
    return nodes.kill_ranks(rank)


def all_ranks(nodes: Nodes, machine: Machine, rank: int) -> float:
    return nodes.kill_ranks(*range(nodes.world))


def a_node(nodes: Nodes, machine: Machine, rank: int) -> float:
    lost_s = nodes.lose(machine)
    nodes.replace()
    return lost_s


LOSSES = {"rank": one_rank, "all": all_ranks, "node": a_node}


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [1, 2, 3])
@each_example
def test_an_example_survives_losses_under_torchrun(example, seed, plain):
    losses = moments(example, seed)
    points = [
        stop_at("snapshot.chunk", rank=each.rank, step=each.step, epoch=epoch, after=each.after)
        for epoch, each in enumerate(losses, 1)
    ]
    # So each moment's step is snapshotted. On busy cores a later one would be, and the restart from
    # it would stop at the next moment before it has trained.
    seal_at = sorted({3, *(each.step - 1 for each in losses)})
    with Nodes(example.nodes, example.per_node) as nodes:
        nodes.note(f"seed {seed}: {points}")
        nodes.launch(
            "job", example.steps, script=["tests.support.recorded"], failpoints=",".join(points),
            arguments=["--example", example.name, "--seal-at", *map(str, seal_at)],
        )  # fmt: skip
        protected = -1
        for moment in losses:
            machine = nodes.await_stop()
            whole = nodes.whole("job")[1]
            if example.is_exchanged:
                protected = max(protected, nodes.until(lambda: nodes.protected("job") + 1, "a protected step") - 1)
                whole = protected if moment.kind == "node" else whole
            lost_s = LOSSES[moment.kind](nodes, machine, moment.rank)
            nodes.await_recovery(lost_s)
            result = nodes._training.result()
            tries = [
                [each for each in attempts if each.started_s > lost_s and each.steps]
                for attempts in result.attempts.values()
            ]
            bases = {attempts[0].base for attempts in tries}
            assert len(bases) == 1 and min(bases) >= whole, (bases, whole)
        assert compare(nodes.await_end(), plain(example), example.steps).differences == []
