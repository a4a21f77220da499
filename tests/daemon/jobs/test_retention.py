"""How long the slots of an ended job stay."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from reft.core.membership.failure_detector import AgentPhase
from reft.wire import messages
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs.leases import Lease
from reft_daemon.membership.agent_process import AgentProcess
from reft_daemon.membership.retention import RetentionTimes
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Code, Job, refused, write
from tests.support.trainer_forks import Trainer
from tests.support.trainers import Spec, Trainers

ENDED, FAILED = 10.0, 500.0
ALIVE = object()  # stands for the watch of a living agent


def job(named: bool, ended_well: bool) -> SimpleNamespace:
    leases = {0: Lease(Process(1, 1), 1, closed=ended_well)}
    return SimpleNamespace(record=pb.JobRecord(manifest=pb.Manifest(named=named)), leases=leases)


def agent(phase: AgentPhase, watch: object = None) -> AgentProcess:
    return AgentProcess(1, phase, 0.0, watch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("named", "sessions_ended_well", "agent_here", "kept_s"),
    [
        (True, True, None, ENDED),
        (True, False, None, FAILED),
        (False, True, None, ENDED),
        (False, False, None, ENDED),  # nobody can start it again: the next run has another name
        (True, True, agent(AgentPhase.TRAINING, ALIVE), FAILED),  # an exception may have closed all sessions
        (True, True, agent(AgentPhase.FAILED, ALIVE), FAILED),
        (True, True, agent(AgentPhase.DEAD), FAILED),
        (True, True, agent(AgentPhase.FINISHED), ENDED),
        (True, False, agent(AgentPhase.FINISHED), ENDED),  # the script need not close its session
        (False, False, agent(AgentPhase.FAILED, ALIVE), FAILED),  # the agent will restart it
        (False, True, agent(AgentPhase.STOPPING, ALIVE), FAILED),
        (False, False, agent(AgentPhase.DEAD), ENDED),
        (False, False, agent(AgentPhase.FINISHED), ENDED),
    ],
)
def test_a_job_that_may_come_back_keeps_its_slots_unless_it_ended_well(named, sessions_ended_well, agent_here, kept_s):
    times = RetentionTimes(ENDED, FAILED)
    assert times.seconds_for(job(named, sessions_ended_well), agent_here) == kept_s  # type: ignore[arg-type]


@pytest.mark.parametrize("failed", [True, False])
def test_a_session_that_an_exception_closed_keeps_its_slots_also_over_a_restart(failed):
    daemon = DaemonProcess("--ttl", "60", "--ttl-failed", "500")
    try:
        trainers = Trainers(Spec(daemon.address, job="run1", options={"seal_at": [4], "pause_at": [4]}))
        trainers.wait_for(4)
        epoch = daemon.call("Inventory", pb.InventoryRequest(job="run1")).decision.epoch
        daemon.call("Release", pb.ReleaseRequest(job="run1", epoch=epoch, rank=0, failed=failed))
        trainers.kill()
        until(lambda: daemon.status("run1").HasField("kept_s"), what="the end of the trainer")
        assert (daemon.status("run1").kept_s > 100) is failed
        daemon.kill()
        daemon.start()
        assert (daemon.status("run1").kept_s > 100) is failed
        assert messages.epoch_from(daemon.status("run1").epoch) == messages.epoch_from(epoch)
    finally:
        daemon.close()


@pytest.fixture
def agent_process() -> Iterator[Trainer]:
    """Stands for the agent of a launch."""
    process = Trainer()
    yield process
    process.kill()


def under_agent(job: Job, process: Trainer) -> Job:
    """Lets the agent of a job's launch say that its workers train."""
    node = job.manifest.nodes[0]
    beat = pb.AgentBeatRequest(
        job=job.name, node_id=node.id, launch=job.manifest.launch, round=1, pid=process.pid, nodes=[node], token=bytes(32)
    )  # fmt: skip
    job.daemons[0].call("AgentBeat", beat)
    return job


def unnamed(daemon: DaemonProcess, name: str) -> Job:
    job = Job([(daemon, [0])], name=name, launch=f"launch of {name}")
    job.manifest.named = False
    return job


def names(daemon: DaemonProcess) -> set[str]:
    return {each.job for each in daemon.call("Status", pb.StatusRequest()).jobs}


def test_an_unnamed_job_whose_trainer_died_stays_while_its_agent_lives(start, trainer, agent_process):
    """The agent is about to start the trainer again."""
    daemon = start("--ttl", "0.2", "--ttl-failed", "500")
    under_agent(unnamed(daemon, "restarted"), agent_process).decide().lease(0, trainer)
    trainer.kill()
    until(lambda: daemon.status("restarted").HasField("kept_s"), what="the news of the trainer's death")
    unnamed(daemon, "over").decide()  # its time is over later
    until(lambda: "over" not in names(daemon), what="the end of the job without an agent")
    assert daemon.status("restarted").kept_s > 100
    agent_process.kill()
    until(lambda: not names(daemon), what="the end of the job whose agent has ended")


def test_the_time_to_live_begins_when_the_last_trainer_ends(start, trainer, agent_process):
    daemon = start("--ttl", "0.2")
    job = under_agent(unnamed(daemon, "trains"), agent_process).decide()
    write(job.slots(0, trainer)[0], job.version(1))
    agent_process.kill()  # it has kept the job until the lease, however late that came
    until(lambda: not daemon.call("Status", pb.StatusRequest()).agents, what="the news of the agent's end")
    unnamed(daemon, "over").decide()
    until(lambda: "over" not in names(daemon), what="the end of a job without a trainer")
    assert job.headers()
    trainer.kill()
    until(lambda: not names(daemon), what="the end of the time to live")
    assert not (daemon.folder / "trains").exists()
    assert daemon.call("Status", pb.StatusRequest()).held_bytes == 0


def test_a_job_that_its_agent_starts_again_is_not_dropped_for_memory(start, trainer, agent_process):
    daemon = start("--memory", "5MiB")
    under_agent(unnamed(daemon, "restarted"), agent_process).decide().lease(0, trainer, slots=1)
    trainer.kill()
    until(lambda: not daemon.status("restarted").ranks[0].alive, what="the news of the trainer's death")
    over = unnamed(daemon, "over").decide()
    over.lease(0, slots=1)
    over.close()
    wanted = Job([(daemon, [0])], name="wanted").decide()
    assert wanted.lease(0, slots=3) and names(daemon) == {"restarted", "wanted"}
    more = Job([(daemon, [0])], name="more").decide()
    wanted.close()
    with refused(Code.RESOURCE_EXHAUSTED, "--memory"):
        more.lease(0)
    agent_process.kill()
    until(lambda: not daemon.call("Status", pb.StatusRequest()).agents, what="the news of the agent's end")
    assert more.lease(0, slots=1) and names(daemon) == {"wanted", "more"}
