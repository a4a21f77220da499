"""A job comes back with other ranks, from memory: bit-equal to what torch's own checkpoint makes of the same change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.test_moves import Site, vanish
from tests.support.daemons import DaemonProcess
from tests.support.reshaped import Ranks
from tests.support.trainers import Spec


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


class Job:
    """One job in its shapes, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps, self.turn = folder, 0, 0

    def run(self, kind: str, nodes: Sequence[DaemonProcess], steps: int = 3) -> list[dict]:
        """Trains on, one rank on each of `nodes`; checked against torch's checkpoint of the shape before."""
        options = {"kind": kind, "save": str(self.folder / f"dcp{self.turn + 1}")}
        if self.turn:
            options["load"] = str(self.folder / f"dcp{self.turn}")
        began, self.turn, self.steps = self.steps, self.turn + 1, self.steps + steps
        ranks = Ranks(Spec("", steps=self.steps, options=options), len(nodes), [node.address for node in nodes])
        codes = ranks.wait(120)
        self.said = ranks.errors()
        assert codes == [0] * len(nodes), (codes, self.said[-6000:])
        results = ranks.results()
        for each in results:
            assert each["began"] == began and each["sealed"] == [True, self.steps], self.said[-3000:]
            if began:
                assert each["unlike"] == [] and each["unlike groups"] == [] and each["compared"][0] > 3
        return results


def test_ddp_shrinks_and_grows(site, tmp_path):
    """4 → 3 with the fourth node lost, → 4 with a fresh one."""
    nodes = site.add(4)
    job = Job(tmp_path)
    four = job.run("ddp", nodes)
    vanish(nodes[3])
    three = job.run("ddp", nodes[:3])
    assert [each["from"] for each in three] == ["peers"] * 3
    assert [each["random"] for each in three] == [each["random at the end"] for each in four[:3]]
    assert [each["given"] for each in three] == [4 * 3 * 4] * 3, "the loader got the positions of all four ranks"
    again = job.run("ddp", [*nodes[:3], *site.add(1)])
    assert [each["random"] for each in again[:3]] == [each["random at the end"] for each in three]
    assert len({each["random"] for each in again}) == 4, "the new rank's generators are its own"
    assert "new ranks 3: random generators" in job.said and "state['lr'] was the same on all 3" in job.said


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        ("fsdp2", "fsdp2", (4, 2)),
        ("hsdp2x2", "hsdp1x2", (4, 2)),
        ("tp2xdp2", "tp1xdp4", (4, 4)),
        ("pp2", "pp1", (2, 1)),
    ],
)
def test_shards_are_cut_anew(site, tmp_path, before, after, ranks):
    """All nodes are there; ranks that are left out still give what they hold."""
    nodes = site.add(max(ranks))
    job = Job(tmp_path)
    job.run(before, nodes[: ranks[0]])
    assert {each["from"] for each in job.run(after, nodes[: ranks[1]])} == {"peers"}
