"""Signals among real daemons: who is lost, who is only silent, who stands still, and who may not come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from reft.core.signals import BEAT_S, MISSES, Signal
from reft.wire.v1 import daemon_pb2 as pb
from tests.daemon.jobs import Job, Trainer
from tests.support.agents import Agent
from tests.support.daemons import DaemonProcess, until

SILENCE_S = BEAT_S * MISSES


class Cluster:
    """A job with a daemon, a trainer and an agent on each node."""

    def __init__(self, start: Callable[..., DaemonProcess], count: int, *flags: str) -> None:
        self.daemons = [start("--listen", "127.0.0.1:0", *flags) for _ in range(count)]
        self.trainers = [Trainer() for _ in range(count)]
        self.job = Job([(daemon, [rank]) for rank, daemon in enumerate(self.daemons)])
        for node, daemon in zip(self.nodes, self.daemons, strict=True):
            del node.addresses[1:]  # as on hosts of their own
            daemon.flags = ("--listen", node.addresses[0], *flags)
        self.agents: list[Agent] = []

    @property
    def nodes(self) -> list[pb.Node]:
        return list(self.job.manifest.nodes)

    def with_agents(self) -> Cluster:
        for daemon, node in zip(self.daemons, self.nodes, strict=True):
            self.agents.append(Agent(daemon.address, "job", node.id, self.nodes))
        for i in range(len(self.daemons)):
            until(lambda i=i: self.launch(i) == "launch", 60, f"the agent's word on n{i}")
        return self

    def train(self) -> Cluster:
        self.job.decide()
        for rank, trainer in enumerate(self.trainers):
            self.job.lease(rank, trainer.pid, slots=0)
        return self

    def signals(self, observer: int, version: int = 0, wait_ms: int = 0) -> pb.SignalsReply:
        request = pb.SignalsRequest(job="job", version=version, wait_ms=wait_ms)
        return self.daemons[observer].call("Signals", request)

    def launch(self, observer: int) -> str:
        try:
            return self.signals(observer).launch
        except grpc.RpcError:
            return ""  # nobody has spoken of the job

    def seen(self, observer: int) -> list[Signal]:
        """What a daemon says of all nodes, in their order."""
        found = {each.node: Signal(each.signal) for each in self.signals(observer).nodes}
        return [found[f"n{i}"] for i in range(len(self.daemons))]

    def reason(self, observer: int, node: int) -> str:
        return next(each.reason for each in self.signals(observer).nodes if each.node == f"n{node}")

    def await_seen(self, observer: int, node: int, *expected: Signal) -> None:
        try:
            until(lambda: self.seen(observer)[node] in expected, 60, f"n{node} as {expected} on n{observer}")
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *(each.log.read_text() for each in self.daemons)])) from error

    def await_well(self) -> None:
        for i in range(len(self.daemons)):
            for j in range(len(self.daemons)):
                self.await_seen(i, j, Signal.HEALTHY, Signal.SNAP)

    def close(self) -> None:
        for process in [*self.trainers, *self.agents]:
            process.kill()


@pytest.fixture
def cluster(start) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(count: int, *flags: str) -> Cluster:
        made.append(Cluster(start, count, *flags))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_stopped_or_killed_daemon_is_suspected_and_never_given_up(cluster):
    three = cluster(3).with_agents().train()
    three.await_well()
    three.daemons[2].kill(signal.SIGSTOP)
    three.daemons[1].kill()
    for node in (1, 2):
        three.await_seen(0, node, Signal.SUSPECT)
    end_s = time.monotonic() + 3 * SILENCE_S
    until(lambda: time.monotonic() > end_s or Signal.OFFLINE in three.seen(0), what="the end of the wait")
    assert three.seen(0)[1:] == [Signal.SUSPECT, Signal.SUSPECT], three.daemons[0].log.read_text()
    three.daemons[2].kill(signal.SIGCONT)
    three.daemons[1].start()
    three.await_well()


def test_a_lost_node_is_known_to_all(cluster):
    three = cluster(3).with_agents().train()
    three.await_well()
    version = three.signals(0).version
    three.agents[2].signal(signal.SIGSTOP)
    three.daemons[2].kill(signal.SIGSTOP)
    began_s = time.monotonic()
    while three.seen(0)[2] is not Signal.OFFLINE:
        version = three.signals(0, version, 5000).version
        assert time.monotonic() - began_s < 60
    three.await_seen(1, 2, Signal.OFFLINE)
    assert three.seen(0)[1] is not Signal.OFFLINE


def test_a_dead_trainer_is_known_to_all_at_once(cluster):
    three = cluster(3).train()
    three.await_well()
    three.trainers[1].kill()
    for observer in range(3):
        three.await_seen(observer, 1, Signal.UNHEALTHY)
    assert f"the trainer of rank 1, process {three.trainers[1].pid}, died" in three.reason(2, 1)
