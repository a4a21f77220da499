"""Real runs of `torchrun --rdzv-backend=reft`: it is found, and restarts do not hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reft.cli.demo.cluster import free_port
from tests.support.daemons import purge_and_stop

SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
line = f"world {int(total)} restart {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n"
os.write(1, line.encode())  # one write, because the ranks share a pipe
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def torchrun(script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *flags, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REFT_RUNTIME_DIR": str(script.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


@pytest.mark.slow  # the second restart below, and that of forked workers, are quick cases
def test_workers_restart_under_the_reft_backend(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = [
        "--rdzv-backend=reft",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--local-addr=127.0.0.1",
        "--rdzv-conf=daemon=off,store_idle_exit=10",
        "--max-restarts=3",
    ]
    done = torchrun(script, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    # The second round must not read the values of the first round from the workers' store.
    assert [done.stdout.count(f"world 2 restart {count}") for count in (0, 1)] == [2, 2]


KILLING = """
import os, signal, time
from reft.errors import DaemonUnavailable
from reft.wire import daemon_launcher

if os.environ["RANK"] != "0":
    raise SystemExit
address = os.environ["REFT_DAEMON"]
first = daemon_launcher.hello(address).pid
os.kill(first, signal.SIGKILL)
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        if (second := daemon_launcher.hello(address).pid) != first:
            print("again", second)
            break
    except DaemonUnavailable:
        pass
"""


def test_a_killed_daemon_is_started_again_by_its_agent(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(KILLING)
    flags = ["--rdzv-backend=reft", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=store_idle_exit=10"]
    try:
        done = torchrun(script, "--local-addr=127.0.0.1", *flags)
        assert "again" in done.stdout, done.stderr[-3000:]
    finally:
        purge_and_stop(tmp_path / "daemon.sock")


def test_the_plug_in_loads_with_the_standard_library_alone():
    code = "import sys; import reft.elastic; sys.exit(any(name in sys.modules for name in ('torch', 'grpc', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


FAILING_TWICE = """
import os, signal, torch, reft
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    model = torch.nn.Linear(2, 2)
    torch.distributed.init_process_group("gloo")
    session = reft.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.distributed.barrier()
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            print('{"message": ', file=file, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
    if os.environ["RANK"] == "0":
        raise ValueError("of the user")
    torch.distributed.barrier()

main()
"""


def test_a_rank_that_is_ended_while_it_writes_its_error_file_is_restarted(tmp_path):
    """The next run fails by an exception, which the agent must still name."""
    script = tmp_path / "train.py"
    script.write_text(FAILING_TWICE)
    flags = ("--max-restarts=1", "--rdzv-backend=reft", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    try:
        done = torchrun(script, *flags, "--local-addr=127.0.0.1", "--rdzv-conf=store_idle_exit=10")
    finally:
        purge_and_stop(tmp_path / "daemon.sock")
    assert done.returncode == 1
    summary = done.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 0 " in summary and "/attempt_1/0/error.json" in summary, done.stderr[-3000:]
    assert "ValueError: of the user" in summary
