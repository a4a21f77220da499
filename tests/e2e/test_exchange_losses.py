"""Nodes are lost before the exchange has protected a step of the newest epoch.

Four nodes, one rank each, train FSDP2. A failpoint of the daemons loses the requests for tickets.
So turns begin, and never end.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from reft.cli.demo.records import TrainingResult, compare, read_result
from reft.cli.main import main
from reft.cli.recover import RecoverCommand
from tests.e2e.test_example_losses import DEADLINE_S, Example, Run
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.recorded import Ranks

FSDP2 = Example("fsdp2", 4, 1, True, steps=30)
pytestmark = pytest.mark.timeout(900)  # a start of all ranks may take a minute where the cores are shared


def no_ticket(*conditions: str) -> str:
    """Returns the failpoints with which no turn ends that meets one of the conditions."""
    return ",".join(f"turn.ticket:drop:{condition}" for condition in conditions)


def nodes_of(site: Site, first: int, count: int, failpoints: str) -> list[DaemonProcess]:
    """Adds nodes with the names node-FIRST, …"""
    environment = {"REFT_FAILPOINTS": failpoints}
    return [site.add(1, "--node", f"node-{first + i}", environment=environment)[0] for i in range(count)]


def train_until(run: Run, stop_at: int, *seal_at: int) -> Ranks:
    """Starts the job, and returns once rank 1 has stopped in the copy of step `stop_at`.

    The step before is whole then, so there is a slot for this one.
    """
    ranks = run.start(f"snapshot.chunk:stop:rank=1:from={stop_at}", *seal_at, stop_at - 1)
    victim, process = psutil.Process(ranks.processes[1].pid), ranks.processes[1]
    until(
        lambda: victim.status() == psutil.STATUS_STOPPED or not process.is_alive(), DEADLINE_S, f"a stop in {stop_at}"
    )
    assert process.is_alive(), ranks.errors()[-6000:]
    return ranks


def end(ranks: Ranks, *killed: int) -> None:
    """Kills ranks; the others end as under a launcher."""
    for rank in killed:
        os.kill(ranks.processes[rank].pid, signal.SIGKILL)
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    for process in ranks.processes:
        process.terminate()
        process.join(60)


def bases(result: TrainingResult, attempt: int) -> list[int]:
    return [attempts[attempt].base for attempts in result.attempts.values()]


def asked(daemon: DaemonProcess, *command: str) -> tuple[int, Any]:
    """Returns the exit code and the document of a command."""
    done = CliRunner().invoke(main, [*command, "--json"], env={"REFT_DAEMON": daemon.address}, catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)


def await_no_trainer(nodes: list[DaemonProcess]) -> None:
    until(lambda: not any(rank.alive for node in nodes for rank in node.status("job").ranks), what="the trainers' end")


def test_a_node_lost_before_a_step_is_protected_takes_the_job_back_to_the_guard(plain, site, tmp_path):
    """The guard stays over two crashes of processes and over whole steps of two epochs."""
    held_off = no_ticket("epoch=1:from=6", "epoch=2", "epoch=3")
    run = Run(FSDP2, tmp_path / "guard", nodes_of(site, 0, 4, held_off))
    ranks = train_until(run, 12, 3)
    until(run.note_protected, DEADLINE_S, "a protected step")
    guard = run.protected
    assert 1 <= guard < 6 and run.nodes[0].status("job").whole >= 11
    end(ranks)
    for epoch, stop_at in ((2, 16), (3, 20)):
        ranks = train_until(run, stop_at)
        status = run.nodes[0].status("job")
        assert status.epoch.counter == epoch and status.whole >= stop_at - 1
        assert status.exchange.protected == -1 and status.exchange.turn >= 0
        end(ranks)
        await_no_trainer(run.nodes)
        _, recovery = RecoverCommand(run.nodes[0].address, "job", {}).look()
        assert recovery.base is not None and recovery.base.step >= stop_at - 1
        assert recovery.base.epoch.counter == epoch
        assert recovery.guard is not None and (recovery.guard.epoch.counter, recovery.guard.step) == (1, guard)
    vanish(run.nodes[2])
    run.nodes[2] = nodes_of(site, 4, 1, held_off)[0]
    result = run.finish(run.start())
    assert guard < min(bases(result, 1)) and max(bases(result, 1)) < min(bases(result, 2))
    assert bases(result, 3) == [guard] * 4
    assert compare(result, plain(FSDP2), FSDP2.steps).differences == []
    until(lambda: run.nodes[0].status("job").exchange.protected > guard, what="a protected step of the last epoch")


@pytest.mark.slow
def test_a_second_node_lost_before_a_step_is_protected_is_named_and_nothing_is_loaded(site, tmp_path):
    held_off = no_ticket("epoch=2")
    run = Run(FSDP2, tmp_path / "second", nodes_of(site, 0, 4, held_off))
    ranks = train_until(run, 12, 3)
    until(run.note_protected, DEADLINE_S, "a protected step")
    end(ranks)
    vanish(run.nodes[1])
    run.nodes[1] = nodes_of(site, 4, 1, held_off)[0]
    ranks = train_until(run, 20)
    status = run.nodes[0].status("job")
    assert (status.epoch.counter, status.exchange.protected) == (2, -1) and status.whole >= 19
    end(ranks)
    vanish(run.nodes[2])
    await_no_trainer([run.nodes[0], run.nodes[1], run.nodes[3]])
    assert asked(run.nodes[0], "status", "--check")[0] == 4
    run.nodes[2] = nodes_of(site, 5, 1, held_off)[0]
    said = refused(run)
    for part in ("no version is whole now", "rank 2 (on node-2)", "rank 2 held leaves that no other rank has"):
        assert part in said
    code, document = asked(run.nodes[0], "status", "--check")
    (job,) = document["jobs"]
    assert (code, job["health"], job["whole_step"]) == (4, "ERR", None), "the refused attach has changed nothing"
    code, document = asked(run.nodes[3], "recover", "job")
    assert (code, document["outcome"], document["reason"]) == (4, "unrecoverable", job["reason"])
    assert refused(run) == job["reason"]
    result = read_result(run.folder, FSDP2.world)
    assert all(attempt.attached_s is None for attempts in result.attempts.values() for attempt in attempts[2:])


def refused(run: Run) -> str:
    """Returns the error of an attach that fails."""
    ranks = run.start()
    assert 1 in ranks.wait(DEADLINE_S)
    return next(line for line in ranks.errors().splitlines() if "RestoreError: " in line).partition("RestoreError: ")[2]
