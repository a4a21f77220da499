"""No leak: 300 snapshots and 20 kill-restart rounds leave memory, files, descriptors and threads where they were."""

from __future__ import annotations

import psutil

from tests.support.daemons import DaemonProcess, until
from tests.support.trainers import Spec, Trainers, run

SLACK_BYTES = 4 << 20  # an allocator's noise; one leaked snapshot of this model is larger
TRAINER_SLACK_BYTES = (
    16 << 20
)  # gradients and temporaries come and go in blocks of 2.5 MB; 300 snapshots leaking 1 % each are 24 MB
WIDE = {"width": 800}  # 8 MB of state


def facts(pid: int) -> dict[str, int]:
    """What a process holds; private memory, because slots are shared."""
    process = psutil.Process(pid)
    return {"memory": process.memory_full_info().uss, "files": process.num_fds(), "threads": process.num_threads()}


def assert_flat(before: dict[str, int], after: dict[str, int], who: str, slack: int = SLACK_BYTES) -> None:
    assert after["files"] <= before["files"] + 2, (who, before, after)
    assert after["threads"] <= before["threads"] + 2, (who, before, after)
    assert after["memory"] <= before["memory"] + slack, (who, before, after)


def test_300_snapshots(daemon: DaemonProcess):
    # On a busy machine the round is slower than these steps: each second one, and that of a pause, is waited for. What leaked
    # is there at all of the last pauses; what malloc just keeps is not.
    pauses = [30, 605, 615, 625, 635]
    options = {**WIDE, "pause_at": pauses, "seal_at": [*range(2, 640, 2), *pauses]}
    trainers = Trainers(Spec(daemon.address, steps=640, options=options))
    pids = {"trainer": trainers.processes[0].pid, "daemon": daemon.process.pid}
    found, files = [], []
    for step in pauses:
        trainers.wait_for(step)
        found.append({who: facts(pid) for who, pid in pids.items()})
        files.append(sorted(daemon.folder.rglob("*")))
        trainers.let_go(step)
    for who in pids:
        after = min((each[who] for each in found[1:]), key=lambda each: each["memory"])
        assert_flat(found[0][who], after, who, TRAINER_SLACK_BYTES if who == "trainer" else SLACK_BYTES)
    assert files == files[:1] * len(pauses)
    assert trainers.wait() == [0]
    assert trainers.results()[0]["stats"]["snapshots"] >= 300


def test_20_kill_restart_rounds(daemon: DaemonProcess):
    before, files = {}, []
    for count in range(20):
        trainers = Trainers(Spec(daemon.address, steps=10_000, options={"pause_at": [3 * count + 3]}), 2)
        trainers.wait_for(3 * count + 3)
        trainers.kill()
        until(lambda: not any(rank.alive for rank in daemon.status("job").ranks), what="the daemon to see the deaths")
        if count == 4:
            before, files = facts(daemon.process.pid), sorted(daemon.folder.rglob("*"))
    assert_flat(before, facts(daemon.process.pid), "daemon")
    assert sorted(daemon.folder.rglob("*")) == files
    assert run(Spec(daemon.address, steps=70), 2)[0]["from"] == "memory"
