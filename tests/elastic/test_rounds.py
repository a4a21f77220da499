"""Rounds of the rendezvous with torch's operations, in threads: ranks, losses, newcomers."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, _NodeDesc, create_handler

from reft.core.membership.agent_policy import AgentReaction
from reft.core.membership.sticky_ranks import Participant, PreviousRank
from reft.elastic import handler, rounds
from reft.elastic.entry_seal import EntrySeal
from reft.elastic.handler import ReftRendezvousHandler
from reft.elastic.heartbeat_client import RoundMembers
from reft.elastic.rounds import StateHolder
from reft.elastic.shared_state import PLAIN, TEXT_MAX, AgentFacts, SharedState, decode, encode
from reft.elastic.stores.sealed import ForeignEntry
from reft.errors import ConfigError
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import until


class Shared(RendezvousBackend):
    """The shared state, in this process.

    `lost` makes every call fail. Clearing `answers` makes calls block.
    """

    name = "reft"

    def __init__(self):
        self.lock, self.data, self.revision, self.lost = threading.Lock(), None, 0, False
        self.reads = 0
        self.answers, self.blocked_calls = threading.Event(), 0
        self.answers.set()

    def get_state(self):
        with self.lock:
            self._check()
            self.reads += 1
            return None if self.data is None else (self.data, self.revision)

    def set_state(self, state, token=None):
        with self.lock:
            self._check()
            is_ours = (token or 0) == self.revision
            if is_ours:
                self.data, self.revision = state, self.revision + 1
            return self.data, self.revision, is_ours

    def _check(self):
        self.blocked_calls += 1
        self.answers.wait(20)
        self.blocked_calls -= 1
        if self.lost:
            raise RendezvousConnectionError("gone")

    @property
    def state(self):
        return decode(self.data)


class Job:
    """Agents of one job, each on its own node, as threads."""

    def __init__(self, nodes="4", **options):
        self.shared, self.store, self.nodes = Shared(), HashStore(), nodes
        # An agent may come late on a busy machine. A round with all nodes waits for no last call.
        self.options = {"last_call_timeout": 30, "close_timeout": 2, **options}
        self.agents = []  # all agents, to be ended by `close`

    def agent(self, home, number=0, certificates=""):
        """Returns an agent's handler.

        Agents sort by address: by `number`, or else by the last letter of `home`.
        """
        fewest, _, most = self.nodes.partition(":")
        parameters = RendezvousParameters(
            "reft",
            "",
            "job",
            int(fewest),
            int(most or fewest),
            local_addr=f"127.0.0.{number or ord(home[-1]) + 36}",
            **self.options,
        )
        inner = create_handler(self.store, self.shared, parameters)
        facts = AgentFacts(home=home, name=str(len(self.agents)), certificates=certificates)
        agent = ReftRendezvousHandler(inner, facts, "none", shrink_s=0.3)
        self.agents.append(agent)
        return agent

    def join(self, *agents) -> list[Future]:
        futures = [Future() for _ in agents]
        for agent, future in zip(agents, futures, strict=True):
            threading.Thread(target=self._join, args=(agent, future), daemon=True).start()
        return futures

    @staticmethod
    def _join(agent, future):
        try:
            future.set_result(agent.next_rendezvous())
        except BaseException as error:
            future.set_exception(error)

    def ranks(self, *agents) -> list[int]:
        """Lets these agents join the next round together, and returns their ranks."""
        infos = [future.result(30) for future in self.join(*agents)]
        assert len({info.world_size for info in infos}) == 1
        return [info.rank for info in infos]

    def set_last_call(self, seconds):
        """Sets how long a round waits for more nodes than the least number."""
        for agent in self.agents:
            agent._inner.settings.timeout._last_call = timedelta(seconds=seconds)

    def close(self):
        self.shared.lost = True  # so that no thread waits for ever
        for agent in self.agents:
            agent._inner._stop_heartbeats()


@pytest.fixture
def make_job():
    jobs = []

    def make(*args, **options):
        jobs.append(Job(*args, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def lose(job, agent):
    """Acts as if the agent's process had ended and all other agents knew."""
    agent._inner._stop_heartbeats()
    name = str(job.agents.index(agent))
    for other in job.agents:
        if other is not agent:
            other._holder._is_gone = lambda facts, seen_s: facts.name == name


def has_joined(job, *agents):
    """Returns whether exactly these agents are in a rendezvous that is not complete."""
    state = job.shared.state
    return not state.complete and set(state.participants) == {agent._node for agent in agents}


def await_restart_reason(agent):
    until(lambda: agent.num_nodes_waiting() > 0, what="a reason to restart")


def test_a_new_node_takes_the_rank_of_the_lost_one_and_no_other_rank_changes(make_job):
    job = make_job("3")
    a, b, c = (job.agent(f"node-{name}") for name in "abc")
    assert job.ranks(a, b, c) == [0, 1, 2]
    assert a.num_nodes_waiting() == b.num_nodes_waiting() == c.num_nodes_waiting() == 0
    lose(job, a)
    await_restart_reason(b)
    spare = job.agent("node-x")
    assert job.ranks(b, c, spare) == [1, 2, 0]
    back = job.agent("node-a", number=101)
    lose(job, b)
    assert job.ranks(c, spare, back) == [2, 0, 1]


def test_a_node_with_certificates_of_another_user_is_no_spare(make_job):
    job = make_job("2")
    alice = [job.agent(f"node-{name}", certificates="user alice") for name in "ab"]
    job.ranks(*alice)
    for certificates, has in ((PLAIN, "has no certificates"), ("user bob", "has certificates of user bob")):
        stranger = job.agent("node-x", certificates=certificates)
        with pytest.raises(
            ConfigError, match=f"{has}, and node [01] of this job has certificates of user alice"
        ) as refused:
            job.join(stranger)[0].result(30)
        assert "certificates.sh" in refused.value.hint
        assert stranger.shutdown() and stranger._node not in job.shared.state.everyone()
    assert [agent.num_nodes_waiting() for agent in alice] == [0, 0]
    unknown = job.agent("node-y")
    lose(job, alice[0])
    await_restart_reason(alice[1])
    assert job.ranks(unknown, alice[1]) == [0, 1]


def test_of_two_users_who_begin_a_job_together_one_is_refused(make_job):
    job = make_job("2")
    both = [job.agent(f"node-{user[0]}", certificates=f"user {user}") for user in ("alice", "bob")]
    results = job.join(*both)
    until(lambda: any(result.done() for result in results), what="a refusal")
    (refused,) = [result for result in results if result.done()]
    assert isinstance(refused.exception(0), ConfigError)


def test_agents_in_two_containers_of_one_host_are_two(make_job, monkeypatch):
    job, same = make_job(nodes="2"), _NodeDesc("127.0.0.1", 1, 0)  # each in the first process of its container
    monkeypatch.setattr(dynamic_rendezvous._NodeDescGenerator, "generate", lambda self, local_addr: same)
    assert sorted(job.ranks(job.agent("a"), job.agent("b"))) == [0, 1]


def test_a_node_keeps_its_rank_under_a_new_agent(make_job):
    job = make_job("2")
    a, b = job.agent("node-a"), job.agent("node-b")
    assert job.ranks(a, b) == [0, 1]
    lose(job, a)
    again = job.agent("node-a", number=200)
    assert len(job.shared.state.participants) == 2  # the earlier agent is still in the state
    assert job.ranks(again, b) == [0, 1]


def test_a_spare_is_promoted_into_the_next_round(make_job):
    job = make_job("2")
    a, b, spare = (job.agent(f"node-{name}") for name in "abs")
    assert job.ranks(a, b) == [0, 1]
    (waiting,) = job.join(spare)
    until(lambda: job.shared.state.redundancy_list, what="the spare to be listed")
    assert a.num_nodes_waiting() == 0, "a spare causes no restart"
    lose(job, a)
    await_restart_reason(b)
    assert job.ranks(b) == [1]
    assert waiting.result(30).rank == 0


def test_a_spare_that_joins_an_open_rendezvous_takes_the_free_rank(make_job):
    job = make_job("3")
    a, b, c = (job.agent(f"node-{name}") for name in "abc")
    assert job.ranks(a, b, c) == [0, 1, 2]
    lose(job, a)
    await_restart_reason(b)
    waiting = job.join(b, c)
    until(lambda: has_joined(job, b, c), what="both in the rendezvous")
    assert job.ranks(job.agent("node-s")) == [0]
    assert [future.result(30).rank for future in waiting] == [1, 2]


def test_a_spare_that_is_not_needed_exits_with_0(make_job):
    job = make_job("1")
    a, spare = job.agent("node-a"), job.agent("node-s")
    assert job.ranks(a) == [0]
    (waiting,) = job.join(spare)
    until(lambda: job.shared.state.redundancy_list, what="the spare to be listed")
    assert a.shutdown()
    with pytest.raises(SystemExit) as ended:
        waiting.result(30)
    assert ended.value.code == 0


def test_a_job_shrinks_to_its_minimum_and_grows_again(make_job):
    job = make_job("2:3")
    a, b, c = (job.agent(f"node-{name}") for name in "abc")
    assert job.ranks(a, b, c) == [0, 1, 2]
    lose(job, b)
    await_restart_reason(c)
    job.set_last_call(0.5)
    assert job.ranks(a, c) == [0, 1]
    job.set_last_call(30)
    (back,) = job.join(job.agent("node-d"))
    await_restart_reason(a)
    await_restart_reason(c)
    assert job.ranks(a, c) == [0, 1]
    assert back.result(30).rank == 2


def test_a_node_that_was_cut_off_joins_again(make_job):
    job = make_job("1:2")
    a, b = job.agent("node-a"), job.agent("node-b")
    assert job.ranks(a, b) == [0, 1]
    lose(job, a)
    await_restart_reason(b)
    job.set_last_call(0)
    assert job.ranks(b) == [0]
    job.set_last_call(30)
    b._holder._is_gone = lambda facts, seen_s: False
    await_restart_reason(a)  # the workers of a run in an old round
    assert "started a round without this node" in a._last_line
    (returned,) = job.join(a)
    await_restart_reason(b)
    assert sorted([*job.ranks(b), returned.result(30).rank]) == [0, 1]


def test_a_lost_store_does_not_stop_training(make_job):
    job = make_job("1")
    a = job.agent("node-a")
    assert job.ranks(a) == [0]
    job.shared.lost = True
    assert a.num_nodes_waiting() == 0
    a._holder._synced_s = float("-inf")
    assert a.num_nodes_waiting() == 0


def test_a_store_that_refuses_does_not_stop_training(make_job, monkeypatch):
    job = make_job("1")
    a = job.agent("node-a")
    assert job.ranks(a) == [0]

    def refuse():
        raise RendezvousStateError("etcd refuses: database space exceeded.")

    monkeypatch.setattr(a._poller, "look", refuse)
    assert a.num_nodes_waiting() == 0


def test_an_agent_reacts_to_signals_while_the_store_blocks(make_job, capfd, monkeypatch):
    monkeypatch.setattr(handler, "SILENCE_S", 0.1)
    job = make_job("1:2")
    a, b = job.agent("node-a"), job.agent("node-b")
    assert job.ranks(a, b) == [0, 1]
    b._inner._stop_heartbeats()
    nodes = (pb.Node(id="node-b", name="rack 2"),)
    a._round = replace(a._round, members=RoundMembers("job", "node-a", "launch", 0, b"", nodes))
    job.shared.answers.clear()
    a._holder._synced_s = float("-inf")
    assert a.num_nodes_waiting() == a.num_nodes_waiting() == 0
    assert job.shared.blocked_calls == 1, "there is still only one question"
    a._signals.heard(a._round.members, AgentReaction(frozenset({"node-b"}), "OFFLINE: it is silent.", "node-b"))
    assert a.num_nodes_waiting() == 1 and job.shared.blocked_calls == 1
    assert "node rack 2: OFFLINE: it is silent. Workers restart now." in capfd.readouterr().err
    job.set_last_call(0)
    (joined,) = job.join(a)
    until(lambda: "store does not answer" in capfd.readouterr().err, what="the line about the store")
    assert not joined.done() and job.shared.blocked_calls == 1
    job.shared.answers.set()
    assert (joined.result(30).rank, joined.result().world_size) == (0, 1), (
        "the lost node is known even after a late read"
    )


def test_recording_events_searches_no_modules(make_job, monkeypatch):
    """torch's search takes tens of milliseconds between reading and writing the state.

    Meanwhile other agents write first; the more nodes, the more often.
    """
    searches, events = [], set()
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda *_: searches.append(1) or "")
    monkeypatch.setattr(
        rounds,
        "construct_and_record_rdzv_event",
        lambda run, message, state, name, *_, **__: events.add((name, message)),
    )
    job = make_job("2")
    a, b = job.agent("node-a"), job.agent("node-b")
    assert job.ranks(a, b) == job.ranks(a, b) == [0, 1]
    for name, action in (
        ("Executor", "added itself to the participants"),
        ("Executor", "updated its keep-alive heartbeat"),
        ("DynamicRendezvousHandler", "attempts to join the next round"),
    ):
        assert any(name == class_name and action in message for class_name, message in events), action
    assert not searches


def test_a_finished_job_can_start_again_under_its_name(make_job):
    job = make_job("1")
    first = job.agent("node-a")
    assert job.ranks(first) == [0]
    before = job.shared.state
    assert first.shutdown()
    assert not job.shared.state.everyone()
    second = job.agent("node-a")
    assert job.ranks(second) == [0]
    after = job.shared.state
    assert not after.closed and after.launch != before.launch and after.token != before.token
    assert after.round > before.round, "keys of old rounds must not be read again"


def test_an_agent_that_joins_an_ending_job_gets_an_error(make_job):
    job = make_job("2")
    a, b = job.agent("node-a"), job.agent("node-b")
    assert job.ranks(a, b) == [0, 1]
    assert a.shutdown()  # b has not left yet
    with pytest.raises(RendezvousClosedError):
        job.agent("node-c").next_rendezvous()


@pytest.mark.parametrize("has_failed", [True, False])
def test_the_others_end_only_with_a_node_that_has_failed(make_job, has_failed, capfd):
    job = make_job("2")
    a, b = job.agent("node-a"), job.agent("node-b")
    assert job.ranks(a, b) == [0, 1]
    with suppress(ValueError):
        try:
            if has_failed:
                raise ValueError("a worker failed, and no restart is left")
        finally:
            assert a.shutdown()
    until(lambda: b._inner.is_closed(), what="the end of the launch")
    if not has_failed:
        assert b.num_nodes_waiting() == 0, "its workers train to their end"
        return
    await_restart_reason(b)
    assert "node 0 has failed, and its agent ended the launch. Workers end now." in capfd.readouterr().err
    with pytest.raises(RendezvousClosedError):
        b.next_rendezvous()


def test_a_late_spare_that_shuts_down_does_not_end_the_job(make_job):
    job = make_job("1")
    a, spare = job.agent("node-a"), job.agent("node-s")
    assert job.ranks(a) == [0]
    assert spare.shutdown()
    assert not job.shared.state.closed


def test_the_reason_of_a_restart_is_said_in_each_round(make_job, capfd):
    job = make_job("2")
    a, b = job.agent("node-a"), job.agent("node-b")
    for _ in range(2):
        a._holder._is_gone = lambda facts, seen_s: False
        assert job.ranks(a, b) == [0, 1]
        lose(job, b)
        await_restart_reason(a)
        assert "lost node: 1. Workers restart now." in capfd.readouterr().err


# More agents than --nnodes


def test_a_spare_stays_a_spare_if_all_others_restart(make_job):
    job = make_job("2")
    a, b, spare = (job.agent(f"node-{name}") for name in "abs")
    assert job.ranks(a, b) == [0, 1]
    job.join(spare)
    until(lambda: spare._node in job.shared.state.redundancy_list, what="the spare to be listed")
    for first, second in ((a, b), (b, a)):
        (waiting,) = job.join(first)  # its worker failed, so it leaves the round
        until(lambda: spare._node in job.shared.state.wait_list, what="the spare to wait for the place")
        job.ranks(second)
        waiting.result(30)
        state = job.shared.state
        assert state.participants == {a._node: 0, b._node: 1}
        assert spare._node in state.redundancy_list and not state.wait_list
        assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0, "otherwise workers restart for ever"


def test_a_newcomer_waits_while_the_nodes_of_the_round_before_may_come(make_job):
    job = make_job("2", keep_alive_interval=1, keep_alive_max_attempt=2)
    state, now = SharedState(), datetime.now(timezone.utc)
    slow = [_NodeDesc(f"127.0.0.{number}", number, 0) for number in (1, 2)]  # they wait, and never join
    state.launch, state.wait_list, state.last_heartbeats = "launch", set(slow), dict.fromkeys(slow, now)
    state.facts = {node: AgentFacts(home=f"home-{node.pid}") for node in slow}
    state.places = [PreviousRank(0, Participant(str(slow[0]))), PreviousRank(1, Participant("earlier", "home-2"))]
    job.shared.set_state(encode(state))
    newcomer = job.agent("node-n")
    job.join(newcomer)
    until(lambda: newcomer._node in job.shared.state.wait_list, what="the newcomer to wait")
    assert set(job.shared.state.wait_list) == {*slow, newcomer._node} and not job.shared.state.participants
    # Once the slow ones are forgotten for their silence there is a place.
    until(lambda: newcomer._node in job.shared.state.participants, 30, "the newcomer to join")
    assert not job.shared.state.wait_list


def test_a_node_comes_back_under_another_agent_and_does_not_wait(make_job):
    job = make_job("2")
    a, b = job.agent("node-a"), job.agent("node-b")
    assert job.ranks(a, b) == [0, 1]
    back = job.agent("node-a", number=200)
    state = job.shared.state
    back._holder._state = back._inner._op_executor._state = state
    state.complete, state.participants = False, {}
    state.wait_list = {a._node, b._node}
    assert not back._inner._op_executor._yields()


# Agents that die between the join and the first exchange


def die(agent):
    """Acts as if the agent's machine were gone: it looks at the state no more."""
    agent._inner._stop_heartbeats()

    def sync(*_, **__):
        raise SystemExit

    agent._holder.sync = sync


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_with_a_node_that_died_while_it_was_open_is_left(make_job, rank, capfd):
    job = make_job("2", keep_alive_interval=1, keep_alive_max_attempt=2)
    job.store.set_timeout(timedelta(seconds=60))  # stands for read_timeout
    dead = job.agent("node-x", number=(100, 200)[rank])
    (dying,) = job.join(dead)
    until(lambda: job.shared.data and has_joined(job, dead), what="the agent that dies")
    die(dead)
    until(dying.done, what="its end")  # all agents share this store, and so its timeout
    a, b = job.agent("node-a"), job.agent("node-b")
    (first,) = job.join(a)
    until(lambda: set(job.shared.state.participants) == {dead._node, a._node}, what="the round with the dead node")
    assert job.shared.state.complete and job.shared.state.participants[dead._node] == rank
    (second,) = job.join(b)
    assert [first.result(30).rank, second.result(30).rank] == [1 - rank, rank]
    assert first.result().world_size == 2 and set(job.shared.state.participants) == {a._node, b._node}
    assert "This node joins the next one." in capfd.readouterr().err


def test_a_node_that_lives_and_does_not_come_is_waited_for_within_join_timeout(make_job):
    job = make_job("2", join_timeout=2)
    a, b = job.agent("node-a"), job.agent("node-b")
    stuck = threading.Event()
    b._inner._get_store = lambda: stuck.wait(30)  # torch calls it after the join
    waiting = job.join(a, b)
    with pytest.raises(RendezvousTimeoutError, match=r"agent of group rank 1 .* within join_timeout"):
        waiting[0].result(30)
    stuck.set()


def test_a_foreign_value_ends_the_agent(make_job):
    job = make_job("2")
    a = job.agent("node-a")

    def foreign():
        raise ForeignEntry("MASTER_ADDR was not made with this agent's job key")

    a._inner.next_rendezvous = foreign
    with pytest.raises(ForeignEntry):
        a.next_rendezvous()


def test_an_agent_that_is_interrupted_while_it_waits_leaves(make_job):
    job = make_job("2")
    a = job.agent("node-a")
    (waiting,) = job.join(a)
    until(lambda: job.shared.data and has_joined(job, a), what="the agent in the open round")
    sync = a._holder.sync

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    a._holder.sync = interrupted
    assert isinstance(waiting.exception(30), KeyboardInterrupt)
    a._holder.sync = sync
    assert a.shutdown()
    assert not job.shared.state.everyone() and not job.shared.state.closed


def test_an_interrupted_agent_does_not_wait_for_a_silent_store(make_job, monkeypatch):
    monkeypatch.setattr(handler, "SILENCE_S", 0.1)
    job = make_job("2")
    a = job.agent("node-a")
    (waiting,) = job.join(a)
    until(lambda: job.shared.data and has_joined(job, a), what="the agent in the open round")
    job.shared.answers.clear()
    assert a.shutdown() and not waiting.done()
    assert "reft-leave" in {thread.name for thread in threading.enumerate()}, "it still waits for the store"
    job.shared.answers.set()


def test_a_node_that_waits_says_for_whom(make_job, monkeypatch, capfd):
    monkeypatch.setattr(rounds, "WAIT_SAID_S", 0.0)
    job = make_job("2")
    a, b = job.agent("node-a"), job.agent("node-b")
    (first,) = job.join(a)
    said = []
    until(lambda: said.append(capfd.readouterr().err) or "have come" in "".join(said), what="the line")
    (line,) = "".join(said).splitlines()
    assert line == (
        "[reft] 1 of 2 nodes have come to the rendezvous. This node waits for the others, at most for join_timeout (600 s)."
    )
    assert job.join(b)[0].result(30).world_size == first.result(30).world_size == 2
    job.join(job.agent("node-s"))
    until(lambda: said.append(capfd.readouterr().err) or "stands by" in "".join(said), what="the line of the spare")
    assert "[reft] this node stands by: the job has its 2 nodes." in "".join(said)


def test_a_node_that_waits_for_the_end_of_a_round_says_so(make_job, monkeypatch, capfd):
    monkeypatch.setattr(rounds, "WAIT_SAID_S", 0.0)
    job = make_job("2")
    a, b = job.agent("node-a"), job.agent("node-b")
    job.ranks(a, b)
    capfd.readouterr()
    (again,) = job.join(a)  # the workers of b have ended well, or end slowly
    said = []
    until(
        lambda: said.append(capfd.readouterr().err) or "1 node did not leave the round before" in "".join(said),
        what="the line",
    )
    assert job.join(b)[0].result(30).world_size == again.result(30).world_size == 2


def test_waiting_nodes_begin_the_next_round_if_the_last_member_leaves_this_one(make_job):
    job = make_job("1")
    a, b = job.agent("node-a"), job.agent("node-b")
    assert job.ranks(a) == [0]
    (waiting,) = job.join(b)
    until(lambda: job.shared.state.redundancy_list, what="the spare to be listed")
    a._round = replace(a._round, number=-1)  # as if it were interrupted before it had its first workers
    assert a.shutdown()
    assert waiting.result(30).rank == 0


# Silence, by this agent's own clock


def holder_of(job, agent, keep_alive_s=0.3):
    settings = agent._inner.settings
    object.__setattr__(
        settings, "keep_alive_interval", timedelta(seconds=keep_alive_s / settings.keep_alive_max_attempt)
    )
    return StateHolder(job.shared, settings, agent._node, lambda facts, seen_s: False, EntrySeal("job", None))


def test_a_wrong_clock_removes_no_node_but_silence_does(make_job):
    job = make_job("1:2")
    state = SharedState()
    other = _NodeDesc("other", 1, 0)
    state.participants, state.last_heartbeats = {other: 0}, {other: datetime.now(timezone.utc) - timedelta(hours=1)}
    job.shared.set_state(encode(state))
    holder = holder_of(job, job.agent("node-a"))
    holder.sync(fresh=True)
    assert other in holder.state.participants

    def is_forgotten():
        holder.sync(fresh=True)
        return not job.shared.state.participants

    until(is_forgotten, what="the removal of the silent node")
    assert job.shared.state.round == 0, "an incomplete round continues"


def run_operation(agent, operation):
    agent._inner._op_executor.run(operation(), time.monotonic() + 20)


def test_a_clock_that_was_set_back_delays_no_sign_of_life(make_job):
    job = make_job("1:2")
    agent, hour, state = job.agent("node-a"), timedelta(hours=1), SharedState()
    state.participants, state.last_heartbeats = {agent._node: 0}, {agent._node: datetime.now(timezone.utc) + hour}
    job.shared.set_state(encode(state))
    run_operation(agent, dynamic_rendezvous._RendezvousKeepAliveOp)
    assert job.shared.state.last_heartbeats[agent._node] <= datetime.now(timezone.utc)


def test_a_round_completes_though_its_deadline_lies_far_ahead_of_this_clock(make_job):
    job = make_job("2:4", last_call_timeout=1)
    state, others, now = SharedState(), [_NodeDesc(name, 1, 0) for name in "pq"], datetime.now(timezone.utc)
    state.participants, state.last_heartbeats = dict.fromkeys(others, 0), dict.fromkeys(others, now)
    state.deadline = now + timedelta(hours=1)
    job.shared.set_state(encode(state))
    run_operation(job.agent("node-a"), dynamic_rendezvous._RendezvousJoinOp)
    assert job.shared.state.complete and len(job.shared.state.participants) == 3


@pytest.mark.parametrize("places", [[], [PreviousRank(0, Participant("p", "p"))]])
def test_a_round_waits_for_more_nodes_though_its_deadline_is_over_by_this_clock(make_job, places):
    """The host whose agent wrote the deadline has a clock that is behind."""
    job = make_job("2:3", last_call_timeout=30)
    state, other, now = SharedState(), _NodeDesc("p", 1, 0), datetime.now(timezone.utc)
    state.participants, state.last_heartbeats, state.places = {other: 0}, {other: now}, places
    job.shared.set_state(encode(state))
    here, late = job.agent("node-a"), job.agent("node-b")
    here._inner._op_executor._shrink_s = 30.0
    here._holder.sync(fresh=True)
    joining = threading.Thread(target=run_operation, args=(here, dynamic_rendezvous._RendezvousJoinOp))
    joining.start()
    until(lambda: here._node in job.shared.state.participants, what="a quorum")
    behind = job.shared.state
    behind.deadline = now - timedelta(minutes=5)
    until(lambda: job.shared.set_state(encode(behind), job.shared.revision)[2], what="the deadline by another clock")
    reads = job.shared.reads
    until(lambda: job.shared.reads > reads + 3 or job.shared.state.complete, what="looks at that deadline")
    assert not job.shared.state.complete
    run_operation(late, dynamic_rendezvous._RendezvousJoinOp)
    joining.join(20)
    assert job.shared.state.complete and len(job.shared.state.participants) == 3


def test_an_agent_that_was_late_removes_no_node(make_job):
    job = make_job("1:2")
    state = SharedState()
    other = _NodeDesc("other", 1, 0)
    state.participants, state.last_heartbeats = {other: 0}, {other: datetime.now(timezone.utc)}
    job.shared.set_state(encode(state))
    holder = holder_of(job, job.agent("node-a"), keep_alive_s=30)
    holder.sync(fresh=True)
    holder._synced_s -= 60  # this agent was stopped for a minute, and the other's keep-alive is as old
    earlier = {"new_s": holder._last_beats[other].new_s - 60, "silent_s": holder._last_beats[other].silent_s - 60}
    holder._last_beats = {other: replace(holder._last_beats[other], **earlier)}
    holder.sync(fresh=True)
    assert other in holder.state.participants


# The JSON form


def test_the_state_is_unchanged_by_encode_and_decode():
    state = SharedState()
    a, b, c, d = (_NodeDesc(name, 7, i) for i, name in enumerate("abcd"))
    state.round, state.complete, state.closed = 3, True, True
    state.deadline = datetime.now(timezone.utc)
    state.participants, state.wait_list, state.redundancy_list = {a: 1, b: 0}, {c}, {d}
    state.last_heartbeats = {a: datetime.now(timezone.utc), c: datetime.now(timezone.utc)}
    facts = AgentFacts("process", "home", "name", "domain", ("unix:x", "h:1"), "user u")
    state.facts = dict.fromkeys((a, b, c, d), facts)
    state.places, state.launch, state.token = [PreviousRank(0, Participant("x", "y"))], "launch", "ab" * 32
    state.number, state.failed = 7, "n1"
    assert vars(decode(encode(state))) == vars(state)


@pytest.mark.parametrize("name", ["n1\n[reft] forged", "\x1b[2J", "n" * (TEXT_MAX + 1)])
def test_a_name_that_would_forge_lines_is_refused(name):
    state, node = SharedState(), _NodeDesc("a", 7, 0)
    state.participants, state.facts = {node: 0}, {node: AgentFacts(name=name)}
    with pytest.raises(RendezvousStateError, match="printable characters"):
        decode(encode(state))


def test_states_of_agents_of_an_earlier_version_are_read():
    state, node = SharedState(), _NodeDesc("a", 7, 0)
    state.participants, state.facts = {node: 0}, {node: AgentFacts(name="n1", certificates="user u")}
    earlier = encode(state).replace(b',"certificates":"user u"', b"").replace(b'"failed":"",', b"")
    assert b"failed" not in earlier and decode(earlier).failed == ""
    assert decode(earlier).facts == {node: AgentFacts(name="n1")}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"format": 2}', b"\x80\x04N.", encode(SharedState()).replace(b"[]", b"[[1]]", 1)]
)
def test_bytes_that_are_no_state_are_refused(data):
    with pytest.raises(RendezvousStateError):
        decode(data)


class FakeHeartbeatClient:
    """Stands for the heartbeat client of a handler that is dropped."""

    def __init__(self, *arguments):
        self.is_stopped = False
        self.whole = -1

    def begin(self, term):
        """Nothing."""

    def stop(self):
        self.is_stopped = True


def test_a_handler_that_is_dropped_without_shutdown_ends_its_threads(make_job, monkeypatch):
    monkeypatch.setattr(handler, "HeartbeatClient", FakeHeartbeatClient)
    job = make_job("1")
    inner = create_handler(
        job.store, job.shared, RendezvousParameters("reft", "", "job", 1, 1, local_addr="127.0.0.1", **job.options)
    )
    agent = ReftRendezvousHandler(inner, AgentFacts(), "none", shrink_s=0.3, daemon=("unix:/none", None, None))
    client, poller = agent._heartbeat_client, agent._poller._thread
    agent.next_rendezvous()
    assert agent.num_nodes_waiting() == 0 and poller.is_alive() and not client.is_stopped
    inner._stop_heartbeats()
    del agent, inner
    gc.collect()
    poller.join(20)
    assert not poller.is_alive() and client.is_stopped
