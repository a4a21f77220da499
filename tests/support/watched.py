"""Nodes that only watch one another, each in its own namespaces: a daemon and an agent, no torch.

with Watched(4) as nodes:
    nodes.begin_round()                  # all agents name all living nodes
    lost = nodes.living[2]
    watching = nodes.watching(lost, Signal.OFFLINE)
    at_s = nodes.lose(lost)              # its cable is pulled and all its processes are killed
    watching.result()                    # survivor → when its daemon reported the signal
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc

from reft.cli.demo import clean_up
from reft.cli.demo.cluster import short_folder, spawn
from reft.config import child_environment
from reft.core.membership.failure_detector import Signal
from reft.wire import messages, rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.agents import Agent
from tests.support.daemon_forks import daemon_fork
from tests.support.daemons import ROOT, until
from tests.support.netns import INIT, Space, Switch

JOB = "watched"
SETTLED_S = 60.0


@dataclass
class Host:
    """One node: its namespaces, the address of its daemon, and its agent."""

    place: Space
    address: str
    node: pb.Node = field(default_factory=pb.Node)
    agent: Agent | None = None

    def ask(self, method: str, request: object, timeout: float = 10.0) -> object:
        with rpc.channel(self.address) as channel:
            return getattr(pb_grpc.DaemonStub(channel), method)(request, timeout=timeout)

    def signals(self, version: int = 0, wait_ms: int = 0) -> pb.SignalsReply:
        request = pb.SignalsRequest(job=JOB, version=version, wait_ms=wait_ms)
        return self.ask("Signals", request, 10 + wait_ms / 1000)  # type: ignore[return-value]

    def reason(self, name: str) -> str:
        """Returns the reason that this node's daemon gives for its report of a node."""
        return next(each.reason for each in self.signals().nodes if each.node == name)

    def seen(self) -> dict[str, Signal]:
        """Returns node name → signal, as this node's daemon reports it."""
        return {each.node: Signal(each.signal) for each in self.signals().nodes}


class Watched:
    """Nodes that watch one another; `tests.support.netns.why_not` returns why they can't be made.

    Args:
        count: the number of nodes at first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.folder = short_folder()
        self.living: list[Host] = []
        self._made = self._round = 0
        self._keeper = clean_up.start([self.folder])

    def __enter__(self) -> Watched:
        try:
            start = partial(spawn, log=self.folder / "switch.log", mark=self.folder, environment={})
            self._switch = Switch(start, [sys.executable, "-SEc", INIT])
            self.add(self.count)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process; the kernel then removes the namespaces."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()

    def add(self, count: int = 1) -> None:
        """Adds empty nodes, and waits until their daemons answer."""
        added = [self._make() for _ in range(count)]
        for host in added:
            hello = pb.HelloRequest(protocol=messages.PROTOCOL)
            reply = until(lambda host=host, hello=hello: _try(host, "Hello", hello), SETTLED_S, "a daemon's start")
            host.node.CopyFrom(pb.Node(name=reply.node, id=reply.node_id, addresses=reply.addresses))
        self.living += added

    def _make(self) -> Host:
        self._made += 1
        name, mount = f"node-{self._made}", self.folder / "node"
        mount.mkdir(exist_ok=True)
        log = self.folder / f"{name}.log"
        place = Space(self._switch, self._made, mount, partial(spawn, log=log, mark=self.folder, environment={}))
        socket = mount / "d.sock"
        flags = [
            "--node",
            name,
            "--socket",
            str(socket),
            "--dir",
            str(mount / "s"),
            "--listen",
            place.listen,
            "--insecure",
        ]
        marks = {clean_up.MARK: str(self.folder)}
        environment = child_environment(**marks, PYTHONPATH=f"{ROOT}:{ROOT / 'daemon'}")
        daemon_fork(flags, environment, log, marks=marks, inside=place.init)
        return Host(place, f"unix:{place.seen(socket)}")

    def begin_round(self) -> None:
        """Begins a round of the living nodes on all agents.

        Waits until all nodes hear each other.
        """
        self._round += 1
        nodes = [host.node for host in self.living]
        for host in self.living:
            if host.agent is None:
                socket = host.place.folder / "d.sock"
                host.agent = Agent(f"unix:{socket}", JOB, host.node.id, nodes, partial(self._run, host))
            host.agent.request.ClearField("nodes")
            host.agent.say(round=self._round, nodes=nodes)
        for host in self.living:
            until(lambda host=host: self._is_settled(host), SETTLED_S, "a round in which all hear all")

    def _run(self, host: Host, command: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = child_environment(**{clean_up.MARK: str(self.folder), "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"})
        with open(self.folder / f"{host.node.name}.agent.log", "ab") as log:
            return subprocess.Popen(
                host.place.enter(command), stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip

    def _is_settled(self, host: Host) -> bool:
        reply = _try(host, "Signals", pb.SignalsRequest(job=JOB))
        if reply is None or reply.round != self._round:
            return False
        are_healthy = all(Signal(each.signal) in (Signal.HEALTHY, Signal.SNAP) for each in reply.nodes)
        return are_healthy and all(each.agent for each in reply.nodes if each.node != host.node.name)

    def lose(self, host: Host) -> float:
        """Removes the cable, so that no peer gets a reset, and ends all processes.

        Returns:
            When that was, by the monotonic clock.
        """
        self.living.remove(host)
        at_s = time.monotonic()
        host.place.unplug()
        host.place.kill()
        host.place.bury()
        return at_s

    def watching(self, lost: Host, signal: Signal) -> Watching:
        """Begins to wait for a signal; called before the event that causes the signal."""
        return Watching(self.living, lost, signal)


class Watching:
    """Waits for a signal in one thread for each survivor, from before the loss on."""

    def __init__(self, living: Sequence[Host], lost: Host, signal: Signal) -> None:
        self.known_s: dict[str, float] = {}
        survivors = [host for host in living if host is not lost]
        self._threads = [threading.Thread(target=self._wait, args=(host, lost, signal)) for host in survivors]
        for thread in self._threads:
            thread.start()

    def _wait(self, host: Host, lost: Host, signal: Signal) -> None:
        self.known_s[host.node.name] = _await(host, lost.node.name, signal, 60.0)

    def result(self) -> dict[str, float]:
        """Returns survivor's name → when its daemon reported the signal, by the monotonic clock."""
        for thread in self._threads:
            thread.join()
        assert len(self.known_s) == len(self._threads), "a survivor's daemon never reported the signal"
        return self.known_s


def _await(host: Host, name: str, signal: Signal, deadline_s: float) -> float:
    end_s, version = time.monotonic() + deadline_s, 0
    with rpc.channel(host.address) as channel:
        stub = pb_grpc.DaemonStub(channel)
        while time.monotonic() < end_s:
            reply = stub.Signals(pb.SignalsRequest(job=JOB, version=version, wait_ms=5000), timeout=15)
            version = reply.version
            if any(each.node == name and Signal(each.signal) is signal for each in reply.nodes):
                return time.monotonic()
    raise AssertionError(f"{host.node.name} never reported {signal.name} for {name}")


def _try(host: Host, method: str, request: object) -> object | None:
    try:
        return host.ask(method, request, 2.0)
    except grpc.RpcError:
        return None
