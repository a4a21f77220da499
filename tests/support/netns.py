"""Linux namespaces in place of hosts: network, processes and memory end together.

    Switch   a network namespace with a bridge, 10.77.0.1           node-a            node-b
       │                                                        ┌──────────────┐  ┌──────────────┐
       └── br0 ── v1 ─────────────────────────────────────────── eth0 .101     │  │              │
              └── v2 ───────────────────────────────────────────┼──────────────┼── eth0 .102     │
    Space    namespaces of network, processes and mounts        │ own pids     │  │ own pids     │
                                                                │ own tmpfs    │  │ own tmpfs    │
                                                                └──────────────┘  └──────────────┘

The bridge lies in a namespace too, so the network of this machine is never changed. When the
processes are gone, the kernel removes everything, and two runs at once can use the same names and
addresses. Every Space mounts its tmpfs at the *same* path, as real hosts do, so a path never leads
from one node to another. The first process of a Space is the root of its process namespace: SIGKILL
of this process ends all others at once, before they can close a connection.

Where namespaces can't be made (`why_not` returns the reason), `Loopback` replaces a host. It has
the same methods, but its processes share the network, and are found by a variable in their
environment.
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
FIRST_NODE = 100  # always three digits, because torchrun sorts nodes by the text of their address
STORE_PORT = 29400
DAEMON_PORT = 7070
NODE_MARK = "REFT_TEST_NODE"  # only tests read this variable
ROOM_BYTES = 1 << 30  # the limit of a node's tmpfs, which takes only as much memory as is written

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
    """Returns why nodes can't be namespaces here; empty if they can."""
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
    """The network between Spaces, with the rendezvous store, which survives the loss of any node.

    Args:
        spawn: starts a process: `reft.cli.demo.cluster.spawn` with log, mark and environment
            already bound.
        command: runs in the switch's network in place of the rendezvous store.
    """

    interface, network = "eth0", NETWORK

    def __init__(self, spawn: Spawn, command: Sequence[str] = ()) -> None:
        self.endpoint = f"{NETWORK}1:{STORE_PORT}"
        store = command or [sys.executable, "-c", STORE, f"{NETWORK}1", str(STORE_PORT)]
        # The bridge needs a MAC address of its own. Else it takes that of a port and changes it
        # when nodes come or go, and the other nodes send to the old address for a minute or two.
        script = (
            f"ip link set lo up && ip link add br0 address {SWITCH} type bridge && ip addr add $1/24 dev br0 && "
            "ip link set br0 up && "
            'shift && echo ready && exec "$@" >&2'
        )
        self._process = spawn(
            ["unshare", "--net", "sh", "-c", script, "switch", f"{NETWORK}1", *store], stdout=subprocess.PIPE
        )
        _await_ready(self._process, "the switch")

    def enter(self, command: Sequence[str]) -> list[str]:
        """Returns a command that runs `command` in the switch's network."""
        return ["nsenter", "--net", "--target", str(self._process.pid), "--", *command]

    def run(self, *command: str) -> None:
        """Runs a command of `ip` in the switch's network; process numbers are this machine's."""
        _run("nsenter", "--net", "--target", str(self._process.pid), "ip", *command)


class Space:
    """One node, made of namespaces.

    Args:
        switch: the network to which the node is connected.
        number: the node's number, from 1; its address follows from it.
        mount: an empty folder, where the node's memory is mounted; only the node sees this mount.
        spawn: starts a process, as for Switch.
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
        """Returns a command that runs `command` in the node, with the same exit code."""
        return ["nsenter", "--net", "--pid", "--mount", "--target", str(self._pid), "--", *command]

    def seen(self, path: Path) -> Path:
        """Returns the path from outside for a path in the node.

        It is valid while the node lives.
        """
        return Path(f"/proc/{self._pid}/root{path}")

    def unplug(self) -> None:
        """Removes the cable, so that the peers of a dying node get no connection resets."""
        self._switch.run("link", "del", self._port)

    def cut(self) -> None:
        """Drops all traffic of the node in both directions, until `heal`."""
        self._switch.run("link", "set", self._port, "down")

    def heal(self) -> None:
        self._switch.run("link", "set", self._port, "up")

    def mute(self) -> None:
        """Drops the node's calls to other daemons until `unmute`.

        The node still answers their calls.
        """
        self._ip("rule", "add", "ipproto", "tcp", "dport", str(DAEMON_PORT), "blackhole")

    def unmute(self) -> None:
        self._ip("rule", "del", "ipproto", "tcp", "dport", str(DAEMON_PORT), "blackhole")

    def kill(self) -> None:
        """Ends all processes of the node at once."""
        os.kill(self._pid, signal.SIGKILL)

    def bury(self) -> None:
        """Waits until the killed node and its memory are gone."""
        # The root of a process namespace ends only after every other process in it has.
        self._unshare.wait(20)


class LoopbackStore:
    """Replaces Switch where namespaces can't be made: the rendezvous store on a free port."""

    interface, network = "lo", LOOPBACK

    def __init__(self, spawn: Spawn) -> None:
        port = free_port()
        self.endpoint = f"{LOOPBACK}1:{port}"
        spawn([sys.executable, "-c", STORE, f"{LOOPBACK}1", str(port)])


class Loopback:
    """One node, made of processes that carry its mark, and a folder.

    Space describes the methods.
    """

    init = 0  # there is no process whose namespaces could be entered

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
        """Does nothing: connections on one machine are always reset when their process ends."""

    def kill(self) -> None:
        """Ends all processes of the node. It stops all first, so that none sees another one die."""
        living = marked(self._mark)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def bury(self) -> None:
        """Waits until the killed node is gone, and removes its folder."""

        def is_dead() -> bool:
            self.kill()  # also processes that have started meanwhile
            return not marked(self._mark)

        until(is_dead, what=f"the end of {self.address}")
        shutil.rmtree(self.folder)


def marked(mark: str) -> list[psutil.Process]:
    """Returns every living process of the node with this mark."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(NODE_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue  # the process is gone, or belongs to another user
    return processes


def folder_on_loopback(otherwise: Path) -> Path:
    """Returns a folder in memory for the slots of all nodes.

    It returns `otherwise` if memory is too small.
    """
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
