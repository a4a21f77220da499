"""`torchrun --rdzv-backend=reft` on nodes that are lost: who restarts, when, and with which rank.

These workers are idlers without torch: the state does not matter here. Agents, daemons, losses and
network namespaces are real.
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
from tests.support.netns import why_not
from tests.support.nodes import Machine, Nodes

IDLER = str(Path(idler.__file__))
# A keep-alive that never expires. Idlers do not fail by themselves, so only signals restart them.
PATIENT = {"keep_alive_interval": "20", "keep_alive_max_attempt": "15"}
REFT: dict[str, Any] = {
    "backend": "reft", "agent": "torch.distributed.run", "script": [IDLER], "conf": PATIENT,
}  # fmt: skip
CALM_S = 3 * MISSES * BEAT_S  # three times the time after which a node counts as lost

namespaces = pytest.mark.skipif(bool(why_not()), reason=f"processes of one machine see each other's end: {why_not()}")


def await_workers(nodes: Nodes, world: int, after_s: float = 0.0) -> dict[str, Idler]:
    """Waits for `world` workers that began after that moment; returns the newest of each node."""
    folder = nodes._training.out
    workers = nodes.until(lambda: idler.newest(folder, world, after_s), f"{world} workers of a new round")
    ranks_by_node = {node: each.rank for node, each in workers.items()}
    nodes.note(f"workers of round {max(each.round for each in workers.values())} run: {ranks_by_node}")
    return workers


def ranks(workers: dict[str, Idler]) -> dict[str, int]:
    return {node: each.rank for node, each in workers.items()}


def machine(nodes: Nodes, name: str) -> Machine:
    return next(each for each in nodes.machines if each.name == name)


def daemon_of(nodes: Nodes, name: str) -> psutil.Process:
    return nodes.daemon_process(machine(nodes, name))


def nodes_whose_agent_logged(nodes: Nodes, text: str) -> list[str]:
    """Returns the names of nodes whose agents have logged this text."""
    logs = {each.name: nodes._training.out / f"{each.name}.log" for each in nodes.machines}
    return [name for name, log in logs.items() if log.exists() and text in log.read_text(errors="replace")]


def suspected_s(nodes: Nodes, observer: str, *names: str) -> float:
    """Returns for how long the observer's daemon has suspected all named nodes without a break.

    Returns 0 if one of the nodes is not suspected.
    """
    reply = ask(machine(nodes, observer).address, "Signals", pb.SignalsRequest(job="job"), 10)
    ages = {each.node: each.age_s if each.signal == pb.SUSPECT else 0.0 for each in reply.nodes}
    return min(ages[name] for name in names)


def finish(nodes: Nodes) -> None:
    (nodes._training.out / "done").touch()
    nodes.until(lambda: all(each.agent.poll() == 0 for each in nodes.living if each.agent), "the end of all agents")


@namespaces
def test_a_spare_gets_the_rank_of_a_lost_node_and_a_dead_daemon_restarts_no_worker():
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
        # The living daemon measures this time in missed heartbeats; a clock of this test would not
        # fit.
        nodes.until(lambda: suspected_s(nodes, "node-2", "node-1", "node-3") > CALM_S, "lasting suspicions")
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
        # Each agent hears of the loss from its own daemon, or from the other agent through the
        # store. The spare hears no signals.
        assert nodes_whose_agent_logged(nodes, "OFFLINE: "), nodes.story()
        assert nodes_whose_agent_logged(nodes, "Workers restart now") == ["node-1", "node-3"], nodes.story()
        finish(nodes)


@namespaces
@pytest.mark.skipif(bool(certificates.why_not()), reason=certificates.why_not())
@pytest.mark.parametrize("has_certificates", [True, False])
def test_agents_hear_signals_only_with_the_certificates_that_daemons_ask_for(tmp_path, has_certificates):
    with Nodes(2, ranks_per_node=1, certificates=certificates.Certificates(tmp_path)) as nodes:
        nodes.launch("job", 0, environment={} if has_certificates else {"REFT_TLS_CERT": ""}, **REFT)
        await_workers(nodes, 2)
        if has_certificates:
            nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 2, "signals of the round on all members")
            daemon_of(nodes, "node-2").kill()
            nodes.until(lambda: suspected_s(nodes, "node-1", "node-2") > CALM_S, "a lasting suspicion, and no restart")
        complaining = nodes_whose_agent_logged(nodes, "the daemons use TLS, and this agent has no certificates")
        assert complaining == ([] if has_certificates else ["node-1", "node-2"]), nodes.story()
        finish(nodes)


@namespaces
@pytest.mark.slow
def test_a_node_that_was_cut_off_joins_again():
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
        assert {node: ranks(after)[node] for node in ranks(two)} == ranks(two), "the other nodes keep their ranks"
        finish(nodes)


@namespaces
@pytest.mark.slow
def test_two_nodes_die_at_once_and_a_third_during_the_rendezvous():
    with Nodes(4, ranks_per_node=1) as nodes:
        nodes.launch("job", 0, fewest=1, **REFT)
        before = ranks(await_workers(nodes, 4))
        nodes.until(lambda: len(nodes.statuses_of_signals("job")) == 4, "signals of the round on all members")
        nodes.lose(machine(nodes, "node-2"), machine(nodes, "node-3"), silently=True)
        nodes.until(lambda: nodes_whose_agent_logged(nodes, "OFFLINE: "), "a survivor that knows of the loss")
        lost_s = nodes.lose(machine(nodes, "node-4"), silently=True)
        alone = await_workers(nodes, 1, after_s=lost_s)
        assert ranks(alone) == {"node-1": 0} and before["node-1"] == 0
        finish(nodes)


@namespaces
@pytest.mark.slow
def test_a_spare_that_joins_during_a_rendezvous_gets_the_rank_of_the_lost_node():
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
    """Returns the names of nodes whose agents have begun a second or later rendezvous."""
    logs = {each.name: nodes._training.out / f"{each.name}.log" for each in nodes.living}
    return [name for name, log in logs.items() if log.read_text(errors="replace").count("Rendezvous'ing worker") > 1]


@namespaces
@pytest.mark.skipif(bool(etcd.why_not()), reason=etcd.why_not())
@pytest.mark.slow
def test_the_node_of_the_stores_leader_is_lost():
    """Each node runs one member of the etcd cluster.

    No call of an agent may wait long for the lost member.
    """
    with Nodes(3, ranks_per_node=1) as nodes:
        hosts = [(each.living.address, each.living.enter([])) for each in nodes.machines]
        with etcd.EtcdCluster(3, hosts) as cluster:
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
