"""`reft-cli recover` runs between the loss of a node and the restart.

The job goes on from the rebuilt slots like from the lost ones.
"""

from __future__ import annotations

import json
import shutil

from click.testing import CliRunner

from reft.cli.main import main
from tests.support.daemons import DaemonProcess
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

WORLD = 3
OPTIONS = {"seal_at": [4, 5, 6], "width": 96}


def test_a_job_goes_on_from_rebuilt_slots():
    daemons = [DaemonProcess("--node", name, "--listen", "127.0.0.1:0") for name in ("n0", "n1", "n2", "spare")]
    *nodes, spare = daemons
    try:
        addresses = [daemon.address for daemon in nodes]
        plain = run(Spec(spare.address, job="plain", options=OPTIONS), WORLD)
        killed_trainers = Trainers(Spec(addresses[0], options={**OPTIONS, "die_at": 6}), WORLD, addresses)
        assert killed_trainers.wait().count(-9) >= 1, killed_trainers.errors()
        nodes[1].kill()
        shutil.rmtree(nodes[1].folder)
        command = ["recover", "job", "--yes", "--json", "--onto", f"n1={spare.address}"]
        done = CliRunner().invoke(main, command, env={"REFT_DAEMON": addresses[2]}, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        (rebuilt,) = json.loads(done.stdout)["rebuilt"]
        assert (rebuilt["ranks"], rebuilt["step"]) == ([1], 6)
        restored_results = run(Spec(addresses[0], options=OPTIONS), WORLD, [addresses[0], spare.address, addresses[2]])
        assert [(each["began"], each["from"]) for each in restored_results] == [(6, "memory")] * WORLD
        assert_equal(restored_results, plain)
    finally:
        for daemon in daemons:
            daemon.close()
