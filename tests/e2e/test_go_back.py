"""`reft-cli recover --step`: a job goes on from an older step on purpose.

No node and no storage brings the newer steps back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reft.cli.main import main
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.stored import persist
from tests.support.trainers import Spec, Trainers, run

STEPS, EVERY = 25, 5


def trained(nodes: Sequence[DaemonProcess], storage: Path | None = None) -> None:
    """Trains to step 24. Memory has steps 10, 15 and 20; storage has 5 and 10."""
    options = {"every": EVERY, "slots": 3, "seal_at": [5, 10, 15, 20], "pause_at": [5, 10, 24]}
    addresses = [node.address for node in nodes]
    job = Trainers(Spec(addresses[0], steps=STEPS, options=options), len(nodes), addresses)
    for at in (5, 10):
        job.wait_for(at)
        if storage is not None:
            persist(storage, nodes)
        job.let_go(at)
    job.wait_for(24)
    job.kill()
    until(lambda: not any(rank.alive for node in nodes for rank in node.status("job").ranks), what="the trainers' end")


def recover(node: DaemonProcess, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["recover", "job", *arguments, "--daemon", node.address], catch_exceptions=False)


def check_goes_on(nodes: Sequence[DaemonProcess], step: int, source: str, plain: DaemonProcess) -> None:
    """Trains to the end; every bit is that of an undisturbed run."""
    options = {"every": EVERY, "slots": 3}
    addresses = [node.address for node in nodes]
    results = run(Spec(addresses[0], steps=STEPS, options=options), len(nodes), addresses)
    expected = run(
        Spec(plain.address, job="plain", steps=STEPS, options=options), len(nodes), [plain.address] * len(nodes)
    )
    assert [(each["began"], each["from"]) for each in results] == [(step, source)] * len(nodes)
    for one, other in zip(results, expected, strict=True):
        assert one["digests"] == other["digests"] and one["random"] == other["random"]
        assert one["losses"] == other["losses"][step:]


def test_goes_back_in_memory(site: Site) -> None:
    nodes = site.add(2)
    trained(nodes)
    shown = recover(nodes[0], "--step", "10")
    assert shown.exit_code == 0, shown.stderr
    assert "Nothing was changed" in shown.output and "newer step" in shown.output
    assert json.loads(recover(nodes[0], "--step", "10", "--json").stdout)["done"] is False
    refused = recover(nodes[0], "--step", "7", "--yes")
    assert (
        refused.exit_code == 1
        and "step 7 of job job can't be restored. Memory has the steps 20, 15, 10" in refused.stderr
    )
    result = json.loads(recover(nodes[0], "--step", "10", "--yes", "--json").stdout)
    assert result["done"] and result["step"] == 10 and len(result["nodes"]) == 2 and result["given_up"] == [20, 15]
    check_goes_on(nodes, 10, "memory", site.add(1)[0])


@pytest.mark.parametrize("has_memory", [True, False])
def test_goes_back_to_a_checkpoint(site: Site, tmp_path: Path, has_memory: bool) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    nodes = site.add(2, "--persist", str(storage))
    trained(nodes, storage)
    if not has_memory:
        vanish(*nodes)
        nodes = site.add(2, "--persist", str(storage))
    result = json.loads(recover(nodes[0], "--step", "5", "--yes", "--json").stdout)
    assert result["done"] and result["on_storage"] and not result["in_memory"]
    check_goes_on(nodes, 5, "storage", site.add(1)[0])


def test_memory_that_is_lost_afterwards_does_not_bring_newer_checkpoints_back(site: Site, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    nodes = site.add(1, "--persist", str(storage))
    trained(nodes, storage)
    assert recover(nodes[0], "--step", "5", "--yes").exit_code == 0
    vanish(*nodes)
    nodes = site.add(1, "--persist", str(storage))
    check_goes_on(nodes, 5, "storage", site.add(1)[0])


def test_node_that_was_away_does_not_bring_newer_steps_back(site: Site, tmp_path: Path) -> None:
    """It has the older decision and newer slots, and answers again before the next start."""
    storage = tmp_path / "storage"
    storage.mkdir()
    nodes = site.add(2, "--persist", str(storage))
    trained(nodes, storage)
    nodes[1].kill()
    done = recover(nodes[0], "--step", "5", "--yes", "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["nodes"]) == 1
    nodes[1].start()
    check_goes_on(nodes, 5, "storage", site.add(1)[0])


def test_running_job_is_refused(site: Site) -> None:
    (node,) = site.add(1)
    job = Trainers(Spec(node.address, steps=STEPS, options={"pause_at": [11], "seal_at": [10]}))
    job.wait_for(11)
    refused = recover(node, "--step", "10", "--yes")
    assert refused.exit_code == 1 and "living trainer" in refused.stderr
    job.kill()
