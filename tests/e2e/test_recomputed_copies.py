"""protect="aor": copies of torch's ZeRO are recomputed from gradients, and proved."""

from __future__ import annotations

import json
import multiprocessing.process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reft.cli.demo.cluster import free_port
from tests.support import trainers
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.recomputed_copies import CASES, MARKS, work

WORLD = 2
pytestmark = pytest.mark.timeout(300)  # a start of all ranks may take a minute where the cores are shared


def start(nodes: Sequence[DaemonProcess], out: Path, *settings: Any) -> list[multiprocessing.process.BaseProcess]:
    """Starts a rank on each node."""
    port, processes = free_port(), []
    out.mkdir()
    for rank, node in enumerate(nodes):
        arguments = (rank, WORLD, port, node.address, str(out), *settings)
        processes.append(trainers.FORKS.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
    return processes


def finish(processes: Sequence[multiprocessing.process.BaseProcess], out: Path) -> list[dict[str, Any]]:
    """Returns what each rank has written."""
    for process in processes:
        process.join(200)
        process.kill()
    results = [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]
    assert not [result["error"] for result in results if "error" in result], results
    return results


def test_copies_of_torchs_zero_are_recomputed_and_proved(site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    results = finish(start(nodes, tmp_path / "run"), tmp_path / "run")
    for name in CASES:
        for rank, node in enumerate(nodes):
            first, *others = results[rank][name]["turns"]
            assert first and others == [""] * (MARKS - 1), (name, results)
            (replay,) = node.status(name).exchange.replays
            assert (replay.reason, replay.verified, replay.lag, replay.marks) == ("", MARKS, 0, 1)
            assert replay.cpu_s > 0


@pytest.mark.parametrize("case", CASES)
def test_a_lost_node_comes_back_from_recomputed_copies(case, site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    plain = finish(start(nodes, tmp_path / "plain", [case], "plain"), tmp_path / "plain")
    ranks = start(nodes, tmp_path / "lost", [case], "job", 4)
    paused = [tmp_path / "lost" / f"{rank}.paused" for rank in range(WORLD)]
    until(lambda: all(path.exists() for path in paused), 200, "step 4 is protected")
    assert [path.read_text() for path in paused] == [""] * WORLD, "the copies of step 4 were recomputed"
    for process in ranks:
        process.kill()
        process.join()
    vanish(nodes[1])
    nodes[1] = site.add(1, "--node", "node-2")[0]
    results = finish(start(nodes, tmp_path / "again", [case], "job"), tmp_path / "again")
    for rank in range(WORLD):
        assert results[rank][case]["restored"] == "peers" and len(results[rank][case]["turns"]) == MARKS - 4
        assert results[rank][case]["state"] == plain[rank][case]["state"]
