"""All slots, ranks and the daemon are gone: `status`, `recover` and attach say the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import ANY

import pytest
from click.testing import CliRunner

from reft.cli.main import main
from tests.support.daemons import DaemonProcess, until
from tests.support.trainers import Spec, Trainers

PURGE = "reft-cli purge job --yes, then start from your checkpoint"


def asked(daemon: DaemonProcess, *command: str) -> tuple[int, Any]:
    """Returns the exit code and the document of a command."""
    done = CliRunner().invoke(main, [*command, "--json"], env={"REFT_DAEMON": daemon.address}, catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        (["job/rank-*"], "no slots are left."),
        # The restarted daemon has another id, and stands at the address of the lost node.
        (["job/rank-*", "node-id"], "The memory of node test is gone"),
    ],
)
def test_total_loss_is_the_same_error_everywhere(removed: Sequence[str], said: str):
    daemon = DaemonProcess()
    try:
        killed = Trainers(Spec(daemon.address, options={"seal_at": [4, 5], "die_at": 5}), 2)
        assert -9 in killed.wait(), killed.errors()
        until(lambda: not any(rank.alive for rank in daemon.status("job").ranks), what="the trainers' end")
        assert asked(daemon, "status", "--check")[0] == 3
        daemon.kill()
        for pattern in removed:
            for path in daemon.folder.glob(pattern):
                path.unlink()
        daemon.start()
        code, document = asked(daemon, "status", "--check")
        (job,) = document["jobs"]
        assert (code, job["health"], job["whole_step"], job["remedy"]) == (4, "ERR", None, PURGE)
        assert not any(row["survives"] for row in job["survives"])
        assert said in job["reason"]
        code, recovery = asked(daemon, "recover", "job")
        assert (code, recovery["health"], recovery["reason"]) == (4, "ERR", job["reason"])
        assert recovery["remedy"] == PURGE and recovery["silent_nodes"] == []
        again = Trainers(Spec(daemon.address), 2)
        assert 1 in again.wait()
        assert f"RestoreError: {job['reason']}\nFix: {PURGE}" in again.errors()
        assert asked(daemon, "status", "--check")[0] == 4, "the refused attach has changed nothing"
        command, _, _ = job["remedy"].partition(", then")
        assert asked(daemon, *command.split()[1:])[0] == 0, "the remedy can be typed"
        assert asked(daemon, "status", "--check") == (0, {**document, "health": "OK", "jobs": [], "daemon": ANY})
    finally:
        daemon.close()
