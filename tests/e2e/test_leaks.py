"""Snapshots, and restarts after kills, leak nothing: `make soak` has 300 and 20 of them.

Memory, files, descriptors and threads stay where they were.
"""

from __future__ import annotations

import psutil
import pytest

from tests.support.daemons import DaemonProcess, until
from tests.support.trainers import Spec, Trainers, run

SLACK_BYTES = 4 << 20  # an allocator's noise; one leaked snapshot of this model is larger
# Gradients and temporaries come and go in blocks of 2.5 MB. A leak of 1 % in each of 300 snapshots
# is 24 MB.
TRAINER_SLACK_BYTES = 16 << 20
# gRPC keeps up to 3 MB for each rank that has read the head of its slot, until a later call. A leak
# of 1 MB a restart is 15 MB.
DAEMON_SLACK_BYTES = 12 << 20
WIDE = {"width": 800}  # 8 MB of state


def usage_of(pid: int) -> dict[str, int]:
    """Returns a process's private memory, files and threads; slots are shared memory."""
    process = psutil.Process(pid)
    return {"memory": process.memory_full_info().uss, "files": process.num_fds(), "threads": process.num_threads()}


def assert_flat(before: dict[str, int], after: dict[str, int], process_name: str, slack: int = SLACK_BYTES) -> None:
    # A connection to the daemon has three descriptors there, and one may just be ending.
    assert after["files"] <= before["files"] + 5, (process_name, before, after)
    assert after["threads"] <= before["threads"] + 2, (process_name, before, after)
    assert after["memory"] <= before["memory"] + slack, (process_name, before, after)


@pytest.mark.parametrize("steps", [220, pytest.param(640, marks=pytest.mark.soak)])
def test_snapshots_leak_nothing(daemon: DaemonProcess, steps: int):
    # On a busy machine the round is slower than these steps, so every second step and each pause is
    # sealed. A leak shows at all of the last pauses; memory that malloc keeps does not.
    pauses = [30, *range(steps - 35, steps, 10)]
    options = {**WIDE, "pause_at": pauses, "seal_at": [*range(2, steps, 2), *pauses]}
    trainers = Trainers(Spec(daemon.address, steps=steps, options=options))
    pids = {"trainer": trainers.processes[0].pid, "daemon": daemon.process.pid}
    usages, files = [], []
    for step in pauses:
        trainers.wait_for(step)
        usages.append({process_name: usage_of(pid) for process_name, pid in pids.items()})
        files.append(sorted(daemon.folder.rglob("*")))
        trainers.let_go(step)
    for process_name in pids:
        after = min((each[process_name] for each in usages[1:]), key=lambda each: each["memory"])
        assert_flat(
            usages[0][process_name],
            after,
            process_name,
            TRAINER_SLACK_BYTES if process_name == "trainer" else SLACK_BYTES,
        )
    assert files == files[:1] * len(pauses)
    assert trainers.wait() == [0]
    assert trainers.results()[0]["stats"]["snapshots"] >= steps // 2 - 20


@pytest.mark.parametrize("restarts", [10, pytest.param(20, marks=pytest.mark.soak)])
def test_restarts_after_kills_leak_nothing(daemon: DaemonProcess, restarts: int):
    before, files = {}, []
    for count in range(restarts):
        trainers = Trainers(Spec(daemon.address, steps=10_000, options={"pause_at": [3 * count + 3]}), 2)
        trainers.wait_for(3 * count + 3)
        trainers.kill()
        until(lambda: not any(rank.alive for rank in daemon.status("job").ranks), what="the daemon to see the deaths")
        if count == 4:
            before, files = usage_of(daemon.process.pid), sorted(daemon.folder.rglob("*"))
    assert_flat(before, usage_of(daemon.process.pid), "daemon", DAEMON_SLACK_BYTES)
    assert sorted(daemon.folder.rglob("*")) == files
    assert run(Spec(daemon.address, steps=70), 2)[0]["from"] == "memory"
