"""protect="aor": copies of torch's ZeRO are recomputed from gradients, and proved."""

from __future__ import annotations

import json

import pytest

from reft.cli.demo.cluster import free_port
from tests.support import trainers
from tests.support.daemons import Site
from tests.support.recomputed_copies import CASES, MARKS, work

WORLD = 2
pytestmark = pytest.mark.timeout(300)  # a start of all ranks may take a minute where the cores are shared


def test_copies_of_torchs_zero_are_recomputed_and_proved(site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    port, processes = free_port(), []
    for rank in range(WORLD):
        arguments = (rank, WORLD, port, nodes[rank].address, str(tmp_path))
        processes.append(trainers.FORKS.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(250)
        process.kill()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    assert not [result["error"] for result in results if "error" in result], results
    for name in CASES:
        for rank, node in enumerate(nodes):
            first, *others = results[rank][name]["turns"]
            assert first and others == [""] * (MARKS - 1), (name, results)
            (replay,) = node.status(name).exchange.replays
            assert (replay.reason, replay.verified, replay.lag, replay.marks) == ("", MARKS, 0, 1)
            assert replay.cpu_s > 0
