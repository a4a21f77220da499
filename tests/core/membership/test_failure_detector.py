"""Tests signals of nodes: transitions, single rules, and clusters with a simulated clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reft.core.membership.failure_detector import (
    AFTER,
    BEAT_S,
    CUT_OFF_S,
    JOIN_S,
    LATE_S,
    MISSES,
    AgentPhase,
    FailureDetector,
    HeartbeatChannel,
    NodeFacts,
    NodeReport,
    Signal,
    WatchedNode,
    judge_audible,
    judge_silent,
    self_report,
)
from reft.core.membership.gossip_targets import REACH
from reft.core.membership.progress import Stall

WELL = (Signal.HEALTHY, Signal.SNAP)
TICK_S = 0.1
KNOWN_S = 1.5  # every survivor must know of a loss by then


class Cluster:
    """Nodes with a daemon and an agent each, and a network. All can fail; time passes in ticks."""

    def __init__(self, count: int, agents: bool = True, seed: int = 0) -> None:
        self.nodes = [f"n{i}" for i in range(count)]
        self.now_s = 100.0
        self.lookouts = {n: FailureDetector(n, {m: m for m in self.nodes}, self.now_s) for n in self.nodes}
        self.facts = {n: NodeFacts(agent=AgentPhase.TRAINING if agents else None) for n in self.nodes}
        self.daemon_down: set[str] = set()
        self.agent_down: set[str] = set() if agents else set(self.nodes)
        self.cut: set[frozenset[str]] = set()
        self.still: set[str] = set()
        self.late_s: dict[str, float] = {}
        chance = random.Random(seed)
        # Daemons beat at the same rate, but at different moments.
        self.due_s = {n: self.now_s + BEAT_S * chance.random() for n in self.nodes}
        self.agent_due_s = {n: self.now_s + BEAT_S * chance.random() for n in self.nodes}

    def lose(self, *nodes: str) -> None:
        self.daemon_down |= set(nodes)
        self.agent_down |= set(nodes)

    def isolate(self, node: str) -> None:
        self.cut |= {frozenset((node, other)) for other in self.nodes if other != node}

    def word(self, node: str) -> NodeReport:
        return self_report(node, self.facts[node])

    def reaches(self, a: str, b: str) -> bool:
        return frozenset((a, b)) not in self.cut

    def beat(self, source: str, target: str) -> None:
        if source in self.daemon_down or target in self.daemon_down or not self.reaches(source, target):
            return
        one, other = self.lookouts[source], self.lookouts[target]
        news = other.spoke(source, one.reports(self.word(source)), one.heard_s(self.now_s), self.now_s)
        back = one.answered(target, other.reports(self.word(target)), other.heard_s(self.now_s), self.now_s)
        for node, changes in ((target, news), (source, back)):
            self.passed_on(node, changes)

    def passed_on(self, node: str, changes: Iterable) -> None:
        if any(change.after.is_final for change in changes):
            for passer in self.lookouts[node].news_targets():
                self.beat(node, passer)

    def tick(self) -> None:
        self.now_s += TICK_S
        for node in self.nodes:
            if node not in self.daemon_down and self.due_s[node] <= self.now_s:
                self.due_s[node] = self.now_s + BEAT_S
                for other in self.lookouts[node].watched_nodes():
                    self.beat(node, other)
            if node not in self.agent_down and self.agent_due_s[node] <= self.now_s:
                self.agent_due_s[node] = self.now_s + BEAT_S
                for other in self.lookouts[node].watched_nodes():
                    if other not in self.daemon_down and self.reaches(node, other):
                        self.lookouts[other].agent_spoke(node, self.facts[node].agent, self.now_s)
        for node in self.nodes:
            if node not in self.daemon_down:
                late_s = self.late_s.pop(node, 0.0)
                changes = self.lookouts[node].look(self.now_s, late_s, self.word(node), node in self.still)
                self.passed_on(node, changes)

    def run(self, seconds: float) -> Cluster:
        for _ in range(round(seconds / TICK_S)):
            self.tick()
        return self

    def seen(self, observer: str, node: str) -> Signal:
        return self.lookouts[observer].members[node].signal

    def kind(self, observer: str, node: str) -> str:
        return self.lookouts[observer].members[node].kind

    def anywhere(self, signal: Signal) -> set[tuple[str, str]]:
        """Returns (observer, node) for each node that some running daemon sees in this state."""
        return {
            (o, n) for o in self.nodes if o not in self.daemon_down for n in self.nodes if self.seen(o, n) is signal
        }


# The table of transitions


def test_each_transition_gives_the_greater_final_or_the_newest_signal():
    """Compares the table with a simple rule, over all pairs."""
    for now, judged in itertools.product(Signal, Signal):
        if now.is_final or judged.is_final:
            expected = max(now, judged) if now.is_final and judged.is_final else now if now.is_final else judged
        else:
            expected = now if judged is Signal.JOINING else judged
        assert AFTER[now][judged] is expected, (now, judged)


@settings(max_examples=30)
@given(st.lists(st.sampled_from([s for s in Signal if s.is_final]), min_size=1, max_size=6), st.randoms())
def test_final_reports_in_any_order_and_number_give_the_same_signal(judged, chance):
    ends = set()
    for _ in range(4):
        detector = FailureDetector("a", {"a": "a", "b": "b"}, 0.0)
        order = judged * 2
        chance.shuffle(order)
        for each in order:
            detector.take_report(NodeReport("b", each), 1.0)
        ends.add(detector.members["b"].signal)
    assert ends == {max(judged)}


def test_signals_that_are_not_final_are_never_passed_on():
    detector = FailureDetector("a", {"a": "a", "b": "b", "c": "c"}, 0.0)
    for signal in (Signal.JOINING, *WELL, Signal.SUSPECT):
        assert detector.spoke("b", [NodeReport("b", Signal.HEALTHY), NodeReport("c", signal)], {}, 1.0) == []
    assert detector.members["c"].signal is Signal.JOINING
    assert detector.take_report(NodeReport("nobody", Signal.OFFLINE), 1.0) == []


# Self reports


@pytest.mark.parametrize(
    ("facts", "signal", "text"),
    [
        (NodeFacts(), Signal.HEALTHY, ""),
        (NodeFacts(snaps=True), Signal.SNAP, ""),
        (NodeFacts(died=((3, 42),)), Signal.UNHEALTHY, "the trainer of rank 3, process 42, died."),
        (NodeFacts(died=((3, 42),), agent=AgentPhase.TRAINING), Signal.UNHEALTHY, "died"),
        (NodeFacts(died=((3, 42),), agent=AgentPhase.STOPPING), Signal.HEALTHY, ""),
        (NodeFacts(agent=AgentPhase.DEAD, agent_pid=7), Signal.UNHEALTHY, "its agent, process 7, has ended."),
        (NodeFacts(agent=AgentPhase.FAILED), Signal.UNHEALTHY, "a worker failed"),
        (NodeFacts(agent=AgentPhase.FINISHED, died=((3, 42),)), Signal.COMPLETED, "its training has ended."),
        (NodeFacts(closed=True), Signal.COMPLETED, "ended"),
        (NodeFacts(late_s=1.25), Signal.SUSPECT, "1.2 s late"),
        (NodeFacts(stall=Stall(5, 17, 12.0, 0.25, True)), Signal.SUSPECT,
         "rank 5 stands still at step 17: no step for 12 s, 0.25 s are usual; its process is stopped."),
        (NodeFacts(left_behind="round 1 is over."), Signal.OFFLINE, "round 1 is over."),
    ],
)  # fmt: skip
def test_a_nodes_self_report(facts, signal, text):
    word = self_report("a", facts)
    assert word.signal is signal and text in word.reason
    assert (word.stall is not None) == (facts.stall is not None)


# Clusters


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_all_nodes_of_a_healthy_cluster_are_healthy(count):
    cluster = Cluster(count).run(5)
    for observer in cluster.nodes:
        for node in {observer, *cluster.lookouts[observer].watched_nodes()}:
            assert cluster.seen(observer, node) is Signal.HEALTHY
        assert len(cluster.lookouts[observer].watched_nodes()) == min(count - 1, 2 * REACH)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_a_lost_node_is_known_to_all_in_time(count):
    for seed in range(48 // count):
        cluster = Cluster(count, seed=seed).run(3 + seed / 7)
        cluster.lose("n1")
        cluster.run(KNOWN_S)
        expected = {(observer, "n1") for observer in cluster.nodes if observer != "n1"}
        assert cluster.anywhere(Signal.OFFLINE) == expected, seed


@pytest.mark.parametrize(("count", "seconds"), [(2, 60), (3, 20), (4, 10)])
def test_silent_daemons_never_make_a_node_offline(count, seconds):
    """Any number of daemons are stopped or killed, for long: their agents still beat."""
    nodes = [f"n{i}" for i in range(count)]
    for down in itertools.chain.from_iterable(itertools.combinations(nodes, k) for k in range(1, count)):
        cluster = Cluster(count).run(2)
        cluster.daemon_down = set(down)
        cluster.run(seconds)
        assert not cluster.anywhere(Signal.OFFLINE)
        living = [node for node in nodes if node not in down]
        assert all(cluster.seen(o, n) is Signal.SUSPECT for o in living for n in down)
        cluster.daemon_down = set()
        for node in down:
            cluster.late_s[node] = float(seconds)
        cluster.run(3)
        assert all(cluster.seen(o, n) is Signal.HEALTHY for o in nodes for n in nodes)


def test_silent_agents_never_make_a_node_offline():
    cluster = Cluster(3).run(2)
    cluster.agent_down = set(cluster.nodes)
    cluster.run(30)
    assert not cluster.anywhere(Signal.OFFLINE)
    assert cluster.seen("n0", "n1") is Signal.SUSPECT and cluster.kind("n0", "n1") == "agent"


@pytest.mark.parametrize("count", [3, 5, 8])
def test_a_broken_link_between_two_nodes_makes_no_node_offline(count):
    cluster = Cluster(count).run(3)
    broken = cluster.lookouts["n0"].watched_nodes()[0]
    cluster.cut.add(frozenset(("n0", broken)))
    cluster.run(30)
    assert not cluster.anywhere(Signal.OFFLINE)
    assert cluster.kind("n0", broken) == cluster.kind(broken, "n0") == "link"
    cluster.cut.clear()
    cluster.run(2)
    assert cluster.seen("n0", broken) is Signal.HEALTHY


@pytest.mark.parametrize("seed", range(20))
def test_a_node_that_is_cut_off_does_not_report_others_lost(seed):
    cluster = Cluster(4, seed=seed).run(3 + seed / 7)
    cluster.isolate("n3")
    cluster.run(KNOWN_S)
    assert cluster.anywhere(Signal.OFFLINE) == {(o, "n3") for o in ("n0", "n1", "n2")}
    assert {cluster.kind("n3", n) for n in ("n0", "n1", "n2")} == {"alone"}
    cluster.run(CUT_OFF_S)
    assert cluster.seen("n3", "n0") is Signal.OFFLINE  # after CUT_OFF_S a cut-off node gives up the others


@pytest.mark.parametrize("is_daemon", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_after_a_short_cut_no_other_node_is_lost(is_daemon, seed):
    """Connections return one by one. An agent may come first, or a daemon that hears no node."""
    cluster = Cluster(40, seed=seed).run(3 + seed / 7)
    cluster.isolate("n3")
    detector = cluster.lookouts["n3"]
    first, other = detector.watched_nodes()[:2]
    while cluster.kind("n3", other) != "alone":
        cluster.tick()
    for _ in range(5 if is_daemon else 30):
        if is_daemon:
            detector.answered(first, [], {}, cluster.now_s)
        else:
            detector.agent_spoke(first, AgentPhase.TRAINING, cluster.now_s)
        cluster.tick()
    cluster.cut.clear()
    cluster.run(3)
    assert {node for _, node in cluster.anywhere(Signal.OFFLINE)} <= {"n3"}


@pytest.mark.parametrize("count", [4, 40])
def test_a_given_up_node_that_returns_makes_no_other_node_offline(count):
    cluster = Cluster(count).run(3)
    mine = cluster.lookouts["n3"].watched_nodes()
    cluster.isolate("n3")
    cluster.run(CUT_OFF_S + 2)
    assert all(cluster.seen("n3", other) is Signal.OFFLINE for other in mine), "it had to assume so"
    cluster.cut.clear()
    cluster.run(5)
    others = [node for node in cluster.nodes if node != "n3"]
    assert {(o, n) for o, n in cluster.anywhere(Signal.OFFLINE) if o != "n3"} == {(o, "n3") for o in others}


def test_news_of_distant_nodes_do_not_hide_silent_neighbours():
    names = [f"n{i}" for i in range(40)]
    detector = FailureDetector("n0", {node: node for node in names}, 0.0)
    near = detector.watched_nodes()
    far = next(node for node in names[1:] if node not in near)
    for node in near:
        detector.spoke(node, [NodeReport(node, Signal.HEALTHY)], {}, 0.1)
        detector.agent_spoke(node, AgentPhase.TRAINING, 0.1)
    for tick in range(1, round((CUT_OFF_S + 2) / TICK_S)):
        detector.spoke(far, [], {}, tick * TICK_S)
        detector.look(tick * TICK_S, 0.0, NodeReport("n0", Signal.HEALTHY), False)
    assert {detector.members[node].signal for node in near} == {Signal.OFFLINE}


def test_a_given_up_node_is_believed_only_about_itself_and_the_listener():
    detector = FailureDetector("a", {node: node for node in "abc"}, 0.0)
    detector.take_report(NodeReport("b", Signal.OFFLINE), 1.0)
    detector.spoke(
        "b",
        [NodeReport("b", Signal.COMPLETED), NodeReport("c", Signal.OFFLINE), NodeReport("a", Signal.OFFLINE)],
        {},
        2.0,
    )
    signals = {node: each.signal for node, each in detector.members.items()}
    assert signals == {"a": Signal.OFFLINE, "b": Signal.COMPLETED, "c": Signal.JOINING}


def test_a_node_that_was_cut_off_learns_that_it_was_given_up():
    cluster = Cluster(4).run(3)
    cluster.isolate("n3")
    cluster.run(4)
    cluster.cut.clear()
    # The others do not call the node any more. The node calls them, and learns it from an answer.
    cluster.run(2)
    assert cluster.seen("n3", "n3") is Signal.OFFLINE
    assert cluster.anywhere(Signal.OFFLINE) == {(o, "n3") for o in cluster.nodes}


def test_a_lost_node_that_was_heard_since_is_not_listed():
    cluster = Cluster(4).run(3)
    cluster.isolate("n3")
    cluster.run(4)
    assert [set(cluster.lookouts[n].lost()) for n in ("n0", "n1", "n2")] == [{"n3"}] * 3
    assert all(cluster.now_s - 4 < each < cluster.now_s - 2 for each in cluster.lookouts["n0"].lost().values())
    cluster.cut.clear()
    cluster.run(2)
    assert cluster.anywhere(Signal.OFFLINE) == {(o, "n3") for o in cluster.nodes}
    assert [each.lost() for each in cluster.lookouts.values()] == [{}] * 4


def test_two_lost_at_once_in_a_job_of_three():
    cluster = Cluster(3).run(3)
    cluster.lose("n1", "n2")
    cluster.run(CUT_OFF_S + 2)
    assert cluster.anywhere(Signal.OFFLINE) == {("n0", "n1"), ("n0", "n2")}


@pytest.mark.parametrize("late_s", [2 * LATE_S, 60.0])
def test_a_late_node_judges_no_other(late_s):
    """The node was stopped, and so heard no other; the others were not stopped."""
    cluster = Cluster(3).run(3)
    cluster.daemon_down = {"n0"}
    cluster.run(late_s)
    cluster.daemon_down.clear()
    cluster.late_s["n0"] = late_s
    for _ in range(20):
        cluster.tick()
        assert cluster.seen("n0", "n1") is Signal.HEALTHY
    assert not cluster.anywhere(Signal.OFFLINE)


def test_a_late_node_still_finds_a_lost_node():
    cluster = Cluster(2).run(3)
    cluster.lose("n1")
    cluster.late_s["n0"] = 1.0
    cluster.run(MISSES * BEAT_S)
    assert cluster.seen("n0", "n1") is Signal.HEALTHY
    cluster.run(3 * TICK_S)
    assert cluster.seen("n0", "n1") is Signal.OFFLINE


def test_a_late_node_does_not_count_its_own_patience_as_a_sign_of_life():
    cluster = Cluster(2).run(3)
    cluster.daemon_down = {"n1"}
    cluster.run(2)
    cluster.late_s["n0"] = 1.0
    for _ in range(8):
        cluster.tick()
        assert cluster.seen("n0", "n1") is Signal.SUSPECT


def test_a_slow_node_gets_more_patience_and_a_fast_one_does_not():
    slow, brisk = FailureDetector("a", {"a": "a", "b": "b"}, 0.0), FailureDetector("a", {"a": "a", "b": "b"}, 0.0)
    for detector, gap_s in ((slow, 0.8), (brisk, BEAT_S)):
        for i in range(1, 6):
            detector.spoke("b", [NodeReport("b", Signal.HEALTHY)], {}, i * gap_s)
    for detector, last_s in ((slow, 4.0), (brisk, 5 * BEAT_S)):
        detector.look(last_s + 1.2, 0.0, NodeReport("a", Signal.HEALTHY), False)
    assert (slow.members["b"].signal, brisk.members["b"].signal) == (Signal.HEALTHY, Signal.SUSPECT)


def test_without_agents_the_training_is_the_second_witness():
    cluster = Cluster(3, agents=False).run(3)
    cluster.daemon_down = {"n2"}
    cluster.run(30)
    assert cluster.seen("n0", "n2") is Signal.SUSPECT
    cluster.still = {"n0"}
    cluster.run(0.5)
    assert cluster.anywhere(Signal.OFFLINE) == {("n0", "n2"), ("n1", "n2")}


def test_stalled_ranks_alone_make_no_node_offline():
    cluster = Cluster(3, agents=False).run(3)
    cluster.still = set(cluster.nodes)
    assert not cluster.run(30).anywhere(Signal.OFFLINE)
    assert not cluster.anywhere(Signal.UNHEALTHY)


def test_a_stalled_rank_does_not_outweigh_a_living_agent():
    cluster = Cluster(3).run(3)
    cluster.daemon_down, cluster.still = {"n2"}, set(cluster.nodes)
    assert not cluster.run(30).anywhere(Signal.OFFLINE)


def test_a_node_that_was_never_heard_is_not_judged():
    cluster = Cluster(3)
    cluster.lose("n2")
    cluster.run(JOIN_S - 1)
    assert cluster.seen("n0", "n2") is Signal.JOINING
    cluster.run(2)
    assert cluster.anywhere(Signal.SUSPECT) >= {("n0", "n2"), ("n1", "n2")}


@pytest.mark.parametrize("is_still", [False, True])
def test_a_closed_port_gives_up_no_node_in_any_round(is_still):
    """Only daemons and agents use the port: the ranks train on, and a restart would help nobody."""
    cluster = Cluster(4)
    cluster.isolate("n2")
    cluster.still = set(cluster.nodes) if is_still else set()  # a long validation, for example
    cluster.run(10 * JOIN_S)
    assert not cluster.anywhere(Signal.OFFLINE)
    assert cluster.kind("n0", "n2") == cluster.kind("n2", "n0") == "unheard"


def test_a_daemon_that_was_down_when_the_round_began_stops_no_training():
    """The node's agent finds its watchers by itself."""
    cluster = Cluster(3)
    cluster.daemon_down = {"n2"}
    cluster.run(JOIN_S + 15)
    assert cluster.seen("n0", "n2") is Signal.SUSPECT and not cluster.anywhere(Signal.OFFLINE)


def heard_at(*times_s: float) -> HeartbeatChannel:
    channel = HeartbeatChannel()
    for time_s in times_s:
        channel = channel.heard(time_s)
    return channel


HEARD, NEVER = heard_at(1.0), heard_at()


@pytest.mark.parametrize(
    ("node", "is_alone", "is_still", "signal", "kind"),
    [
        (WatchedNode("b", HEARD, HEARD, NEVER), False, False, Signal.SUSPECT, "daemon False"),
        (WatchedNode("b", HEARD, HEARD, NEVER, gone=True), False, False, Signal.SUSPECT, "daemon True"),
        (WatchedNode("b", HEARD, HEARD, NEVER), False, True, Signal.OFFLINE, "lost"),
        (WatchedNode("b", HEARD, HEARD, NEVER), True, True, Signal.SUSPECT, "alone"),
        (WatchedNode("b", HEARD, HEARD, heard_at(1.0)), False, False, Signal.OFFLINE, "lost"),
        (WatchedNode("b", HEARD, HEARD, heard_at(4.9)), False, True, Signal.SUSPECT, "daemon False"),
        (WatchedNode("b", HEARD, HEARD, NEVER, others_s=4.9, other="c"), False, True, Signal.SUSPECT, "link"),
        (WatchedNode("b", NEVER, NEVER, NEVER), False, False, Signal.OFFLINE, "lost"),
    ],
)  # fmt: skip
def test_a_silent_node_is_judged_by_its_witnesses(node, is_alone, is_still, signal, kind):
    assert judge_silent(node, 5.0, 0.0, is_alone, is_still)[:2] == (signal, kind)


@pytest.mark.parametrize(
    ("node", "silence_from_s", "judgement"),
    [
        (WatchedNode("b", NEVER, NEVER, NEVER), 0.0, None),
        (WatchedNode("b", heard_at(4.9), NEVER, NEVER), 0.0, (Signal.HEALTHY, "", "")),
        (WatchedNode("b", heard_at(4.9), NEVER, NEVER), 4.95, None),
        (WatchedNode("b", heard_at(4.9), HEARD, NEVER), 0.0,
         (Signal.SUSPECT, "half", "the link is half open: its daemon calls, but does not answer.")),
        (WatchedNode("b", heard_at(4.9), NEVER, heard_at(1.0), word=NodeReport("b", Signal.SNAP)), 0.0,
         (Signal.SUSPECT, "agent", "its agent is silent, its daemon is not.")),
        (WatchedNode("b", heard_at(4.9), NEVER, heard_at(1.0), word=NodeReport("b", Signal.COMPLETED, "x")), 0.0,
         (Signal.COMPLETED, "told", "x")),
    ],
)  # fmt: skip
def test_an_audible_node_is_judged_by_its_word(node, silence_from_s, judgement):
    assert judge_audible(node, 5.0, silence_from_s) == judgement


def test_a_half_open_link_is_distinguished_from_a_silent_daemon():
    detector = FailureDetector("a", {"a": "a", "b": "b"}, 0.0)
    healthy = [NodeReport("b", Signal.HEALTHY)]
    detector.spoke("b", healthy, {}, 1.0)
    detector.answered("b", healthy, {}, 1.0)
    for i in range(6):
        detector.answered("b", healthy, {}, 1.3 + i * BEAT_S)
    detector.look(2.9, 0.0, NodeReport("a", Signal.HEALTHY), False)
    assert detector.members["b"].signal is Signal.SUSPECT
    assert detector.members["b"].reason == "the link is half open: its daemon answers, but its own calls do not arrive."
    detector.look(5.0, 0.0, NodeReport("a", Signal.HEALTHY), False)
    assert detector.members["b"].kind.startswith("daemon")


def test_a_worker_that_died_is_known_to_all_at_once():
    cluster = Cluster(9).run(3)
    cluster.facts["n4"] = NodeFacts(died=((4, 1),))
    cluster.run(TICK_S)
    assert cluster.anywhere(Signal.UNHEALTHY) == {(o, "n4") for o in cluster.nodes}
    cluster.lose("n4")
    cluster.run(KNOWN_S)
    assert {n for _, n in cluster.anywhere(Signal.OFFLINE)} == {"n4"}


def test_a_completed_node_may_vanish():
    cluster = Cluster(4).run(3)
    cluster.facts["n3"] = NodeFacts(agent=AgentPhase.FINISHED)
    cluster.run(1)
    cluster.lose("n3")
    cluster.run(30)
    assert not cluster.anywhere(Signal.OFFLINE)
    assert cluster.anywhere(Signal.COMPLETED) == {(o, "n3") for o in cluster.nodes if o != "n3"}


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(6, 20))
@example(2551, 17)
def test_all_survivors_learn_of_any_lost_nodes(seed, count):
    """Also neighbours are lost: the ring closes over the gap. No living node is given up."""
    chance = random.Random(seed)
    cluster = Cluster(count, seed=seed).run(2)
    lost = chance.sample(cluster.nodes, chance.randrange(1, count - 2))
    for some in (lost[: len(lost) // 2], lost[len(lost) // 2 :]):
        cluster.lose(*some)
        cluster.run(chance.random() * 2)
    survivors = set(cluster.nodes) - set(lost)
    cluster.still = (
        survivors  # the only witness against a node that was lost before its agent had called its new neighbours
    )
    cluster.run(CUT_OFF_S + JOIN_S + 10)
    assert cluster.anywhere(Signal.OFFLINE) == {(o, n) for o in survivors for n in lost}


def test_news_reach_a_large_job_in_a_few_hops():
    cluster = Cluster(64).run(1)
    cluster.lose("n5")
    cluster.run(KNOWN_S)
    assert cluster.anywhere(Signal.OFFLINE) == {(o, "n5") for o in cluster.nodes if o != "n5"}
