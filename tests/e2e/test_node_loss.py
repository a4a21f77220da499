"""A node dies at the worst moments.

A replacement goes on with the state of the others. The result equals an undisturbed run bit for
bit.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from reft.cli.demo.clean_up import marked
from reft.cli.demo.records import TrainingResult, compare, read_result
from reft.cli.main import main
from tests.support import certificates
from tests.support.daemons import ROOT, until
from tests.support.nodes import Nodes, stop_at
from tests.support.recorded import PlainDemo
from tests.support.trainers import Spec

STEPS = 24
POINTS = ["snapshot.chunk", "snapshot.parity", "restore.chunk", "snapshot.landed"]
# Rank 1 stands still with a slot of step 5, so an earlier step is whole, and training can't end.
IN_TRAINING = stop_at("snapshot.landed", rank=1, step=5)
# The failpoint may be passed up to this number of times before the loss.
HITS = {"snapshot.chunk": 6, "snapshot.parity": 3, "restore.chunk": 6, "snapshot.landed": 1}
pytestmark = pytest.mark.timeout(900)  # a start of all ranks may take a minute where the cores are shared


@dataclass(frozen=True)
class Moment:
    """The moment of a node's loss: one of its ranks stands still at this failpoint."""

    point: str
    rank: int
    step: int
    after: int
    silently: bool

    @classmethod
    def drawn(cls, seed: int, world: int) -> Moment:
        """Returns the moment of a seed: the failpoints take turns, the rest is random."""
        rng = random.Random(seed)
        point = POINTS[seed % len(POINTS)]
        return cls(
            point,
            rng.randrange(world),
            rng.randrange(3, 12),
            rng.randrange(HITS[point]),
            rng.random() < 0.5,
        )

    @property
    def in_restore(self) -> bool:
        return self.point == "restore.chunk"

    @property
    def failpoint(self) -> str:
        """The value of REFT_FAILPOINTS.

        A restore is one of the second attach: the first attach has nothing to restore.
        """
        if self.in_restore:
            return stop_at(self.point, rank=self.rank, epoch=2, after=self.after)
        return stop_at(self.point, rank=self.rank, step=self.step, after=self.after)


@pytest.fixture
def undisturbed(once):
    """Returns a function: number of ranks → an undisturbed run without reft."""

    def run(world: int, records: Path) -> None:
        records.mkdir()
        ranks = PlainDemo(Spec("", steps=STEPS, options={"records": str(records)}), world)
        assert ranks.wait(200) == [0] * world, ranks.errors()

    return lambda world: read_result(once(f"demo-{world}", partial(run, world)), world)


def assert_went_on(result: TrainingResult, lost_s: float, whole: int) -> None:
    """Fails unless all ranks went on from one step.

    That step is at least as new as the whole one.
    """
    bases = {
        rank: next((attempt.base for attempt in attempts if attempt.started_s > lost_s and attempt.steps), None)
        for rank, attempts in result.attempts.items()
    }
    assert len(set(bases.values())) == 1 and (bases[0] or 0) >= whole, (bases, whole)


def lose_at(nodes: Nodes, moment: Moment) -> tuple[float, int]:
    """Waits for the moment and replaces its node.

    Returns the time of the loss, and the step that was whole before.
    """
    job = "job"
    whole = 0
    if moment.in_restore:
        nodes.await_step(moment.step)
        nodes.kill_ranks((moment.rank + 1) % nodes.world)  # at once: a question takes seconds on busy cores
        whole = nodes.whole(job)[1]
    node = nodes.await_stop()
    whole = whole or nodes.whole(job)[1]
    nodes.note(f"step {whole} is whole")
    lost_s = nodes.lose(node, silently=moment.silently)
    nodes.replace()
    nodes.await_recovery(lost_s)
    return lost_s, whole


def check_moment(seed: int, plain: TrainingResult, lose_again: bool) -> None:
    with Nodes(4, ranks_per_node=2) as nodes:
        moment = Moment.drawn(seed, nodes.world)
        nodes.note(str(moment))
        # Both backends: torch's own waits until a lost agent's keep-alive has expired.
        backend = "c10d" if seed % 3 == 0 else "reft"
        nodes.launch("job", STEPS, failpoints=moment.failpoint, fails_later=not moment.in_restore, backend=backend)
        losses = [lose_at(nodes, moment)]
        if lose_again:
            nodes.await_protection(epoch=3 if moment.in_restore else 2)
            chosen = random.Random(seed).choice(nodes.living)
            whole = nodes.whole("job")[1]
            losses.append((nodes.lose(chosen), whole))
            nodes.replace()
            nodes.await_recovery(losses[-1][0])
        result = nodes.await_end()
    for lost_s, whole in losses:
        assert_went_on(result, lost_s, whole)
    assert compare(result, plain, STEPS).differences == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_node_is_lost(seed, undisturbed):
    assert len(undisturbed(8).attempts) == 8
    check_moment(seed, undisturbed(8), lose_again=False)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(3, 23))
def test_a_node_is_lost_at_a_random_moment(seed, undisturbed):
    assert len(undisturbed(8).attempts) == 8
    check_moment(seed, undisturbed(8), lose_again=seed % 2 == 1)


@pytest.mark.slow
def test_two_nodes_are_lost_at_once(undisturbed):
    plain = undisturbed(6)
    with Nodes(6, ranks_per_node=1) as nodes:
        nodes.launch("job", STEPS, arguments=["--tolerate", "2"], failpoints=IN_TRAINING)
        lost = nodes.await_stop()
        whole = nodes.whole("job")[1]
        lost_s = nodes.lose(lost, random.Random(6).choice([each for each in nodes.living if each is not lost]))
        nodes.replace(2)
        nodes.await_recovery(lost_s)
        result = nodes.await_end()
    assert_went_on(result, lost_s, whole)
    assert compare(result, plain, STEPS).differences == []


@pytest.mark.slow
@pytest.mark.skipif(bool(certificates.why_not()), reason=certificates.why_not())
def test_a_node_is_lost_where_daemons_ask_for_certificates(tmp_path, undisturbed):
    """Trainers have no certificates.

    They read slots of other nodes through their own daemon.
    """
    plain = undisturbed(3)
    with Nodes(3, ranks_per_node=1, certificates=certificates.Certificates(tmp_path)) as nodes:
        nodes.launch("job", STEPS, failpoints=IN_TRAINING)
        lost = nodes.await_stop()
        whole = nodes.whole("job")[1]
        lost_s = nodes.lose(lost)
        nodes.replace()
        nodes.await_recovery(lost_s)
        result = nodes.await_end()
    assert_went_on(result, lost_s, whole)
    assert compare(result, plain, STEPS).differences == []


def test_the_error_after_one_lost_node_too_many_names_the_nodes():
    with Nodes(3, ranks_per_node=1) as nodes:
        training = nodes.launch("job", 400, restarts=1)
        nodes.await_step(3)
        lost = nodes.living[1:]
        nodes.lose(*lost)
        survivor = nodes.living[0]
        nodes.replace(2)

        def message() -> str:
            texts = (log.read_text(errors="replace") for log in training.logs)
            return next((line for text in texts for line in text.splitlines() if "RestoreError: " in line), "")

        error_line = nodes.until(message, "the message about what is missing")
        until(lambda: survivor.agent.poll() is not None, 120, "the end of the survivor's agent")
        assert survivor.agent.returncode != 0
        recover_result = CliRunner().invoke(
            main, ["recover", "job", "--json"], env={"REFT_DAEMON": f"unix:{survivor.socket}"}
        )
        assert recover_result.exit_code == 4, recover_result.output
        document = json.loads(recover_result.stdout)
    assert document["outcome"] == "unrecoverable"
    assert all(any(machine.name in line for line in document["missing"]) for machine in lost), document
    assert "no version is whole now" in error_line
    assert all(re.search(rf"\b{machine.name}\b", error_line) for machine in lost), error_line
    assert re.search(r"\bcells?\b", error_line), error_line


def test_a_lost_node_leaves_nothing_and_its_replacement_is_a_new_node():
    with Nodes(2, ranks_per_node=1) as nodes:
        first, second = nodes.living
        path, mark = first.socket, nodes.folder
        before = len(marked(mark))
        nodes.lose(first, silently=True)
        assert not path.exists() and nodes.living == [second]
        assert len(marked(mark)) < before
        (third,) = nodes.replace()
        assert third.inside != second.inside or third.socket != second.socket
    assert not marked(mark) and not mark.exists()


def test_nothing_is_left_when_the_test_itself_is_killed():
    code = "from tests.support.nodes import Nodes\nn = Nodes(2, 1).__enter__()\nprint(n.folder, flush=True)\ninput()"
    owner = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'daemon')]}\n{code}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    lines = iter(owner.stdout.readline, "")
    folder = Path(next(line.strip() for line in lines if line.startswith("/")))
    assert marked(folder)
    owner.kill()
    owner.communicate()
    until(lambda: not folder.exists() and not marked(folder), what="that nothing is left")
