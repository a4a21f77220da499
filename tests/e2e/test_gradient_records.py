"""protect="aor": each rank records the gradients of the ranks that its node copies, bit for bit."""

from __future__ import annotations

import pytest

from reft.core.commit.gradient_records import RECORD_SLOTS_MAX, record_slots
from tests.support.daemons import Site
from tests.support.recorded_gradients import CASES, MARKS, RecordingRanks
from tests.support.trainers import Spec

WORLD = 2
DEADLINE_S = 300.0
pytestmark = pytest.mark.timeout(400)  # a start of all ranks may take a minute where the cores are shared


def test_gradients_of_torchs_zero_are_recorded_bit_for_bit(site: Site):
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    ranks = RecordingRanks(Spec(""), WORLD, [node.address for node in nodes])
    assert ranks.wait(DEADLINE_S) == [0] * WORLD, ranks.errors()[-6000:]
    results = ranks.results()
    for name, case in CASES.items():
        count = record_slots(case.get("every", 1))
        for rank, result in enumerate(each[name] for each in results):
            assert result["differs"] == [] and result["both"] == [] and result["owned"], (name, result)
            counts = [count, min(2 * count, RECORD_SLOTS_MAX)]  # nothing waits for turns here: they may be late
            assert result["slots"] in [sorted(f"record-{rank}.slot-{i}" for i in range(each)) for each in counts]
            stats = result["stats"]
            assert stats["records"] == len(result["records"]) >= min(count, MARKS), (name, stats)
            assert stats["records"] + stats["records_torn"] + stats["records_missed"] == MARKS
