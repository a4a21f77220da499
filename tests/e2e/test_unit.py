"""Boots systemd in namespaces, and lets it run the shipped unit for a user who is not root.

The unit's sandbox is systemd's own. The daemon restarts and adopts, ends a trainer, and listens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.wire import messages
from tests.support import netns
from tests.support.certificates import SCRIPT, why_not
from tests.support.daemons import ROOT, until

UNIT = ROOT / "examples" / "deploy" / "reft-daemon@.service"
SYSTEMD = next((path for path in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd") if Path(path).exists()), "")
NODE, ADDRESS, USER, UID = "node1", "10.77.0.101", "alice", "4242"

# Of systemd's units only these empty ones are there, so nothing else is started.
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user")
BOOT = """
set -e
mount --make-rprivate /
# Folders that the user must reach, where one above them is closed to others.
if [[ $CLOSED ]]; then
    mkdir $FOLDER/python
    mount --bind "$PYTHON" $FOLDER/python
    mount -t tmpfs -o mode=755 tmpfs "$CLOSED"
    mkdir -p "$PYTHON"
    mount --bind $FOLDER/python "$PYTHON"
fi
mkdir -p $FOLDER/etc $FOLDER/work
mount -t overlay -o lowerdir=/etc,upperdir=$FOLDER/etc,workdir=$FOLDER/work overlay /etc
echo "alice:x:4242:4242::/tmp:/bin/sh" >> /etc/passwd
echo "10.77.0.101 node1" >> /etc/hosts
mkdir /etc/reft
mount --bind $FOLDER/certificates /etc/reft
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir -p /opt/reft/bin
printf '#!/bin/sh\\nexec "%s/reft-daemon" "$@"\\n' "$BIN" > /opt/reft/bin/reft-daemon
chmod 755 /opt/reft/bin/reft-daemon
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/test
mount --bind $FOLDER /run/test
mount -t tmpfs -o mode=1777 tmpfs /tmp
ip link set lo up
ip address add 10.77.0.101/32 dev lo
echo node1 > /etc/hostname
umount -R /sys/fs/cgroup
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd || true
mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified || true
export container=test SYSTEMD_UNIT_PATH=/run/test/units
exec $SYSTEMD --system --unit=multi-user.target --show-status=no
"""
# Two of these have one parent, as workers of one agent: the attach of the second ends the first.
TRAINER = """
import reft, sys, torch
model = torch.nn.Linear(4, 4)
session = reft.attach(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), job="run1")
first = session.step
for step in session.steps(first + 2):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
print(f"from step {first}, sealed {session.seal().step}", flush=True)
sys.stdin.read()
"""
WORKERS = f"""
import os, signal, subprocess, sys
names = "RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"
environment = {{**os.environ, **dict.fromkeys(names, "0"), "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
               "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "run1", "TORCHELASTIC_MAX_RESTARTS": "1"}}
def start():
    return subprocess.Popen([sys.executable, "-c", {TRAINER!r}], env=environment, stdin=subprocess.PIPE)
first = start()
sys.stdin.readline()
second = start()
second.communicate()
print("the first was ended by", signal.Signals(-first.wait()).name)
"""
ASKS_DAEMON = """
from pathlib import Path
from reft.wire import messages, rpc
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb, daemon_pb2_grpc as pb_grpc
folder = Path("/etc/reft")
tls = Tls(*(folder / "alice/agents" / f"node1.{kind}" for kind in ("pem", "key")), folder / "ca.pem")
with rpc.channel("node1:29700", tls) as channel:
    print(pb_grpc.DaemonStub(channel).Hello(pb.HelloRequest(protocol=messages.PROTOCOL), timeout=10).protocol)
"""


def why_not_booted() -> str:
    """Returns why systemd can't be booted here; empty if it can."""
    if not SYSTEMD or not shutil.which("setpriv"):
        return "there is no systemd, or no setpriv"
    return ("only root can boot systemd" if os.getuid() else "") or why_not() or netns.why_not()


class Booted:
    """A machine with systemd, which runs the unit for alice.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        units = folder / "units"
        (units / "reft-daemon@.service.d").mkdir(parents=True)
        for target in TARGETS:
            (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        with open(units / "multi-user.target", "a") as target:
            target.write("Wants=reft-daemon@alice.service\n")
        shutil.copy(UNIT, units)
        self.log = folder / "daemon.log"
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        # Only what a test needs: where the log goes, and which sources are run.
        drop_in = (
            f"StandardError=append:/run/test/daemon.log\nEnvironment=PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1\n"
        )
        (units / "reft-daemon@.service.d/test.conf").write_text(f"[Service]\n{drop_in}")
        subprocess.run(["bash", SCRIPT, folder / "certificates", USER, NODE], check=True, capture_output=True)
        for path_made in [folder / "certificates", *(folder / "certificates").rglob("*")]:
            os.chown(path_made, int(UID), int(UID))
        closed = [each for each in Path(sys.base_prefix).parents if not each.stat().st_mode & 0o005]
        environment = {
            **os.environ, "FOLDER": str(folder), "BIN": str(Path(sys.executable).parent), "SYSTEMD": SYSTEMD,
            "CLOSED": str(closed[-1]) if closed else "", "PYTHON": sys.base_prefix,
        }  # fmt: skip
        flags = ("--fork", "--kill-child", "--pid", "--mount", "--ipc", "--uts", "--net", "--cgroup", "--mount-proc")
        with open(folder / "boot.log", "wb") as log:
            self._process = subprocess.Popen(
                ["unshare", *flags, "bash", "-c", BOOT],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._init = int(until(children.read_text, what="the first process"))

    def command(self, *words: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        """Returns a command of alice's on that machine, and its environment."""
        enter = ["nsenter", f"--target={self._init}", "--all", f"--wd={ROOT}"]
        alice = [
            "setpriv",
            f"--reuid={UID}",
            f"--regid={UID}",
            "--clear-groups",
            "--bounding-set=-all",
            "--no-new-privs",
        ]
        names = ("PATH", "LANG", "VIRTUAL_ENV")
        environment = {name: os.environ[name] for name in names if name in os.environ} | variables
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return [*enter, *alice, "--", *words], environment

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command, environment = self.command(*words)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def status(self) -> dict[str, object] | None:
        """Returns what `reft-cli status --json` says; None: no daemon answers."""
        done = self.run(str(Path(sys.executable).with_name("reft-cli")), "status", "--json")
        return json.loads(done.stdout) if done.returncode != 10 and done.stdout else None

    def close(self) -> None:
        self._process.kill()  # and the machine with it
        self._process.wait()


@pytest.fixture
def booted(tmp_path) -> Iterator[Booted]:
    if reason := why_not_booted():
        pytest.skip(reason)
    machine = Booted(tmp_path)
    yield machine
    machine.close()


def daemon_pid(machine: Booted) -> int:
    """Returns the daemon's number on that machine; 0 if none answers."""
    status = machine.status()
    return int(status["daemon"]["pid"]) if status else 0


@pytest.mark.timeout(400)
def test_the_unit_adopts_ends_a_trainer_and_listens(booted):
    first = until(lambda: daemon_pid(booted), what="the daemon's start")
    command, environment = booted.command(sys.executable, "-c", WORKERS)
    workers = subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        line = workers.stdout.readline()
        assert line == "from step 0, sealed 2\n", line + workers.communicate()[1]

        assert booted.run("kill", "-KILL", str(first)).returncode == 0
        until(lambda: (pid := daemon_pid(booted)) != first and pid, what="another daemon")
        (job,) = booted.status()["jobs"]
        assert job["whole_step"] == 2 and "adopted slots=3" in booted.log.read_text()

        output, errors = workers.communicate("next\n", timeout=200)
        assert output.splitlines() == ["from step 2, sealed 4", "the first was ended by SIGKILL"], errors
        asked = booted.run(sys.executable, "-c", ASKS_DAEMON)
        assert asked.stdout == f"{messages.PROTOCOL}\n", asked.stderr
    finally:
        workers.kill()
        workers.wait()
    assert "Operation not permitted" not in booted.log.read_text()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_the_unit_is_closed_to_what_the_daemon_needs_not():
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", UNIT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
