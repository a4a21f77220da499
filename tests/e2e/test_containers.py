"""One daemon serves all containers of a node, as in a DaemonSet with hostPID.

The daemon sees trainers and agents under other pids than they see themselves. A container shares
the folder of the sockets with the daemon. It has its own process numbers, /proc and /dev/shm.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reft.errors import AttachError
from reft.wire import local_socket
from tests.e2e.test_examples import killed, losses, restored, run
from tests.support.daemons import ROOT, DaemonProcess, until

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc",
             "sh", "-c", 'mount -t tmpfs -o size=64m shm /dev/shm && exec "$@"', "init"]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "tests.support.agent", "--nproc-per-node=2", "--rdzv-id=ddp", "--rdzv-backend=reft",
            "--local-addr=127.0.0.1"]  # fmt: skip
ATTACHES = """
import reft, sys, torch
model = torch.nn.Linear(4, 4)
reft.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
print("attached", flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(
    subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0, reason="namespaces can't be made here"
)


def start_attaching(daemon: DaemonProcess, job: str = "one") -> subprocess.Popen[str]:
    """Starts a container whose trainer attaches, prints that, and runs until its input ends.

    The trainer is not the container's init process: init ignores SIGKILL.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REFT_DAEMON": daemon.address, "REFT_JOB": job}
    return subprocess.Popen(
        [*CONTAINER, "sh", "-c", f"{sys.executable} -c '{ATTACHES}'; exit $?"], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def trainer_in(container: subprocess.Popen[str]) -> int:
    """Returns the pid of a container's trainer as this test and the daemon see it."""
    (init,) = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    (trainer,) = Path(f"/proc/{init}/task/{init}/children").read_text().split()
    return int(trainer)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_survives_a_killed_rank_and_a_replaced_container(daemon):
    plain = run(daemon, *TORCHRUN, REFT_JOB="plain")
    assert plain.returncode == 0, plain.stderr
    rank_killed = killed(daemon, "once", 1, *CONTAINER, *TORCHRUN, "--max-restarts=2")
    assert rank_killed.returncode == 0, rank_killed.stderr
    assert restored(rank_killed) >= 1
    assert losses(rank_killed) == losses(plain)

    container_killed = killed(daemon, "gone", 1, *CONTAINER, *TORCHRUN, "--max-restarts=0")
    assert container_killed.returncode != 0 and losses(container_killed) == []
    after = run(daemon, *CONTAINER, *TORCHRUN, REFT_JOB="gone")
    assert after.returncode == 0, after.stderr
    assert restored(after) >= 1
    assert losses(after) == losses(plain)


def test_the_daemon_knows_trainers_by_its_own_pids_and_sees_them_die(daemon):
    first = start_attaching(daemon)
    assert first.stdout.readline() == "attached\n", first.communicate()
    pid = trainer_in(first)
    assert [each.pid for each in daemon.status("one").ranks] == [pid]
    second = start_attaching(daemon)  # the same pid in its own container, another trainer
    _, errors = second.communicate(timeout=200)
    assert second.returncode == 1 and f"is trained by process {pid}, which lives" in errors, errors
    first.kill()
    first.communicate()
    until(lambda: not daemon.status("one").ranks[0].alive, what="the trainer's death to be known")


def test_a_daemon_that_cannot_see_its_trainers_names_the_remedy(tmp_path):
    socket = tmp_path / "d.sock"
    command = [*CONTAINER, sys.executable, "-m", "reft_daemon", "--socket", str(socket), "--dir", str(tmp_path / "s")]
    packages = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    daemon = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": packages}, stderr=subprocess.DEVNULL)
    try:
        path = tmp_path / "d.sock.ln"
        until(path.exists, what="the daemon's start")
        with pytest.raises(AttachError, match=r"(?s)does not see.*hostPID"):
            local_socket.introduce(str(path), 10)
        inside = subprocess.run(
            ["nsenter", f"--pid=/proc/{daemon.pid}/ns/pid_for_children", "--", sys.executable, "-c",
             f"from reft.wire import local_socket as s; print(s.introduce({str(path)!r}, 10).process.pid > 1)"],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": packages},
        )  # fmt: skip
        assert inside.stdout == "True\n", inside.stderr
    finally:
        daemon.kill()
        daemon.wait()
