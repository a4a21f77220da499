"""The examples run as they stand, and go on where a killed run ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.daemons import ROOT, DaemonProcess

STEPS = ["--steps", "100"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2", "--rdzv-id=ddp",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]  # fmt: skip


def run(daemon: DaemonProcess, *command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {
        **os.environ, "PYTHONPATH": path, "REFT_DAEMON": daemon.address, "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", **changes,
    }  # fmt: skip
    example = str(ROOT / "examples/ddp.py")
    return subprocess.run([*command, example, *STEPS], capture_output=True, text=True, env=environment, timeout=100)


def losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def restored(done: subprocess.CompletedProcess[str]) -> int:
    """The step that was restored: the last that was snapshotted, for these steps are faster than the round."""
    return int(re.search(r"restored step (\d+) \(epoch 1\) from memory", done.stderr)[1])


@pytest.mark.slow
def test_one_process_goes_on_where_it_was_killed(daemon):
    plain = run(daemon, sys.executable, REFT_JOB="plain")
    assert plain.returncode == 0, plain.stderr
    assert len(losses(plain)) == 2
    killed = run(daemon, sys.executable, REFT_JOB="mine", REFT_FAILPOINTS="snapshot.chunk:kill:from=60")
    assert (killed.returncode, losses(killed)) == (-9, losses(plain)[:1])
    after = run(daemon, sys.executable, REFT_JOB="mine")
    assert 50 < restored(after) < 100
    assert losses(after) == losses(plain)[1:]


@pytest.mark.timeout(200)
def test_torchrun_restarts_a_killed_rank(daemon):
    done = run(daemon, *TORCHRUN, REFT_FAILPOINTS="snapshot.chunk:kill:from=60:rank=1:epoch=1")
    assert done.returncode == 0, done.stderr
    assert 0 < restored(done) < 100  # steps take milliseconds here: the round may be tens of them behind
    assert len(set(losses(done))) == 2, "step 50, perhaps again and then with the loss that it had, and step 100"
