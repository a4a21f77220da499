"""`torchrun --rdzv-backend=reft` on nodes that can be lost: who restarts, when, and under which rank.

Workers here are idlers without torch, where the state is not the point; agents, daemons, losses and namespaces are real.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import elastic_train, idler
from tests.support.idler import Idler
from tests.support.netns import marked, why_not
from tests.support.nodes import Machine, Nodes

IDLER = str(Path(idler.__file__))
REFT = {"backend": "reft", "agent": "torch.distributed.run", "script": [IDLER]}
CALM_S = 3.0  # three times what it takes to call a node lost

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


def stays_so(nodes: Nodes, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + CALM_S
    nodes.until(lambda: time.monotonic() > end or not condition(), "a while")
    assert condition(), nodes.story()


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
        stays_so(nodes, lambda: len(idler.idlers(nodes._training.out)) == began)
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
        assert agents_say(nodes, "OFFLINE: ") == ["node-1", "node-3"], (
            "before their keep-alive, and the spare hears no signals"
        )
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


def lines(out: Path) -> list[dict]:
    """What all ranks wrote."""
    found = []
    for path in sorted(out.glob("rank-*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


def await_steps(nodes: Nodes, world: int, more: int, after_s: float) -> None:
    """Returns when a world of this size has made so many steps after that moment."""
    out = nodes._training.out

    def made() -> int:
        return len(
            {e["step"] for e in lines(out) if e["event"] == "step" and e["world"] == world and e["time_s"] > after_s}
        )

    nodes.until(lambda: made() >= more, f"{more} steps of {world} ranks")
    nodes.note(f"{world} ranks have made {more} steps")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_shrinks_from_four_nodes_to_three_and_grows_back_and_its_losses_stay_the_same():
    with Nodes(4, ranks_per_node=1) as nodes:
        nodes.launch(
            "job",
            100_000,
            fewest=3,
            backend="reft",
            script=["tests.support.elastic_train"],
            conf={"shrink_timeout": "2"},
        )
        await_steps(nodes, 4, 5, after_s=0)
        nodes.until(lambda: nodes.whole("job")[1] >= 3, "a whole version")
        lost_s = nodes.lose(machine(nodes, "node-3"), silently=True)
        await_steps(nodes, 3, 10, after_s=lost_s)
        grown_s = time.monotonic()
        nodes.replace()
        await_steps(nodes, 4, 10, after_s=grown_s)
        finish(nodes)
        said = lines(nodes._training.out)
    starts = [(each["world"], each["restored_from"]) for each in said if each["event"] == "attached"]
    assert {world for world, source in starts if source in ("memory", "peers")} == {3, 4}
    losses: dict[int, set[str]] = {}
    for each in said:
        if each["event"] == "step":
            losses.setdefault(each["step"], set()).add(each["loss"])
    expected = [loss.hex() for loss in elastic_train.alone(max(losses))]
    assert losses == {step + 1: {loss} for step, loss in enumerate(expected)}
