"""Tests signals among real daemons: lost, silent and stalled nodes, and nodes of an old round."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from reft.core.commit.round import StepAnswer
from reft.core.membership import failure_detector as signals
from reft.core.membership.failure_detector import BEAT_S, MISSES, Signal
from reft.core.membership.progress import GAPS_MIN
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.membership.job_monitor import JobMonitor, MembershipView
from reft_daemon.membership.rank_progress import KILL_AFTER_S
from tests.support.agents import TOKEN, Agent
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Code, Job, refused, tcp_call
from tests.support.trainer_forks import Trainer

SILENCE_S = BEAT_S * MISSES


class Cluster:
    """A job with a daemon, a trainer and an agent on each node."""

    def __init__(self, start: Callable[..., DaemonProcess], count: int, *flags: str) -> None:
        self.daemons = [start("--listen", "127.0.0.1:0", *flags) for _ in range(count)]
        self.trainers = [Trainer() for _ in range(count)]
        self.job = Job([(daemon, [rank]) for rank, daemon in enumerate(self.daemons)])
        for node, daemon in zip(self.nodes, self.daemons, strict=True):
            daemon.flags = ("--listen", node.addresses[0], *flags)
        self.agents: list[Agent] = []

    @property
    def nodes(self) -> list[pb.Node]:
        return list(self.job.manifest.nodes)

    def with_agents(self, name: str = "job") -> Cluster:
        """Starts an agent on each node.

        Args:
            name: name of the job, as the agents call it.
        """
        for daemon, node in zip(self.daemons, self.nodes, strict=True):
            self.agents.append(Agent(daemon.address, name, node.id, self.nodes))
        for i in range(len(self.daemons)):
            until(lambda i=i: self.launch(i, name) == "launch", 60, f"the agent's beat on n{i}")
        return self

    def train(self) -> Cluster:
        self.job.decide()
        for rank, trainer in enumerate(self.trainers):
            self.job.lease(rank, trainer, slots=0)
        return self

    def signals(self, observer: int, name: str = "job") -> pb.SignalsReply:
        return self.daemons[observer].call("Signals", pb.SignalsRequest(job=name))

    def launch(self, observer: int, name: str = "job") -> str:
        try:
            return self.signals(observer, name).launch
        except grpc.RpcError:
            return ""  # the job is not watched there

    def seen(self, observer: int) -> list[Signal]:
        """Returns a daemon's signals of all nodes, in their order."""
        found = {each.node: Signal(each.signal) for each in self.signals(observer).nodes}
        return [found[f"n{i}"] for i in range(len(self.daemons))]

    def reason(self, observer: int, node: int) -> str:
        return next(each.reason for each in self.signals(observer).nodes if each.node == f"n{node}")

    def age_s(self, observer: int, node: int) -> float:
        """Returns the seconds since a daemon's signal of a node last changed."""
        return next(each.age_s for each in self.signals(observer).nodes if each.node == f"n{node}")

    def await_seen(self, observer: int, node: int, *expected: Signal) -> None:
        try:
            until(lambda: self.seen(observer)[node] in expected, 60, f"n{node} as {expected} on n{observer}")
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *(each.log.read_text() for each in self.daemons)])) from error

    def await_well(self) -> None:
        for i in range(len(self.daemons)):
            for j in range(len(self.daemons)):
                self.await_seen(i, j, Signal.HEALTHY, Signal.SNAP)
            if self.agents:
                until(lambda i=i: self.hears_all_agents(i), 60, f"beats of all agents on n{i}")

    def hears_all_agents(self, observer: int) -> bool:
        others = [each for each in self.signals(observer).nodes if each.node != f"n{observer}"]
        return all(each.agent for each in others)

    def step(self, step: int) -> None:
        """Every rank reports a step as sealed."""
        for rank in range(len(self.daemons)):
            self.job.report(rank, {step: StepAnswer.SEALED})

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


def test_a_daemon_that_was_stopped_does_not_judge_others_at_once(monkeypatch):
    """The first look may come from a waiting message, e.g. its own agent's beat."""
    now_s = 1000.0
    monkeypatch.setattr("reft_daemon.membership.job_monitor.time.monotonic", lambda: now_s)
    nodes = {name: pb.Node(id=name, name=name) for name in ("here", "there")}
    monitor = JobMonitor("job", "here", MembershipView("", 1, bytes(32), nodes), ChangeQueue())
    there = monitor.detector.members["there"]

    def hear() -> None:
        monitor.detector.spoke("there", [signals.NodeReport("there", Signal.HEALTHY)], {}, now_s)
        monitor.detector.agent_spoke("there", signals.AgentPhase.TRAINING, now_s)

    for _ in range(20):
        now_s += 0.1
        hear()
        monitor.look(now_s, None)
    assert there.signal is Signal.HEALTHY
    now_s += 60
    monitor.look(now_s, None)
    assert there.signal is Signal.HEALTHY and monitor.own_report(None).reason.startswith("it is overloaded")
    for _ in range(15):
        now_s += 0.1
        monitor.look(now_s, None)
    assert there.signal is Signal.OFFLINE, "this daemon has listened meanwhile, and the other is still silent"


def test_the_death_of_a_trainer_is_signalled_to_all_at_once(cluster):
    """The reply to a waiting agent is sent at that moment."""
    two = cluster(2).train()
    two.await_well()
    with rpc.channel(two.daemons[0].address) as channel:
        stub = pb_grpc.DaemonStub(channel)

        def calm() -> pb.SignalsReply | None:
            now = stub.Signals(pb.SignalsRequest(job="job"), timeout=10)
            same = stub.Signals(pb.SignalsRequest(job="job", version=now.version), timeout=10)
            return now if same.version == now.version else None

        # busy daemons are late, and are suspected because of it
        now = until(calm, what="a moment without news")
        waiting = stub.Signals.future(pb.SignalsRequest(job="job", version=now.version, wait_ms=9000), timeout=15)
        two.trainers[1].kill()
        assert waiting.result().version != now.version
    two.await_seen(0, 1, Signal.UNHEALTHY)
    assert two.reason(0, 1) == f"the trainer of rank 1, process {two.trainers[1].pid}, died."


def test_trainers_and_agents_may_have_different_names_for_a_job(cluster):
    """The script has `job=`, and torchrun has no job name: the launch pairs both."""
    two = cluster(2).with_agents(name="run-1").train()
    two.await_well()
    two.daemons[0].kill()
    two.daemons[0].start()  # it finds the trainers' job first, in its arena
    until(lambda: two.launch(0) == "launch", 60, "the agents' beats at the new daemon")
    two.await_well()
    two.trainers[1].kill()
    two.await_seen(0, 1, Signal.UNHEALTHY)
    assert two.reason(0, 1) == f"the trainer of rank 1, process {two.trainers[1].pid}, died."
    for name in ("job", "run-1"):
        assert [Signal(each.signal) for each in two.signals(1, name).nodes if each.node == "n1"] == [Signal.UNHEALTHY]
    assert {each.node for each in two.daemons[0].status("job").signals} == {"n0", "n1"}


def test_an_earlier_death_is_not_signalled_in_the_next_round(cluster):
    two = cluster(2).with_agents().train()
    two.await_well()
    two.trainers[1].kill()
    for observer in range(2):
        two.await_seen(observer, 1, Signal.UNHEALTHY)
    for agent in two.agents:
        agent.say(round=2)
    two.await_well()  # although no trainer has attached in this round yet
    assert [two.signals(observer).round for observer in range(2)] == [2, 2]


def test_an_agent_that_finished_or_stops_its_workers_is_no_failure_and_a_dead_one_is(cluster):
    two = cluster(2).with_agents().train()
    two.await_well()
    two.agents[0].say(phase="STOPPING")
    two.agents[0].await_heard()  # otherwise the trainer's death counts as a failure, and stays one
    two.agents[1].say(phase="FINISHED")
    for observer in range(2):
        two.await_seen(observer, 1, Signal.COMPLETED)
    two.trainers[0].kill()
    until(lambda: not two.daemons[0].status("job").ranks[0].alive, what="the trainer's end")
    assert two.seen(1)[0] in (Signal.HEALTHY, Signal.SNAP)
    two.agents[0].process.kill()
    two.await_seen(1, 0, Signal.UNHEALTHY)
    # STOPPING excuses the dead trainer only while the agent lives. So either death may be the
    # reason.
    dead = f"the trainer of rank 0, process {two.trainers[0].pid}, died."
    assert two.reason(1, 0) in (f"its agent, process {two.agents[0].pid}, has ended.", dead)


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stalled_rank_is_named_and_killed_only_on_request(cluster, kills):
    two = cluster(2, *(["--kill-hung"] if kills else [])).train()
    for step in range(GAPS_MIN + 2):
        two.step(step)
        until(lambda step=step: two.job.whole(1) == step, what=f"whole({step})")
        until(lambda: two.seen(0) and two.seen(1), what="signals")
    two.trainers[1].process.send_signal(signal.SIGSTOP)
    if kills:
        two.await_seen(0, 1, Signal.UNHEALTHY)
        assert two.trainers[1].process.wait(60) == -signal.SIGKILL
        kill = (
            f'reft.audit kill: pid={two.trainers[1].pid} rank=1 job=job launch=launch why="rank 1 stands still at step '
        )
        (rest,) = re.findall(f"{re.escape(kill)}(.*)", two.daemons[1].log.read_text())
        assert rest.endswith(' are usual; its process is stopped." by="this daemon, --kill-hung"')
        until(lambda: two.age_s(0, 1) > 3 * KILL_AFTER_S, 60, "time to kill the rank that waited, too")
        assert two.trainers[0].process.poll() is None
        return
    two.await_seen(0, 1, Signal.SUSPECT)
    until(lambda: "it may wait for rank 1" in two.reason(0, 0), 60, "the rank that is waited for")
    assert two.reason(0, 1).startswith("rank 1 stands still at step 4: no step for ")
    assert two.reason(0, 1).endswith("; its process is stopped.")
    assert two.trainers[1].process.poll() is None and two.trainers[0].process.poll() is None
    assert Signal.OFFLINE not in two.seen(0)


def test_a_node_that_was_given_up_can_not_restore_its_old_round(cluster):
    """The node is stopped, so it keeps its old view. The others go on in a new round and epoch."""
    three = cluster(3).with_agents().train()
    three.await_well()
    old = three.job.epoch
    three.agents[2].signal(signal.SIGSTOP)
    three.daemons[2].kill(signal.SIGSTOP)
    three.await_seen(0, 2, Signal.OFFLINE)
    remaining = three.nodes[:2]
    for agent in three.agents[:2]:
        agent.request.ClearField("nodes")
        agent.say(round=2, nodes=remaining)
    for i in range(2):
        until(lambda i=i: three.signals(i).round == 2, 60, "the second round")
    survey = pb.SurveyRequest(job="job", nodes=three.nodes[1:], launch="launch", round=2)
    here, away = three.daemons[0].call("Survey", survey).nodes
    assert (here.brief, here.HasField("reply")) == (False, True) and (away.brief, away.HasField("reply")) == (
        True,
        False,
    )
    two = Job([(daemon, [rank]) for rank, daemon in enumerate(three.daemons[:2])])
    two.counter = three.job.close([0, 1]).counter
    two.decide()
    three.agents[2].signal(signal.SIGCONT)
    three.daemons[2].kill(signal.SIGCONT)
    until(
        lambda: not three.daemons[0].call("Survey", survey).nodes[1].brief,
        what="the longer timeout, since the node was heard",
    )
    # The replies to the node's own beats say so, and the node tells its agent.
    three.await_seen(2, 2, Signal.OFFLINE)
    assert three.reason(2, 2) == "round 1 of job job is over; round 2 has begun."
    found = {each.node: Signal(each.signal) for each in three.signals(0).nodes}
    assert set(found) == {"n0", "n1"} and Signal.OFFLINE not in found.values()
    address, manifest_token = three.nodes[0].addresses[0], three.job.manifest.token
    sealed = pb.StepReport(until=9, sealed=[pb.SealedStep(step=9)])
    stale_beat = pb.BeatRequest(job="job", launch="launch", round=1, source=three.nodes[1].id, target=three.nodes[0].id)
    for method, request, token, service in (
        ("Beat", stale_beat, TOKEN, pb_grpc.PeerStub),
        ("AgentBeat", pb.AgentBeatRequest(job="job", launch="launch", round=1, node_id=three.nodes[1].id), TOKEN, None),
        ("Gather", pb.GatherRequest(job="job", epoch=old, node_index=2, steps=sealed), manifest_token, pb_grpc.PeerStub),
        ("Announce", pb.Outcome(job="job", epoch=old, pins=pb.Pins(whole=9)), manifest_token, pb_grpc.PeerStub),
        ("Keep", pb.KeepRequest(job="job", epoch=old), manifest_token, pb_grpc.PeerStub),
    ):  # fmt: skip
        with refused(Code.ABORTED):
            tcp_call(address, method, request, token, service)
    for method, request in (
        ("Lease", pb.LeaseRequest(job="job", epoch=old, rank=0)),
        ("Secure", pb.SecureRequest(job="job", epoch=old)),
        ("Release", pb.ReleaseRequest(job="job", epoch=old, rank=0)),
    ):
        with refused(Code.ABORTED):
            three.daemons[0].call(method, request)
    with refused(Code.ABORTED):
        three.job.send_report(0, pb.ReportRequest(job="job", epoch=old, rank=0, steps=sealed))


def test_invalid_beats_are_refused(cluster):
    two = cluster(2).with_agents()
    two.await_well()
    here, there = two.nodes
    address = here.addresses[0]
    beat = {"job": "job", "launch": "launch", "round": 1, "source": there.id, "target": here.id}

    def peer(token: bytes | None = TOKEN, **changes: object) -> object:
        return tcp_call(address, "Beat", pb.BeatRequest(**{**beat, **changes}), token, pb_grpc.PeerStub)

    def agent(**changes: object) -> object:
        facts = {"job": "job", "launch": "launch", "round": 1, "node_id": here.id, "pid": two.agents[0].pid}
        return two.daemons[0].call("AgentBeat", pb.AgentBeatRequest(**{**facts, **changes}))

    assert peer().reports[0].node_id == here.id
    for token in (None, bytes(32)):
        with refused(Code.UNAUTHENTICATED):
            peer(token)
    for changes in ({"target": there.id}, {"source": "stranger"}, {"launch": "another"}):
        with refused(Code.FAILED_PRECONDITION):
            peer(**changes)
    with refused(Code.INVALID_ARGUMENT):
        peer(reports=[pb.NodeReport(node_id=there.id, signal=77)])
    assert peer(round=7) == pb.BeatReply()  # the sender lives; its reports are about another round
    assert agent().watchers[0].id == there.id
    assert agent(round=2).unknown_round and agent(launch="other", pid=two.agents[0].pid).unknown_round
    for changes, code in (
        ({"phase": 9}, Code.INVALID_ARGUMENT),
        ({"round": 0}, Code.ABORTED),
        ({"launch": "other", "pid": 1}, Code.ALREADY_EXISTS),
        ({"round": 2, "nodes": [there], "token": TOKEN}, Code.INVALID_ARGUMENT),
        ({"round": 2, "nodes": [here, here], "token": TOKEN}, Code.INVALID_ARGUMENT),
        ({"round": 2, "nodes": [here, there], "token": b"short"}, Code.INVALID_ARGUMENT),
        ({"job": "../x", "nodes": [here, there], "token": TOKEN}, Code.INVALID_ARGUMENT),
        ({"node_id": "stranger"}, Code.FAILED_PRECONDITION),
    ):
        with refused(code):
            agent(**changes)
    with refused(Code.NOT_FOUND):
        two.daemons[0].call("Signals", pb.SignalsRequest(job="nothing"))
