"""reft works within a machine's limits, or stops at attach with value, limit and remedy.

The limits: a small tmpfs, a small cgroup, memlock, a read-only HOME, no IPv6, and two users.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import reft
from reft.errors import ConfigError
from tests.e2e.test_daemon_faults import STEPS, check_two_nodes
from tests.support.daemons import ROOT, DaemonProcess, until
from tests.support.equality import assert_equal
from tests.support.limits import own_network
from tests.support.trainers import Spec, Trainers, run

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts, cgroups and namespaces need root")
WIDE = {"width": 1500}  # 27 MB of state: three slots need 81 MB
CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def small_tmpfs(size: str):
    folder = Path(tempfile.mkdtemp(prefix="reft-test-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)], check=True)
    try:
        yield folder / "arena"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def undisturbed():
    process = DaemonProcess()
    yield run(Spec(process.address, job="plain", options=WIDE))
    process.close()


@needs_root
def test_slots_are_memfds_in_dockers_64_mib_of_shm(undisturbed):
    """Slots go to memfds.

    Memfds survive their trainers. They survive the daemon while a trainer holds them.
    """
    with small_tmpfs("64m") as folder:
        daemon = DaemonProcess(folder=folder)
        try:
            trainers = Trainers(Spec(daemon.address, options={**WIDE, "pause_at": [4, 6, 8], "seal_at": [4, 6]}))
            trainers.wait_for(4)
            assert daemon.status("job").backing == "memfd"
            daemon.kill()
            daemon.start()
            trainers.let_go(4)
            trainers.wait_for(6)
            until(lambda: daemon.status("job").ranks[0].sealed.step > 0, what="the memfds to be given back")
            trainers.let_go(6)
            trainers.wait_for(8)
            until(lambda: daemon.status("job").whole >= 7, what="snapshots in the memfds")
            trainers.kill()
            after = run(Spec(daemon.address, options=WIDE))
            assert after[0]["from"] == "memory" and after[0]["began"] >= 7
            assert_equal(after, undisturbed)
        finally:
            daemon.close()


@needs_root
def test_a_step_in_a_memfd_beside_slots_in_the_folder_is_held_after_a_restart_of_the_daemon():
    """The folder has room for three slots. A later run asks for a fourth one, which is a memfd."""
    with small_tmpfs("100m") as folder:
        daemon = DaemonProcess(folder=folder)
        try:
            trainers = Trainers(Spec(daemon.address, options={**WIDE, "slots": 3, "pause_at": [2]}))
            trainers.wait_for(2)
            trainers.kill()
            marks = range(4, 13)  # each of the four slots is written
            options = {**WIDE, "slots": 4, "pause_at": [4, 12], "seal_at": [*marks]}
            trainers = Trainers(Spec(daemon.address, options=options, steps=14))
            trainers.wait_for(4)
            assert daemon.status("job").backing == "memfd"
            assert len(list((folder / "job").glob("rank-*"))) == 3
            daemon.kill()
            daemon.start()
            trainers.let_go(4)
            trainers.wait_for(12)
            rank = daemon.status("job").ranks[0]
            assert rank.slots == 4
            until(lambda: (now := daemon.status("job")).whole == now.ranks[0].sealed.step, what="a step that is held")
            trainers.kill()
        finally:
            daemon.close()


def memory_cgroup() -> tuple[Path, str]:
    """Returns a new memory cgroup, and the name of the file with its limit."""
    name = f"reft-test-{os.getpid()}"  # other test runs have theirs
    if (CGROUPS / "memory/memory.limit_in_bytes").exists():
        return CGROUPS / "memory" / name, "memory.limit_in_bytes"
    return CGROUPS / name, "memory.max"


@needs_root
def test_attach_stops_in_a_memory_cgroup_that_is_too_small():
    group, limit = memory_cgroup()
    try:
        group.mkdir(exist_ok=True)
        (group / limit).write_text(str(60 << 20))
    except OSError as error:
        pytest.skip(f"memory cgroups can't be made here: {error}")
    daemon = DaemonProcess()
    try:
        (group / "cgroup.procs").write_text(str(daemon.process.pid))
        trainers = Trainers(Spec(daemon.address, options=WIDE))
        assert trainers.wait() == [1]
        text = trainers.errors()
        assert (
            "NoRoom" in text
            and "the memory limit of the cgroup" in text
            and "raise the container's memory limit" in text
        )
        assert daemon.answers(), "the daemon must not be killed for memory"
    finally:
        daemon.close()
        until(lambda: not (group / "cgroup.procs").read_text().strip(), what="the cgroup to be empty")
        group.rmdir()


def test_attach_stops_at_a_memory_budget_that_is_too_small():
    daemon = DaemonProcess("--memory", "16MiB")
    try:
        trainers = Trainers(Spec(daemon.address, options=WIDE))
        assert trainers.wait() == [1]
        assert "--memory leaves 16.0 MiB" in trainers.errors()
    finally:
        daemon.close()


def test_a_memlock_limit_does_not_matter(daemon):
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    trainers = Trainers(Spec(daemon.address, options={"pause_at": [3]}))
    trainers.wait_for(3)
    resource.prlimit(trainers.processes[0].pid, resource.RLIMIT_MEMLOCK, (4096, before[1]))
    resource.prlimit(daemon.process.pid, resource.RLIMIT_MEMLOCK, (4096, before[1]))
    trainers.let_go(3)
    assert trainers.wait() == [0]
    assert run(Spec(daemon.address, steps=14))[0]["began"] == 12


@pytest.fixture
def network() -> Iterator[str]:
    """Yields a network namespace whose kernel refuses IPv6."""
    with own_network("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6") as path:
        yield path


@needs_root
def test_two_nodes_agree_without_ipv6(network):
    """Two nodes agree and restore, inside that namespace."""
    pair = [DaemonProcess("--listen", "127.0.0.1:0", network=network) for _ in range(2)]
    trainer_options = {"network": network}
    try:
        plain = run(Spec(pair[0].address, job="plain", steps=STEPS, options=trainer_options), 2)
        check_two_nodes(pair, {2: plain}, **trainer_options)
    finally:
        for process in pair:
            process.close()


# Mounts a /tmp and a /dev/shm in which no daemon runs. This repository may lie in the hidden /tmp,
# so the script mounts it again.
OWN_TMP = """
mount --bind "$ROOT" /mnt && mount -t tmpfs -o mode=1777 tmp /tmp && mkdir -p "$ROOT" && mount --bind /mnt "$ROOT" || exit 77
mount -t tmpfs -o mode=1777,size=256m shm /dev/shm || exit 77
exec "$@"
"""
RUN_BOTH_USERS = """
import sys
from pathlib import Path
from tests.support.daemons import purge_and_stop
from tests.support.users import execute
for user in (0, 65534):
    done = execute(user)
    print(done.stdout, done.stderr, file=sys.stderr if done.returncode else sys.stdout)
refused = execute(65534, REFT_DAEMON="unix:/tmp/reft-0/daemon.sock")
print("refused", "DaemonUnavailable" in refused.stderr, refused.stdout)
print("folders", sorted(path.name for path in Path("/tmp").glob("reft-*")))
for folder in Path("/tmp").glob("reft-*"):
    purge_and_stop(folder / "daemon.sock")
"""


@needs_root
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv of util-linux is missing")
def test_two_users_with_read_only_homes_get_separate_daemons():
    environment = {**os.environ, "ROOT": str(ROOT), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")])}
    # The daemons end with the namespace of processes.
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*unshare, "sh", "-c", OWN_TMP, "sh", sys.executable, "-c", RUN_BOTH_USERS]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a /tmp of its own can't be mounted here: {done.stderr}")
    assert "uid 0 whole 3" in done.stdout and "uid 65534 whole 3" in done.stdout, done.stderr
    assert "refused True" in done.stdout, done.stdout
    assert "folders ['reft-0', 'reft-65534']" in done.stdout, done.stdout


def test_a_runtime_folder_that_others_may_write_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("REFT_RUNTIME_DIR", str(folder))
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="others may write"):
        reft.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not list(folder.iterdir())
