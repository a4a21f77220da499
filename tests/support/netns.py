"""Linux namespaces that stand for hosts: a network, processes and memory that end together, as in a loss of power.

    Switch   a network namespace with a bridge, 10.77.0.1           node-a            node-b
       │                                                        ┌──────────────┐  ┌──────────────┐
       └── br0 ── v1 ─────────────────────────────────────────── eth0 .101     │  │              │
              └── v2 ───────────────────────────────────────────┼──────────────┼── eth0 .102     │
    Space    namespaces of network, processes and mounts        │ own pids     │  │ own pids     │
                                                                │ own tmpfs    │  │ own tmpfs    │
                                                                └──────────────┘  └──────────────┘

The bridge lies in a namespace too, so nothing is ever written into the network of this machine: when the processes are
gone, the kernel removes all of it, and two runs at once can use the same names and addresses. Every Space mounts its
tmpfs at the *same* path, as real hosts do: a path never leads from one to another. Its first process is the root of its
process namespace: SIGKILL of that one ends all others at once, and none of them gets a chance to say goodbye.

Where namespaces can't be made (`why_not` says why), `Loopback` stands for a host: same methods, but the processes share
the network and are found by a variable of their environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from reft.cli.demo.cluster import DemoError, free_port, slots_folder
from tests.support.daemons import until

NETWORK = "10.77.0."
SWITCH = "02:00:00:00:00:01"
LOOPBACK = "127.0.0."
FIRST_NODE = 100  # three digits throughout: torchrun sorts nodes by the text of their address
STORE_PORT = 29400
DAEMON_PORT = 7070
NODE_MARK = "REFT_TEST_NODE"  # read by nobody but us
ROOM_BYTES = 1 << 30  # the most that a node's tmpfs takes; it takes only what is written

# Reaps orphans, and stays until it is killed.
INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
STORE = """
import signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
while True: signal.pause()
"""

Spawn = Callable[..., "subprocess.Popen[bytes]"]


def why_not() -> str:
    """Why nodes can't be namespaces here; empty if they can."""
    script = "mount -t tmpfs tmpfs /tmp && ip link add br0 type bridge && ip link add v1 type veth peer name v2"
    command = ["unshare", "--net", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child", "sh", "-c", script]
    if not shutil.which("nsenter"):
        return "there is no nsenter"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return (done.stderr.strip() or f"unshare ended with {done.returncode}") if done.returncode else ""


class Switch:
    """The network between Spaces, and the rendezvous store, which no loss of a node must take along.

    Args:
        spawn: starts a process, as `reft.cli.demo.cluster.spawn` does once log, mark and environment are given.
        command: runs there in place of the rendezvous store.
    """

    interface, network = "eth0", NETWORK

    def __init__(self, spawn: Spawn, command: Sequence[str] = ()) -> None:
        self.endpoint = f"{NETWORK}1:{STORE_PORT}"
        store = command or [sys.executable, "-c", STORE, f"{NETWORK}1", str(STORE_PORT)]
        # An address of its own: else the bridge takes that of a port, changes it when nodes come or go, and the others
        # go on sending to the old one for a minute or two.
        script = (
            f"ip link set lo up && ip link add br0 address {SWITCH} type bridge && ip addr add $1/24 dev br0 && "
            "ip link set br0 up && "
            'shift && echo ready && exec "$@" >&2'
        )
        self._process = spawn(
            ["unshare", "--net", "sh", "-c", script, "switch", f"{NETWORK}1", *store], stdout=subprocess.PIPE
        )
        _await_ready(self._process, "the switch")

    def run(self, *command: str) -> None:
        """Runs a command of `ip` in the switch's network, with this machine's process numbers."""
        _run("nsenter", "--net", "--target", str(self._process.pid), "ip", *command)


class Space:
    """One node as namespaces.

    Args:
        switch: its network.
        number: from 1; makes the address.
        mount: an empty folder; the node's own memory is mounted there, seen by the node alone.
        spawn: as for the switch.
    """

    def __init__(self, switch: Switch, number: int, mount: Path, spawn: Spawn) -> None:
        self.address = f"{NETWORK}{FIRST_NODE + number}"
        self.listen = f"{self.address}:{DAEMON_PORT}"
        self.folder = mount
        self._switch, self._port = switch, f"v{number}"
        script = (
            'mount -t tmpfs -o mode=700,size=$1 tmpfs "$2" && ip link set lo up && echo ready && exec "$3" -SEc "$4"'
        )
        kinds = ["--net", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        self._unshare = spawn(
            ["unshare", *kinds, "sh", "-c", script, "node", str(ROOM_BYTES), str(mount), sys.executable, INIT],
            stdout=subprocess.PIPE,
        )
        _await_ready(self._unshare, f"node {self.address}")
        (init,) = psutil.Process(self._unshare.pid).children()
        self._pid = self.init = init.pid
        switch.run("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid))
        switch.run("link", "set", self._port, "master", "br0", "up")
        self._ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        self._ip("link", "set", "eth0", "up")

    def _ip(self, *words: str) -> None:
        _run("nsenter", "--net", "--target", str(self._pid), "ip", *words)

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` inside; it ends as that one does."""
        return ["nsenter", "--net", "--pid", "--mount", "--target", str(self._pid), "--", *command]

    def seen(self, path: Path) -> Path:
        """Where a path of the node is found from outside, while the node lives."""
        return Path(f"/proc/{self._pid}/root{path}")

    def unplug(self) -> None:
        """Pulls the cable: when the node ends now, its peers get no reset connections."""
        self._switch.run("link", "del", self._port)

    def cut(self) -> None:
        """The cable hears and says nothing more, until `heal`."""
        self._switch.run("link", "set", self._port, "down")

    def heal(self) -> None:
        self._switch.run("link", "set", self._port, "up")

    def mute(self) -> None:
        """Its calls to daemons of other nodes get lost, and it still answers theirs, until `unmute`."""
        self._ip("rule", "add", "ipproto", "tcp", "dport", str(DAEMON_PORT), "blackhole")

    def unmute(self) -> None:
        self._ip("rule", "del", "ipproto", "tcp", "dport", str(DAEMON_PORT), "blackhole")

    def kill(self) -> None:
        """Ends all of its processes, at once."""
        os.kill(self._pid, signal.SIGKILL)

    def bury(self) -> None:
        """Returns when the killed node is gone, with all that it held."""
        # The root of a process namespace ends only after every other process in it has.
        self._unshare.wait(20)


class LoopbackStore:
    """What Switch is, where namespaces can't be made: the rendezvous store on a free port."""

    interface, network = "lo", LOOPBACK

    def __init__(self, spawn: Spawn) -> None:
        port = free_port()
        self.endpoint = f"{LOOPBACK}1:{port}"
        spawn([sys.executable, "-c", STORE, f"{LOOPBACK}1", str(port)])


class Loopback:
    """One node as processes that carry its mark, and a folder; see Space."""

    init = 0  # no process: nothing is entered

    def __init__(self, number: int, folder: Path, mark: str) -> None:
        self.address = f"{LOOPBACK}{FIRST_NODE + number}"
        self.listen = f"{self.address}:0"
        self.folder = folder
        self._mark = mark
        folder.mkdir(mode=0o700)

    def enter(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def seen(self, path: Path) -> Path:
        return path

    def unplug(self) -> None:
        """Can't be done: connections on one machine are reset when their process ends."""

    def kill(self) -> None:
        """Ends all of its processes; none sees another's death."""
        living = marked(self._mark)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def bury(self) -> None:
        """Returns when the killed node is gone, with all that it held."""

        def is_dead() -> bool:
            self.kill()  # what was just being born
            return not marked(self._mark)

        until(is_dead, what=f"the end of {self.address}")
        shutil.rmtree(self.folder)


def marked(mark: str) -> list[psutil.Process]:
    """Every living process of the node with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(NODE_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # gone, or somebody else's
    return found


def folder_on_loopback(otherwise: Path) -> Path:
    """Memory for the slots of all nodes, if there is enough of it."""
    return slots_folder(ROOM_BYTES, otherwise)


def _await_ready(process: subprocess.Popen[bytes], what: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    if line != b"ready\n":
        raise DemoError(f"{what} did not start; its log says why.")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise DemoError(f"{' '.join(command)}: {done.stderr.strip()}")
