"""State with one holder survives a lost node: the job goes back to the newest protected step.

Four nodes with networks of their own, one rank each, train FSDP2 and torch's ZeRO-1. One node dies:

turn       while a node's mover stands still, so in the middle of a turn
snapshot   while its rank stands in the middle of a copy
between    while no turn is under way, as far as the daemons say
restore    while its rank stands in a restore, after another rank was killed

make test    two moments of FSDP2, one after the other in one job
make soak    the same of ZeRO-1
make chaos   eight more, each in a job of its own
"""

from __future__ import annotations

import contextlib
import random
import signal
from dataclasses import dataclass, replace

import psutil
import pytest

from reft.cli.demo.records import TrainingResult, compare
from tests.e2e.test_example_losses import Example
from tests.support.netns import NODE_MARK, marked
from tests.support.nodes import Machine, Nodes, stop_at

STEPS = 60
LATER = 16  # steps between two losses, so that a step of the new epoch is protected
KINDS = ["turn", "snapshot", "between", "restore"]
FSDP2, ZERO1 = Example("fsdp2", 4, 1, True, steps=STEPS), Example("zero1", 4, 1, True, steps=STEPS)
PARITY = {"REFT_PROTECT": "aec"}  # auto keeps copies of what torch's ZeRO holds: see test_recomputed_losses.py
each_example = pytest.mark.parametrize("example", [FSDP2, ZERO1], ids=["fsdp2", "zero1"])
pytestmark = pytest.mark.timeout(900)  # a start of all ranks may take a minute where the cores are shared


@dataclass(frozen=True)
class Moment:
    """The moment of a node's loss: its rank stands still at a failpoint, or has passed a step."""

    kind: str
    rank: int
    step: int
    after: int
    silently: bool

    @classmethod
    def drawn(cls, example: Example, seed: int) -> Moment:
        """Returns the moment of a seed: the kinds take turns, the rest is random."""
        chance = random.Random(f"exchange {example.name} {seed}")
        kind = KINDS[seed % len(KINDS)]
        step = chance.randrange(8, 16) + (12 if kind == "turn" else 0)  # a mover is to be stopped before
        return cls(kind, chance.randrange(4), step, chance.randrange(3), chance.random() < 0.5)

    def other(self) -> int:
        """Returns another rank: that of the stopped mover, or of the trainer that is killed."""
        return (self.rank + 1) % 4

    def failpoint(self, losses: int) -> str:
        """Returns the failpoint of a moment after so many losses, each of which began an epoch."""
        if self.kind == "restore":  # another rank stands still and is killed, so training doesn't end before
            killed = stop_at("snapshot.landed", rank=self.other(), step=self.step, epoch=losses + 1)
            return f"{killed},{stop_at('restore.chunk', rank=self.rank, epoch=losses + 2)}"
        point, after = ("snapshot.chunk", self.after) if self.kind == "snapshot" else ("snapshot.landed", 0)
        return stop_at(point, rank=self.rank, step=self.step, epoch=losses + 1, after=after)


def movers(mark: str) -> list[psutil.Process]:
    """Returns the movers among the processes with a mark."""
    found = []
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            if "reft_daemon.mover" in " ".join(process.cmdline()):
                found.append(process)
    return found


def lose_at(nodes: Nodes, moment: Moment, base: int) -> tuple[float, int]:
    """Waits for the moment and replaces its node.

    Args:
        base: the newest step that was protected at the loss before; -1 if there was none.

    Returns:
        The time of the loss, and the newest step that was announced as protected before.
    """
    nodes.until(lambda: nodes.protected("job") > base, "a newer protected step")
    protected = nodes.protected("job")
    standing: list[psutil.Process] = []
    if moment.kind == "restore":
        nodes.await_stop()
        nodes.kill_ranks(moment.other())
        nodes.until(lambda: not nodes.stopped(), "the end of the killed rank")
    if moment.kind == "turn":
        standing = movers(nodes.trainers()[moment.other()].environ()[NODE_MARK])
        assert standing, "a daemon of an exchanging job has a mover"
        for each in standing:
            each.suspend()
        nodes.until(lambda: in_turn(nodes) or nodes.stopped(), "a turn that can't end")
    machine: Machine = nodes.await_stop()
    if moment.kind == "between":
        nodes.until(lambda: not in_turn(nodes), "the end of the turn")
    protected = max(protected, nodes.protected("job"))  # of a new epoch there may be none yet
    nodes.note(f"step {protected} is protected, step {nodes.whole('job')[1]} is whole")
    lost_s = nodes.lose(machine, silently=moment.silently)
    for each in standing:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGCONT)
    nodes.replace()
    nodes.await_recovery(lost_s)
    return lost_s, protected


def in_turn(nodes: Nodes) -> bool:
    return any(status.exchange.turn >= 0 for status in nodes.statuses("job") if status.HasField("exchange"))


def check(example: Example, plain: TrainingResult, *seeds: int) -> None:
    """Loses a node at the moment of each seed, one after the other.

    The job must end like an undisturbed one.
    """
    drawn = [Moment.drawn(example, seed) for seed in seeds]
    moments = [replace(moment, step=moment.step + LATER * i) for i, moment in enumerate(drawn)]
    with Nodes(example.nodes, example.per_node) as nodes:
        nodes.note(f"seeds {seeds}: {moments}")
        nodes.launch(
            "job", example.steps, script=["tests.support.recorded"],
            failpoints=",".join(moment.failpoint(i) for i, moment in enumerate(moments)), fails_later=len(moments) > 1,
            arguments=["--example", example.name, "--seal-at", "3"], backend="reft", environment=PARITY,
        )  # fmt: skip
        losses = [(0.0, -1)]
        for moment in moments:
            losses.append(lose_at(nodes, moment, losses[-1][1]))
        result = nodes.await_end()
    for lost_s, protected in losses[1:]:
        bases = {
            next(each.base for each in attempts if each.started_s > lost_s and each.steps)
            for attempts in result.attempts.values()
        }
        assert len(bases) == 1 and min(bases) >= protected >= 0, (bases, protected)
    assert compare(result, plain, example.steps).differences == []


@pytest.mark.parametrize("example", [FSDP2, pytest.param(ZERO1, marks=pytest.mark.slow)], ids=["fsdp2", "zero1"])
def test_a_lost_node_takes_the_job_back_to_the_protected_step(example, plain):
    """A node is lost during a copy, and then another one in a turn."""
    check(example, plain(example), 1, 0)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(2, 10))
@each_example
def test_a_lost_node_at_other_moments(example, seed, plain):
    check(example, plain(example), seed)
