"""A job goes on while its nodes get the next reft, one node after the other, and back.

The older code is that of the first commit that speaks a range of protocols. The newer code is this
one. It says one protocol more than it has: so a range is really spoken, also while both are alike.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from reft.core.membership.failure_detector import JOIN_S
from reft.wire.messages import PROTOCOL
from tests.e2e.test_elastic import PATIENT, finish, namespaces
from tests.e2e.test_elastic_state import STEPS, attaches, await_steps, check_losses, read_records
from tests.support import elastic_train
from tests.support.daemons import ROOT
from tests.support.nodes import Machine
from tests.support.upgrades import FIRST_RANGE, NEWER, MixedNodes, Side, extract

SCRIPT = str(ROOT / "tests/support/elastic_train.py")  # the same for both sides, by its path
TRAIN: dict[str, Any] = {"backend": "reft", "script": [SCRIPT], "conf": PATIENT, "restarts": 40}
SHARDED = {"REFT_PROTECT": "aec"}
PAUSE_S = 0.1
UNJUDGED = int(1.5 * JOIN_S / PAUSE_S)  # steps; in this time a node that was never heard counts as suspect
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Side, Side]:
    """Returns the older and the newer side."""
    folder = tmp_path_factory.mktemp("sides")
    return extract(folder / "old", FIRST_RANGE), Side.make(folder / "new", ROOT, NEWER)


@dataclass(frozen=True)
class Scenario:
    """A job on two nodes, and what it must survive at any time.

    Attributes:
        nodes: the job's nodes.
        is_sharded: whether the nodes exchange parity. A lost node then takes the job back to the
            newest protected step, and else to the newest whole one.
    """

    nodes: MixedNodes
    is_sharded: bool

    def launch(self, side: Side) -> None:
        """Starts agents and trainers of a side, after those of an earlier launch were stopped."""
        arguments = ["--pause", str(PAUSE_S), *(["--sharded"] if self.is_sharded else [])]
        environment = SHARDED if self.is_sharded else {}
        self.nodes.launch_side(side, STEPS, arguments=arguments, environment=environment, **TRAIN)

    def newest(self) -> int:
        """Returns the newest step that survives a lost node."""
        return self.nodes.protected("job") if self.is_sharded else self.nodes.whole("job")[1]

    def await_snapshot(self) -> int:
        """Waits for further steps of both trainers and a later snapshot; returns its step."""
        step = await_steps(self.nodes, 2, 3, after_s=time.monotonic())
        self.nodes.until(lambda: self.newest() > step, f"a snapshot after step {step}")
        self.nodes.note(f"step {self.newest()} survives a lost node")
        self.nodes.check_trainers()
        return self.newest()

    def check_recovery(self, since_s: float, step: int) -> None:
        """Waits until both trainers go on; checks that they restored this step or a later one."""
        self.nodes.await_recovery(since_s)
        records = read_records(self.nodes._training.out)
        back = [each for each in attaches(records) if each["time_s"] > since_s]
        assert len(back) == 2 and {each["restored_from"] for each in back} <= {"memory", "peers"}, back
        assert min(each["step"] for each in back) >= step

    def survive_kills(self) -> None:
        """Kills one trainer, and then the other."""
        for rank in (0, 1):
            step = self.await_snapshot()
            self.check_recovery(self.nodes.kill_ranks(rank), step)

    def survive_a_loss(self, lost: Machine) -> Machine:
        """Loses a node; returns the empty node in its place, whose daemon is of the same side."""
        step = self.await_snapshot()
        side = self.nodes.side_of(lost)
        lost_s = self.nodes.lose(lost)
        fresh = self.nodes.replace_with(side)
        self.check_recovery(lost_s, step)
        return fresh

    def relaunch(self, side: Side) -> None:
        """Stops all agents and trainers, and starts those of another side: the job goes on."""
        step = self.await_snapshot()
        since_s = time.monotonic()
        self.launch(side)
        self.check_recovery(since_s, step)

    def check_losses(self) -> None:
        """Fails unless all losses equal those of an undisturbed run."""
        records = [each for out in (*self.nodes.earlier, self.nodes._training.out) for each in read_records(out)]
        check_losses(records, elastic_train.SHARDED_WIDTH if self.is_sharded else elastic_train.WIDTH)


@namespaces
@pytest.mark.parametrize("newer_is_lost", [True, False], ids=["newer-is-lost", "older-is-lost"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicas", "shards"])
def test_a_job_goes_on_through_an_upgrade_node_by_node_and_back(sides, is_sharded, newer_is_lost):
    """Each node is the first one to be upgraded, and a node of each side is lost."""
    old, new = sides
    with MixedNodes(2, old) as nodes:
        job = Scenario(nodes, is_sharded)
        first, second = nodes.machines if newer_is_lost else reversed(nodes.machines)
        job.launch(old)
        job.await_snapshot()
        nodes.replace_daemon(first, new)
        job.survive_kills()
        if newer_is_lost:
            first = job.survive_a_loss(first)
        else:
            second = job.survive_a_loss(second)
        job.survive_kills()
        nodes.replace_daemon(second, new)  # the agents and trainers are still of the old side
        job.survive_kills()
        job.relaunch(new)
        job.survive_kills()
        nodes.replace_daemon(first, old)  # and back
        job.survive_kills()
        nodes.replace_daemon(second, old)
        job.survive_kills()
        job.relaunch(old)
        job.await_snapshot()
        finish(nodes)
        job.check_losses()


def await_refused_reports(nodes: MixedNodes, count: int) -> None:
    """Waits until the status says of so many ranks that their trainers speak another protocol."""
    expected = f"the trainer speaks protocol {PROTOCOL}, this daemon"

    def refused() -> set[int]:
        ranks = [rank for status in nodes.statuses("job") for rank in status.ranks]
        return {rank.rank for rank in ranks if expected in rank.trouble}

    nodes.until(lambda: len(refused()) == count, f"{count} ranks whose reports are refused")


@namespaces
def test_without_a_common_protocol_training_goes_on_and_slots_stay(tmp_path):
    """Snapshots go on once all speak a common protocol again, be it back or ahead."""
    now, far = Side.make(tmp_path / "now", ROOT, PROTOCOL), Side.make(tmp_path / "far", ROOT, NEWER, oldest=NEWER)
    with MixedNodes(2, now) as nodes:
        job = Scenario(nodes, is_sharded=False)
        job.launch(now)
        job.await_snapshot()
        first, second = nodes.machines
        nodes.replace_daemon(first, far)
        await_refused_reports(nodes, 1)
        await_steps(nodes, 2, UNJUDGED, after_s=time.monotonic())
        assert len(attaches(read_records(nodes._training.out))) == 2, nodes.story()
        nodes.replace_daemon(first, now)
        job.survive_kills()
        step = job.await_snapshot()
        began = len(attaches(read_records(nodes._training.out)))
        nodes.replace_daemon(first, far)
        nodes.replace_daemon(second, far)
        await_refused_reports(nodes, 2)
        await_steps(nodes, 2, UNJUDGED, after_s=time.monotonic())
        assert len(attaches(read_records(nodes._training.out))) == began, nodes.story()
        since_s = time.monotonic()
        job.launch(far)
        job.check_recovery(since_s, step)
        job.survive_kills()
        finish(nodes)
        job.check_losses()
