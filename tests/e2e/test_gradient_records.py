"""protect="aor": each rank records the gradients of the ranks that its node copies, bit for bit."""

from __future__ import annotations

import json

import pytest

from reft.cli.demo.cluster import free_port
from reft.core.commit.gradient_records import RECORD_SLOTS_MAX, record_slots
from tests.support import trainers
from tests.support.daemons import Site
from tests.support.recorded_gradients import CASES, MARKS, work

WORLD = 2
pytestmark = pytest.mark.timeout(300)  # a start of all ranks may take a minute where the cores are shared


def test_gradients_of_torchs_zero_are_recorded_bit_for_bit(site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    port, processes = free_port(), []
    for rank in range(WORLD):
        arguments = (rank, WORLD, port, nodes[rank].address, str(tmp_path))
        processes.append(trainers.FORKS.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(200)
        process.kill()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    assert not [result["error"] for result in results if "error" in result], results
    for name, case in CASES.items():
        count = record_slots(case.get("every", 1))
        for rank, result in enumerate(each[name] for each in results):
            assert result["differs"] == [] and result["both"] == [] and result["owned"], (name, result)
            counts = [count, min(2 * count, RECORD_SLOTS_MAX)]  # nothing waits for turns here: they may be late
            assert result["slots"] in [sorted(f"record-{rank}.slot-{i}" for i in range(each)) for each in counts]
            stats = result["stats"]
            assert stats["records"] == len(result["records"]) >= min(count, MARKS), (name, stats)
            assert stats["records"] + stats["records_torn"] + stats["records_missed"] == MARKS
