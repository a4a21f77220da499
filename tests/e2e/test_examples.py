"""The examples run unchanged, and a restarted example goes on where it was killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil
import pytest

from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import ROOT, DaemonProcess, until

DDP = (f"{ROOT}/examples/ddp.py", "--steps", "100")
RANKS = ["--nproc-per-node=2", "--max-restarts=2", "--rdzv-id=ddp", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
         "--local-addr=127.0.0.1"]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", *RANKS]
FORKED = [
    sys.executable,
    "-m",
    "tests.support.agent",
    *RANKS,
]  # the same losses; torch is imported once for all workers


# These steps take a millisecond; on busy cores the round takes longer than all of them. So the copy
# stops, and the test waits for the round.
STOP_IN_COPY = "snapshot.chunk:stop:from=2:epoch=1"


def started(daemon: DaemonProcess, *command: str, script: Sequence[str] = DDP, **changes: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {
        **os.environ, "PYTHONPATH": path, "REFT_DAEMON": daemon.address, "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", **changes,
    }  # fmt: skip
    return subprocess.Popen(
        [*command, *script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    with process:
        try:
            output, errors = process.communicate(timeout=250)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(
    daemon: DaemonProcess, *command: str, script: Sequence[str] = DDP, **changes: str
) -> subprocess.CompletedProcess[str]:
    return ended(started(daemon, *command, script=script, **changes))


def killed(daemon: DaemonProcess, job: str, rank: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Starts a run and kills `rank` in the middle of a copy. The step before is whole by then."""
    process = started(daemon, *command, REFT_JOB=job, REFT_FAILPOINTS=f"{STOP_IN_COPY}:rank={rank}")

    def victim() -> int | None:
        jobs = [status for status in daemon.call("Status", pb.StatusRequest()).jobs if status.job == job]
        ranks = [each for status in jobs if status.whole >= 1 for each in status.ranks if each.rank == rank]
        pids = [each.pid for each in ranks if psutil.Process(each.pid).status() == psutil.STATUS_STOPPED]
        return pids[0] if pids else None

    try:
        os.kill(until(victim, 120, f"that rank {rank} of {job} stands still"), signal.SIGKILL)
    except BaseException:
        process.kill()
        raise
    return ended(process)


def losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def restored(done: subprocess.CompletedProcess[str]) -> int:
    """Returns the step that was restored."""
    match = re.search(r"restored step (\d+) \(epoch 1\) from memory", done.stderr)
    assert match, done.stderr
    return int(match[1])


@pytest.mark.slow
def test_one_process_goes_on_where_it_was_killed(daemon):
    plain = run(daemon, sys.executable, REFT_JOB="plain")
    assert plain.returncode == 0, plain.stderr
    assert len(losses(plain)) == 2
    before = killed(daemon, "mine", 0, sys.executable)
    assert (before.returncode, losses(before)) == (-signal.SIGKILL, [])
    after = run(daemon, sys.executable, REFT_JOB="mine")
    assert restored(after) >= 1
    assert losses(after) == losses(plain)


@pytest.mark.timeout(400)
def test_torchrun_restarts_a_killed_rank(daemon):
    plain = run(daemon, *FORKED, REFT_JOB="plain")
    assert plain.returncode == 0, plain.stderr
    done = killed(daemon, "killed", 1, *TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert restored(done) >= 1
    assert losses(done) == losses(plain)


@pytest.mark.timeout(400)
def test_the_quickstart_goes_on_with_other_numbers_of_ranks(daemon):
    """Values that differed by rank would refuse it, and users begin with this script."""
    one = [*TORCHRUN, "--nproc-per-node=1"]  # not forked: DataLoader's workers don't start there
    for epochs, command in enumerate((TORCHRUN, one, TORCHRUN), 1):
        short = (f"{ROOT}/examples/quickstart.py", "--epochs", str(epochs), "--chars", "20000")
        done = run(daemon, *command, script=short, REFT_JOB="elastic")
        assert done.returncode == 0, done.stderr
        assert ("restored step" in done.stderr) is (epochs > 1), done.stderr
        assert f"\nepoch {epochs - 1} " in f"\n{done.stdout}"
