"""`torchrun --rdzv-backend=reft` with a training that reft holds.

Its losses equal those of an undisturbed run, after any fault. The training
(`tests.support.elastic_train`) has the same losses, bit for bit, with any number of ranks. So a run
that shrinks and grows is compared with every schedule of worker counts at once. A wrong state, or
one batch too many or too few, shows in all later losses.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from reft.cli.ask import ask
from reft.wire.v1 import daemon_pb2 as pb
from tests.e2e.test_elastic import PATIENT, daemon_of, finish, machine, namespaces
from tests.support import elastic_train
from tests.support.nodes import Machine, Nodes

TRAIN: dict[str, Any] = {
    "backend": "reft", "script": ["tests.support.elastic_train"], "arguments": ["--pause", "0.05"],
    "conf": {**PATIENT, "shrink_timeout": "2"},
}  # fmt: skip
STEPS = 100_000  # more than a test reaches
MINUTE_S = 60.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def read_records(out: Path) -> list[dict]:
    """Returns the records that all ranks wrote."""
    records = []
    for path in sorted(out.glob("rank-*.jsonl")):
        records += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return records


def await_steps(nodes: Nodes, world: int, more: int, after_s: float) -> int:
    """Returns the newest step, once `world` ranks have made `more` steps after that moment."""
    out = nodes._training.out

    def steps_of_world() -> set[int]:
        steps = [e for e in read_records(out) if e["event"] == "step" and e["world"] == world and e["time_s"] > after_s]
        return {each["step"] for each in steps}

    nodes.until(lambda: len(steps_of_world()) >= more, f"{more} steps of {world} ranks")
    nodes.note(f"{world} ranks have made {more} steps")
    return max(steps_of_world())


def await_signals(nodes: Nodes) -> None:
    count = len(nodes.living)
    nodes.until(lambda: len(nodes.statuses_of_signals("job")) == count, "signals of the round on all members")


def attaches(records: list[dict]) -> list[dict]:
    return sorted((each for each in records if each["event"] == "attached"), key=lambda each: each["time_s"])


def check_losses(records: list[dict], width: int = elastic_train.WIDTH) -> None:
    """Fails unless each loss, of every rank and attempt, equals that of an undisturbed run."""
    losses: dict[int, set[str]] = {}
    for each in records:
        if each["event"] == "step":
            losses.setdefault(each["step"], set()).add(each["loss"])
    expected = [loss.hex() for loss in elastic_train.alone(max(losses), width)]
    assert losses == {step + 1: {loss} for step, loss in enumerate(expected)}


def epoch_of(machine: Machine) -> int:
    """Returns the epoch of a node's daemon."""
    return ask(machine.address, "Status", pb.StatusRequest(job="job"), 10).jobs[0].epoch.counter


def test_losses_stay_the_same_when_a_job_shrinks_from_four_nodes_to_three_and_grows_back():
    with Nodes(4, ranks_per_node=1) as nodes:
        nodes.launch("job", STEPS, fewest=3, **TRAIN)
        await_steps(nodes, 4, 5, after_s=0)
        nodes.until(lambda: nodes.whole("job")[1] >= 3, "a whole version")
        lost_s = nodes.lose(machine(nodes, "node-3"), silently=True)
        await_steps(nodes, 3, 10, after_s=lost_s)
        grown_s = time.monotonic()
        nodes.replace()
        await_steps(nodes, 4, 10, after_s=grown_s)
        finish(nodes)
        records = read_records(nodes._training.out)
    sources = {(each["world"], each["restored_from"] in ("memory", "peers")) for each in attaches(records)}
    assert sources == {(4, False), (3, True), (4, True)}
    check_losses(records)


@namespaces
def test_the_old_state_of_a_returning_node_is_not_used():
    """The node keeps its slots and its processes.

    It returns when the other nodes are one epoch further.
    """
    with Nodes(3, ranks_per_node=1) as nodes:
        nodes.launch("job", STEPS, fewest=2, **TRAIN)
        await_steps(nodes, 3, 5, after_s=0)
        nodes.until(lambda: nodes.whole("job")[1] >= 3, "a whole version")
        await_signals(nodes)
        cut_s = time.monotonic()
        away = machine(nodes, "node-2")
        away.living.cut()
        nodes.note("node-2 is cut off")
        newest_step = await_steps(nodes, 2, 20, after_s=cut_s)
        staying = [each for each in nodes.living if each is not away]
        nodes.until(lambda: nodes.whole("job") >= (2, newest_step), "a whole version of the two nodes")
        assert epoch_of(away) == 1 and {epoch_of(each) for each in staying} == {2}
        back_s = time.monotonic()
        away.living.heal()
        nodes.note(f"node-2 is back; the others have made step {newest_step}")
        await_steps(nodes, 3, 10, after_s=back_s)
        assert len({epoch_of(each) for each in nodes.living}) == 1
        finish(nodes)
        records = read_records(nodes._training.out)
    joint = [each for each in attaches(records) if each["world"] == 3 and each["time_s"] > back_s]
    assert len(joint) == 3 and len({each["step"] for each in joint}) == 1
    assert joint[0]["step"] >= newest_step, (
        "the state of the other two nodes, not the older state of the returning node"
    )
    check_losses(records)


@namespaces
def test_no_worker_restarts_in_a_minute_with_one_daemon_stopped_and_one_killed():
    with Nodes(3, ranks_per_node=1) as nodes:
        nodes.launch("job", STEPS, **TRAIN)
        await_steps(nodes, 3, 5, after_s=0)
        await_signals(nodes)
        stopped, killed = daemon_of(nodes, "node-1"), daemon_of(nodes, "node-3")
        stopped.send_signal(signal.SIGSTOP)
        killed.kill()
        nodes.note("one daemon stopped, one killed")
        end_s = time.monotonic() + MINUTE_S
        nodes.until(lambda: time.monotonic() > end_s, "the minute's end")
        newest_step = await_steps(nodes, 3, 10, after_s=end_s)
        assert len([each for each in read_records(nodes._training.out) if each["event"] == "started"]) == 3, (
            nodes.story()
        )
        stopped.send_signal(signal.SIGCONT)
        machine(nodes, "node-3").daemon = nodes.start_daemon(machine(nodes, "node-3"))
        nodes.until(lambda: nodes.whole("job")[1] > newest_step, "snapshots again")
        await_signals(nodes)
        finish(nodes)
        records = read_records(nodes._training.out)
    assert len(attaches(records)) == 3
    check_losses(records)


@namespaces
def test_all_workers_die_at_once_and_go_on_from_memory():
    with Nodes(2, ranks_per_node=2) as nodes:
        nodes.launch("job", STEPS, **TRAIN)
        await_steps(nodes, 4, 5, after_s=0)
        nodes.until(lambda: nodes.whole("job")[1] >= 3, "a whole version")
        whole = nodes.whole("job")[1]
        killed_s = nodes.kill_ranks(*range(4))
        await_steps(nodes, 4, 5, after_s=killed_s)
        finish(nodes)
        records = read_records(nodes._training.out)
    again = [each for each in attaches(records) if each["time_s"] > killed_s]
    assert len(again) == 4 and {each["restored_from"] for each in again} == {"memory"}
    assert min(each["step"] for each in again) >= whole
    check_losses(records)
