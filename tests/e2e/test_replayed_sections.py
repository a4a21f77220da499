"""A lost node comes back at the newest whole step, by copies of an earlier one and gradients."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_recomputed_copies import WORLD, finish, start
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.recomputed_copies import MARKS

P, W = 3, 5  # protected, and whole
pytestmark = pytest.mark.timeout(300)  # a start of all ranks may take a minute where the cores are shared
# The host's torch computes with other instructions than the trainers' one, so it repeats no step.
# From step P + 1 on, no turn of the first attach can ask for bytes.
HOST = {"ATEN_CPU_CAPABILITY": "default", "REFT_FAILPOINTS": f"turn.ticket:drop:from={P + 1}:epoch=1"}


def lose_nodes(
    case: str, site: Site, folder: Path, world: int = WORLD, lost: Sequence[int] = (1,)
) -> list[DaemonProcess]:
    """Trains to step W, loses nodes, and returns the nodes with their replacements."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has one kind of instructions only")
    nodes = [site.add(1, "--node", f"node-{i}", environment=HOST)[0] for i in range(world)]
    ranks = start(nodes, folder, [case], "job", W, "aor", MARKS, P + 1)
    paused = [folder / f"{rank}.paused" for rank in range(world)]
    until(lambda: all(path.exists() for path in paused), 200, f"step {W} is whole")
    assert all("does not repeat the owner's optimizer" in path.read_text() for path in paused)
    for process in ranks:
        process.kill()
        process.join()
    for node in nodes:
        status = node.status("job")
        assert (status.whole, status.exchange.protected, status.exchange.replays[0].log) == (W, P, W)
    vanish(*(nodes[i] for i in lost))
    for i in lost:
        nodes[i] = site.add(1, "--node", f"node-{world + i}")[0]
    return nodes


def log_of(folder: Path) -> str:
    """Returns what rank 0 said."""
    return (folder / "0.log").read_text()


def check(results: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], case: str, step: int) -> None:
    for rank in range(len(plain)):
        assert (results[rank][case]["first"], results[rank][case]["restored"]) == (step, "peers")
        assert results[rank][case]["state"] == plain[rank][case]["state"]


CASES = ["adamw", *(pytest.param(each, marks=pytest.mark.chaos) for each in ("adam-l2", "sgd"))]


@pytest.mark.parametrize("case", CASES)
def test_a_lost_node_comes_back_at_the_newest_whole_step(case, site: Site, tmp_path):
    ranks = start(site.add(WORLD), tmp_path / "plain", [case], "plain")
    plain = finish(ranks, tmp_path / "plain")
    nodes = lose_nodes(case, site, tmp_path / "lost")
    check(finish(start(nodes, tmp_path / "again", [case], "job"), tmp_path / "again"), plain, case, W)
    assert f"at step {W} is replayed from copies of step {P} and the gradients since" in log_of(tmp_path / "again")


@pytest.mark.chaos
@pytest.mark.parametrize("lost", [(1, 2), (0, 3)])
def test_two_lost_nodes_of_six_come_back_at_the_newest_whole_step(lost, site: Site, tmp_path):
    world, case = 6, "adamw"
    plain = finish(start(site.add(world), tmp_path / "plain", [case], "plain"), tmp_path / "plain")
    nodes = lose_nodes(case, site, tmp_path / "lost", world, lost)
    check(finish(start(nodes, tmp_path / "again", [case], "job"), tmp_path / "again"), plain, case, W)
    assert f"at step {W} is replayed from copies of step {P} and the gradients since" in log_of(tmp_path / "again")


@pytest.mark.chaos
def test_a_replay_that_differs_is_refused_and_the_protected_step_taken(site: Site, tmp_path):
    case = "adamw"
    plain = finish(start(site.add(WORLD), tmp_path / "plain", [case], "plain"), tmp_path / "plain")
    nodes = lose_nodes(case, site, tmp_path / "lost")
    wrong = "replay.update:drop:after=1:times=1"
    again = start(nodes, tmp_path / "again", [case], "job", 0, "aor", MARKS, 99, wrong)
    check(finish(again, tmp_path / "again"), plain, case, P)
    log = log_of(tmp_path / "again")
    assert f"step {W} (epoch 1) can't be replayed: the recomputed state of rank 1 differs from the owner's" in log


@pytest.mark.chaos
def test_a_second_failure_before_a_step_is_whole_replays_once_more(site: Site, tmp_path):
    """All trainers end before they have saved what the lost rank has replayed."""
    case = "sgd"
    plain = finish(start(site.add(WORLD), tmp_path / "plain", [case], "plain"), tmp_path / "plain")
    nodes = lose_nodes(case, site, tmp_path / "lost")
    for process in start(nodes, tmp_path / "killed", [case], "job", 0, "aor", MARKS, 99, "snapshot.begin:kill"):
        process.join(200)
        assert process.exitcode == -signal.SIGKILL
    assert "is replayed from copies" in log_of(tmp_path / "killed")
    check(finish(start(nodes, tmp_path / "again", [case], "job"), tmp_path / "again"), plain, case, W)


@pytest.mark.chaos
def test_a_smaller_job_gets_what_the_lost_rank_had(site: Site, tmp_path):
    """Nobody restarts the lost rank: the one that is left replays the part, and takes it."""
    case = "adam-l2"
    plain = finish(start(site.add(WORLD), tmp_path / "plain", [case], "plain", 0, "aor", W), tmp_path / "plain")
    nodes = lose_nodes(case, site, tmp_path / "lost")
    ranks = start(nodes[:1], tmp_path / "again", [case], "job", 0, "aor", W)
    (result,) = finish(ranks, tmp_path / "again")
    assert (result[case]["first"], result[case]["restored"]) == (W, "peers")
    assert result[case]["moments"] == {**plain[0][case]["moments"], **plain[1][case]["moments"]}
    assert "is replayed from copies" in log_of(tmp_path / "again")
