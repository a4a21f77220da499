"""protect="aor": nodes keep copies of what torch's ZeRO holds on one rank; the mover brings them.

The ranks of a job train on nodes that are daemons on loopback. Nodes are lost in the middle of a
copy, with their memory, and new ones take their places.
"""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest
from click.testing import CliRunner

from reft.cli.demo.records import compare
from reft.cli.main import main
from tests.e2e.test_example_losses import DEADLINE_S, Example, Run
from tests.support.daemons import Site, until, vanish

pytestmark = pytest.mark.timeout(900)  # a start of all ranks may take a minute where the cores are shared


@pytest.mark.parametrize(
    ("tolerate", "lost"), [(1, [1]), pytest.param(2, [0, 2], marks=pytest.mark.slow)], ids=["one", "two of three"]
)
def test_lost_nodes_take_a_job_of_torchs_zero_back_to_the_protected_step(tolerate, lost, plain, site: Site, tmp_path):
    example = Example("zero1", 3, 1, True, steps=24)
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(example.nodes)]
    run = Run(example, tmp_path / "aor", nodes, REFT_PROTECT="aor", REFT_TOLERATE=str(tolerate))
    ranks = run.start("snapshot.chunk:stop:rank=1:from=12", 3, 11)
    victim = psutil.Process(ranks.processes[1].pid)
    until(lambda: victim.status() == psutil.STATUS_STOPPED, DEADLINE_S, "a stop in a copy from step 12 on")
    until(run.note_protected, DEADLINE_S, "a protected step")
    status = CliRunner().invoke(main, ["status", "--json"], env={"REFT_DAEMON": nodes[0].address})
    groups = json.loads(status.stdout)["jobs"][0]["protection"]["groups"]
    assert [each["parity_shards"] for each in groups if each["scheme"] == "aor"] == [tolerate]
    for rank in {*lost, 1}:
        os.kill(ranks.processes[rank].pid, signal.SIGKILL)
    for process in ranks.processes:
        process.terminate()
        process.join(60)
    vanish(*(run.nodes[node] for node in lost))
    for node in lost:
        run.nodes[node] = site.add(1, "--node", f"node-{node + 3}")[0]
    result = run.finish(run.start())
    bases = {attempts[1].base for attempts in result.attempts.values()}
    assert len(bases) == 1 and min(bases) >= run.protected >= 1, (bases, run.protected)
    assert compare(result, plain(example), example.steps).differences == []
