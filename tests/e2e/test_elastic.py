"""`torchrun --rdzv-backend=reft` on nodes that can be lost: who restarts, when, and under which rank.

Workers here are idlers without torch, where the state is not the point; agents, daemons, losses and namespaces are real.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from reft.cli.ask import ask
from reft.core.membership.failure_detector import BEAT_S, MISSES
from reft.wire.v1 import daemon_pb2 as pb
from tests.support import certificates, etcd, idler
from tests.support.idler import Idler
from tests.support.netns import marked, why_not
from tests.support.nodes import Machine, Nodes

IDLER = str(Path(idler.__file__))
# A keep-alive that is never over: what restarts idlers, which do not fail by themselves, are signals.
PATIENT = {"keep_alive_interval": "20", "keep_alive_max_attempt": "15"}
REFT: dict[str, Any] = {
    "backend": "reft", "agent": "torch.distributed.run", "script": [IDLER], "conf": PATIENT,
}  # fmt: skip
CALM_S = 3 * MISSES * BEAT_S  # three times what it takes to call a node lost

namespaces = pytest.mark.skipif(bool(why_not()), reason=f"processes of one machine see each other's end: {why_not()}")


def await_workers(nodes: Nodes, world: int, after_s: float = 0.0) -> dict[str, Idler]:
    """The newest worker of each node, once there are `world` of them that began after that moment."""
    folder = nodes._training.out
    found = nodes.until(lambda: idler.newest(folder, world, after_s), f"{world} workers of a new round")
    ranks = {node: each.rank for node, each in found.items()}
    nodes.note(f"workers of round {max(each.round for each in found.values())} run: {ranks}")
    return found


def ranks(found: dict[str, Idler]) -> dict[str, int]:
    return {node: each.rank for node, each in found.items()}


def machine(nodes: Nodes, name: str) -> Machine:
    return next(each for each in nodes.machines if each.name == name)


def daemon_of(nodes: Nodes, name: str) -> psutil.Process:
    (found,) = [
        p for p in marked(nodes._mark(name)) if "reft_daemon" in p.cmdline() and "nsenter" not in p.cmdline()[0]
    ]
    return found


def agents_say(nodes: Nodes, text: str) -> list[str]:
    """Names of nodes whose agents have said that."""
    logs = {each.name: nodes._training.out / f"{each.name}.log" for each in nodes.machines}
    return [name for name, log in logs.items() if log.exists() and text in log.read_text(errors="replace")]


def suspected_s(nodes: Nodes, observer: str, *names: str) -> float:
    """For how long that node's daemon has doubted all of these without a break; 0 if it does not."""
    reply = ask(machine(nodes, observer).address, "Signals", pb.SignalsRequest(job="job"), 10)
    ages = {each.node: each.age_s if each.signal == pb.SUSPECT else 0.0 for each in reply.nodes}
    return min(ages[name] for name in names)


def finish(nodes: Nodes) -> None:
    (nodes._training.out / "done").touch()
    nodes.until(lambda: all(each.agent.poll() == 0 for each in nodes.living if each.agent), "the end of all agents")


@namespaces
def test_a_lost_node_is_replaced_by_a_spare_under_its_rank_and_a_dead_daemon_restarts_nobody():
    with Nodes(3, ranks_per_node=1) as nodes:
        nodes.launch("job", 0, **REFT)
        before = await_workers(nodes, 3)
        (spare,) = nodes.replace()
        nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 3, "signals of the round on all members")
        began = len(idler.idlers(nodes._training.out))

        stopped, killed = (daemon_of(nodes, name) for name in ("node-1", "node-3"))
        stopped.send_signal(signal.SIGSTOP)
        killed.kill()
        nodes.note("one daemon stopped, one killed")
        # By the beats that the living daemon has missed, not by a clock of ours.
        nodes.until(lambda: suspected_s(nodes, "node-2", "node-1", "node-3") > CALM_S, "doubts that last")
        assert len(idler.idlers(nodes._training.out)) == began, nodes.story()
        stopped.send_signal(signal.SIGCONT)
        machine(nodes, "node-3").daemon = nodes.start_daemon(machine(nodes, "node-3"))
        nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 3, "signals of the round on all members, again")

        lost_s = nodes.lose(machine(nodes, "node-2"), silently=True)
        after = await_workers(nodes, 3, after_s=lost_s)
        expected = ranks(before)
        assert ranks(after) == {
            "node-1": expected["node-1"],
            "node-3": expected["node-3"],
            spare.name: expected["node-2"],
        }
        # Of its own daemon, or of the other agent, who was faster and told the store. The spare hears no signals.
        assert agents_say(nodes, "OFFLINE: "), nodes.story()
        assert agents_say(nodes, "Workers restart now") == ["node-1", "node-3"], nodes.story()
        finish(nodes)


@namespaces
@pytest.mark.skipif(bool(certificates.why_not()), reason=certificates.why_not())
@pytest.mark.parametrize("has_agent_some", [True, False])
def test_an_agent_is_heard_where_daemons_ask_for_certificates(tmp_path, has_agent_some):
    flags = certificates.Certificates(tmp_path).flags("ours")
    given = dict(zip(("REFT_TLS_CERT", "REFT_TLS_KEY", "REFT_TLS_CA"), flags[1::2], strict=True))
    with Nodes(2, ranks_per_node=1, daemon_flags=flags) as nodes:
        nodes.launch("job", 0, environment=given if has_agent_some else {}, **REFT)
        await_workers(nodes, 2)
        if has_agent_some:
            nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 2, "signals of the round on all members")
            daemon_of(nodes, "node-2").kill()
            nodes.until(lambda: suspected_s(nodes, "node-1", "node-2") > CALM_S, "a doubt that lasts, and no more")
        said = agents_say(nodes, "the daemons use TLS, and this agent has no certificates")
        assert said == ([] if has_agent_some else ["node-1", "node-2"]), nodes.story()
        finish(nodes)


@namespaces
@pytest.mark.slow
def test_a_node_that_is_cut_off_is_given_up_and_joins_anew_when_it_is_back():
    with Nodes(3, ranks_per_node=1) as nodes:
        nodes.launch("job", 0, fewest=2, **REFT)
        before = await_workers(nodes, 3)
        nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 3, "signals of the round on all members")
        away = machine(nodes, "node-2").living
        away.cut()
        cut_s = time.monotonic()
        nodes.note("node-2 is cut off")
        two = await_workers(nodes, 2, after_s=cut_s)
        assert sorted(ranks(two)) == ["node-1", "node-3"] and sorted(ranks(two).values()) == [0, 1]
        away.heal()
        back_s = time.monotonic()
        nodes.note("node-2 is back")
        after = await_workers(nodes, 3, after_s=back_s)
        assert sorted(ranks(after).values()) == [0, 1, 2]
        assert after["node-2"].pid != before["node-2"].pid
        assert {node: ranks(after)[node] for node in ranks(two)} == ranks(two), "those who stayed keep their ranks"
        finish(nodes)


@namespaces
@pytest.mark.slow
def test_two_nodes_die_at_once_and_a_third_in_the_middle_of_the_rendezvous():
    with Nodes(4, ranks_per_node=1) as nodes:
        nodes.launch("job", 0, fewest=1, **REFT)
        before = ranks(await_workers(nodes, 4))
        nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 4, "signals of the round on all members")
        nodes.lose(machine(nodes, "node-2"), machine(nodes, "node-3"), silently=True)
        nodes.until(lambda: agents_say(nodes, "OFFLINE: "), "a survivor that knows")
        lost_s = nodes.lose(machine(nodes, "node-4"), silently=True)
        alone = await_workers(nodes, 1, after_s=lost_s)
        assert ranks(alone) == {"node-1": 0} and before["node-1"] == 0
        finish(nodes)


@namespaces
@pytest.mark.slow
def test_a_spare_that_comes_in_the_middle_of_a_rendezvous_takes_the_place_that_is_missing():
    with Nodes(3, ranks_per_node=1) as nodes:
        nodes.launch("job", 0, environment={"LOGLEVEL": "INFO"}, **REFT)
        before = ranks(await_workers(nodes, 3))
        nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 3, "signals of the round on all members")
        lost_s = nodes.lose(machine(nodes, "node-1"), silently=True)
        nodes.until(lambda: agents_joining(nodes) == ["node-2", "node-3"], "both survivors in the rendezvous")
        (spare,) = nodes.replace()
        after = ranks(await_workers(nodes, 3, after_s=lost_s))
        assert after == {name: before[name] for name in ("node-2", "node-3")} | {spare.name: before["node-1"]}
        finish(nodes)


def agents_joining(nodes: Nodes) -> list[str]:
    """Names of nodes whose agents have begun a second rendezvous, or a later one."""
    logs = {each.name: nodes._training.out / f"{each.name}.log" for each in nodes.living}
    return [name for name, log in logs.items() if log.read_text(errors="replace").count("Rendezvous'ing worker") > 1]


@namespaces
@pytest.mark.skipif(bool(etcd.why_not()), reason=etcd.why_not())
@pytest.mark.slow
def test_the_host_of_the_stores_leader_is_lost_with_its_node():
    """Each node runs a member of the etcd; no call of an agent may wait for the lost one for long."""
    with Nodes(3, ranks_per_node=1) as nodes:
        places = [(each.living.address, each.living.enter([])) for each in nodes.machines]
        with etcd.EtcdCluster(3, places) as cluster:
            nodes.launch("job", 0, endpoint=cluster.endpoint, **REFT)
            before = ranks(await_workers(nodes, 3))
            nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 3, "signals of the round on all members")
            lost = nodes.machines[cluster.leader()]
            lost_s = nodes.lose(lost, silently=True)
            (spare,) = nodes.replace()
            after = ranks(await_workers(nodes, 3, after_s=lost_s))
            assert after.pop(spare.name) == before.pop(lost.name)
            assert after == before
            finish(nodes)
