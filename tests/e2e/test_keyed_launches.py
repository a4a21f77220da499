"""A job key where reft's agents do not run: torchrun's own rendezvous, and Slurm's srun.

The commands are those of reft/elastic/README.md. Two nodes are two daemons on this machine. A rank
is killed, the job is started again, and the result equals an undisturbed run bit for bit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from reft.cli.demo.cluster import free_port
from reft.cli.demo.records import TrainingResult, read_result
from reft.wire.job_key import JobKey
from reft.wire.v1 import daemon_pb2 as pb
from tests.support import elastic_train
from tests.support.commands import Reader
from tests.support.daemons import DaemonProcess, until

KEY = "the key of this job, which nobody else may see"
TRAIN = """
import sys
from tests.support import elastic_train
sys.argv += ["--out", "out", "--steps", "100000", "--pause", "0.1"]
elastic_train.main()
"""
# Stands for Slurm's command: a process on each node; one that fails ends the others.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
number=0
for daemon in $DAEMONS; do
    SLURM_PROCID=$number SLURM_LOCALID=0 SLURM_NTASKS=2 REFT_DAEMON=$daemon "$@" &
    number=$((number + 1))
done
wait -n || { code=$?; kill $(jobs -p); }
wait
exit ${code:-0}
"""
pytestmark = pytest.mark.timeout(400)


class KeyedNodes:
    """Two nodes, and the reader of a page who starts a job there.

    Args:
        folder: where the reader types.
        daemons: of the nodes.
        job: name of the job.
    """

    def __init__(self, folder: Path, daemons: list[DaemonProcess], job: str) -> None:
        self.reader = Reader(folder, {"storehost:29400": f"127.0.0.1:{free_port()}", "29500": str(free_port())})
        self.daemons, self.job, self.out = daemons, job, folder / "out"
        self.out.mkdir()
        (folder / "train.py").write_text(TRAIN)
        (folder / "job.key").write_text(KEY)
        (folder / "job.key").chmod(0o600)
        self._typed: list[Popen[str]] = []

    def type(self, command: str, **variables: str) -> Popen[str]:
        process = self.reader.start(command, **variables)
        self._typed.append(process)
        return process

    def result(self) -> TrainingResult:
        return read_result(self.out, 2)

    def await_whole(self, counter: int) -> None:
        """Waits until a step of this attach, or of a later one, is whole on both nodes."""

        def is_whole() -> bool:
            statuses = [daemon.call("Status", pb.StatusRequest()).jobs for daemon in self.daemons]
            return all(jobs and jobs[0].epoch.counter >= counter and jobs[0].whole > 0 for jobs in statuses)

        until(is_whole, 200, f"a whole step of attach {counter}")

    def kill_rank(self) -> None:
        """Ends rank 1 as the kernel would if memory is short."""
        psutil.Process(self.result().attempts[1][-1].pid).send_signal(signal.SIGKILL)

    def output(self, process: Popen[str], code: int = 0) -> str:
        """Returns what a command has printed, once it has ended."""
        output, _ = process.communicate(timeout=200)
        assert process.returncode == code, output
        return output

    def check(self, output: str) -> None:
        """Fails unless the job was restored, equals an undisturbed run, and kept its secrets."""
        result, key = self.result(), JobKey(KEY.encode())
        elastic_train.check(result)
        for attempts in result.attempts.values():
            assert [attempt.restored_from for attempt in attempts] == [None, "memory"]
        shown = output.encode()
        for daemon in self.daemons:
            assert daemon.call("Inventory", pb.InventoryRequest(job=self.job)).manifest.token == key.job_token(self.job)
            shown += daemon.log.read_bytes() + daemon.status(self.job).SerializeToString()
        secrets = (KEY.encode(), key.job_token(self.job), key.job_token(self.job).hex().encode())
        assert not any(secret in shown for secret in secrets)

    def close(self) -> None:
        for process in self._typed:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
                child.kill()
            process.kill()
            process.communicate()


@pytest.fixture
def make(tmp_path) -> Iterator[Callable[[str], KeyedNodes]]:
    with ExitStack() as stack:

        def nodes(job: str) -> KeyedNodes:
            daemons = [stack.enter_context(closing(DaemonProcess("--listen", "127.0.0.1:0"))) for _ in range(2)]
            return stack.enter_context(closing(KeyedNodes(tmp_path, daemons, job)))

        yield nodes


@pytest.mark.parametrize(
    "command",
    [
        "REFT_JOB_KEY_FILE=$PWD/job.key TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --max-restarts=3 "
        "--rdzv-backend=c10d --rdzv-endpoint=storehost:29400 --rdzv-id=run1 train.py"
    ],
)
def test_torchruns_own_rendezvous_with_a_job_key(command, make):
    nodes = make("run1")
    agents = [nodes.type(command, REFT_DAEMON=daemon.address) for daemon in nodes.daemons]
    nodes.await_whole(1)
    nodes.kill_rank()
    nodes.await_whole(2)
    (nodes.out / "done").touch()
    nodes.check("".join(map(nodes.output, agents)))


@pytest.mark.parametrize(
    "commands",
    [
        (
            "export MASTER_ADDR=$SLURMD_NODENAME MASTER_PORT=29500 REFT_JOB_KEY_FILE=$PWD/job.key",
            "srun --kill-on-bad-exit=1 bash -c "
            "'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec python train.py'",
        )
    ],
)
def test_ranks_of_slurm_with_a_job_key(commands, make):
    nodes = make("slurm-77")
    folder = nodes.reader.folder
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    environment = {
        "PATH": f"{folder}:{nodes.reader.environment['PATH']}", "SLURM_JOB_ID": "77", "SLURMD_NODENAME": "127.0.0.1",
        "DAEMONS": " ".join(daemon.address for daemon in nodes.daemons),
    }  # fmt: skip
    first = nodes.type("\n".join(commands), **environment)
    nodes.await_whole(1)
    nodes.kill_rank()
    output = nodes.output(first, code=137)
    second = nodes.type("\n".join(commands), **environment)
    nodes.await_whole(2)
    (nodes.out / "done").touch()
    nodes.check(output + nodes.output(second))
