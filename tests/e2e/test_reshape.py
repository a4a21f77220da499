"""A job goes on with another number of ranks, from memory.

The state equals, bit for bit, the state that torch's own checkpoint makes of the same change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from reft.wire.v1 import daemon_pb2 as pb
from tests.e2e.test_moves import flip
from tests.support.daemons import DaemonProcess, vanish
from tests.support.reshaped import Ranks
from tests.support.trainers import Spec


class Job:
    """One job and its shapes, one after the other.

    Args:
        folder: for torch's checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps, self.turn = folder, 0, 0

    def run(self, kind: str, nodes: Sequence[DaemonProcess], steps: int = 3, **more: object) -> list[dict]:
        """Trains `steps` more steps, one rank on each of `nodes`; returns the results.

        Compares the restored state with torch's checkpoint of the shape before.
        """
        options = {"kind": kind, "save": str(self.folder / f"dcp{self.turn + 1}"), **more}
        if self.turn:
            options["load"] = str(self.folder / f"dcp{self.turn}")
        began, self.turn, self.steps = self.steps, self.turn + 1, self.steps + steps
        ranks = self._ranks(options, nodes)
        codes = ranks.wait(120)
        self.log = ranks.errors()
        assert codes == [0] * len(nodes), (codes, self.log[-6000:])
        results = ranks.results()
        for each in results:
            assert each["began"] == began and each["sealed"] == [True, self.steps], self.log[-3000:]
            if began:
                assert each["unlike"] == [] and each["unlike groups"] == [] and each["compared"][0] > 3
        return results

    def error_text(self, kind: str, nodes: Sequence[DaemonProcess], **options: object) -> str:
        """Returns the error text of ranks that cannot go on."""
        ranks = self._ranks({"kind": kind, **options}, nodes)
        assert 1 in ranks.wait(120)
        return ranks.errors()

    def _ranks(self, options: dict[str, object], nodes: Sequence[DaemonProcess]) -> Ranks:
        return Ranks(Spec("", steps=self.steps, options=options), len(nodes), [node.address for node in nodes])


def ranks_held(node: DaemonProcess) -> set[int]:
    """Returns the ranks whose slots a node holds."""
    return {slot.rank for slot in node.call("Inventory", pb.InventoryRequest(job="job")).slots}


def test_ddp_shrinks_and_grows(site, tmp_path):
    """Four ranks become three after the loss of the fourth node.

    They are four again with a new node.
    """
    nodes = site.add(4)
    job = Job(tmp_path)
    four = job.run("ddp", nodes)
    vanish(nodes[3])
    three = job.run("ddp", nodes[:3])
    assert [each["from"] for each in three] == ["peers"] * 3
    assert [each["random"] for each in three] == [each["random at the end"] for each in four[:3]]
    assert [each["given"] for each in three] == [4 * 3 * 4] * 3, "the loader gets the positions of all four ranks"
    flip(nodes[1])
    again = job.run("ddp", [*nodes[:3], *site.add(1)])
    assert "step 6 (epoch 2) of rank 1 is damaged, or differs from its replicas: trying other copies" in job.log
    assert [each["random"] for each in again[:3]] == [each["random at the end"] for each in three]
    assert len({each["random"] for each in again}) == 4, "the new rank has generators of its own"
    assert "new ranks 3: random generators" in job.log and "state['lr'] was the same on all 3" in job.log


def test_fsdp2_is_resharded_and_slots_of_the_old_shape_are_freed(site, tmp_path):
    """Four ranks become two on the same two nodes.

    Before that, ranks that would have to guess are refused, and all slots stay.
    """
    nodes = site.add(2)
    job = Job(tmp_path)
    job.run("fsdp2", [nodes[0], nodes[0], nodes[1], nodes[1]])
    text = job.error_text("fsdp2", nodes, plain_loader=True)
    assert "state.data differs among the 4 ranks of the snapshot, and this job has 2 ranks" in text
    assert "load_state_dicts" in text
    assert ranks_held(nodes[0]) == {0, 1} and ranks_held(nodes[1]) == {2, 3}
    assert {each["from"] for each in job.run("fsdp2", nodes)} == {"peers"}
    assert ranks_held(nodes[0]) == {0} and ranks_held(nodes[1]) == {1}, "slots of the old shape are freed"


@pytest.mark.parametrize(("before", "after", "ranks"), [("hsdp2x2", "hsdp1x2", 2), ("tp2xdp2", "tp1xdp4", 4)])
@pytest.mark.parametrize("is_lost", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_shards_with_replicas_are_resharded_after_a_lost_node(site, tmp_path, before, after, ranks, is_lost):
    nodes = site.add(2)
    job = Job(tmp_path)
    job.run(before, [nodes[0], nodes[0], nodes[1], nodes[1]])
    if is_lost:
        vanish(nodes[0])
        nodes[0] = site.add(1)[0]
    assert {each["from"] for each in job.run(after, sorted(nodes * (ranks // 2), key=nodes.index))} == {"peers"}


def test_the_state_of_a_foreign_optimizer_is_resharded(site, tmp_path):
    """Nobody foresees the state of its first step, so the new ranks' pieces follow from the old."""
    nodes = site.add(2)
    job = Job(tmp_path)
    job.run("fsdp2+lion", [nodes[0], nodes[0], nodes[1], nodes[1]])
    assert {each["from"] for each in job.run("fsdp2+lion", nodes)} == {"peers"}


@pytest.mark.parametrize("schedule", [pytest.param(False, marks=pytest.mark.slow), True])
def test_pipeline_stages_are_merged_with_slots_of_a_node_that_left_the_job(site, tmp_path, schedule):
    nodes = site.add(2)
    job = Job(tmp_path)
    job.run("pp2", nodes, schedule=schedule)
    assert job.run("pp1", nodes[1:], schedule=schedule)[0]["from"] == "peers"
    assert ranks_held(nodes[1]) == {0}
    if schedule:
        job.run("pp2", nodes, schedule=True)


@pytest.mark.slow
def test_ddp_shrinks_with_all_nodes_there(site, tmp_path):
    nodes = site.add(4)
    job = Job(tmp_path)
    job.run("ddp", nodes)
    job.run("ddp", nodes[1:])
