"""A job finds nothing although somebody knows of a whole step: attach says so, loudly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import grpc
import pytest

from reft.cli.demo.cluster import free_port
from reft.core.membership.failure_detector import BEAT_S
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, until
from tests.support.rendezvous import Agents
from tests.support.trainers import Spec, Trainers, run

REQUIRED = {"REFT_RESTORE": "require"}


@pytest.fixture(params=["1800"])
def daemon(request):
    process = DaemonProcess("--ttl", request.param)
    yield process
    process.close()


def is_forgotten(daemon: DaemonProcess) -> bool:
    try:
        daemon.status("job")
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.NOT_FOUND
    return False


@pytest.mark.parametrize("daemon", ["0.2"], indirect=True)
def test_a_daemon_that_has_freed_a_job_says_so_at_its_next_start(daemon):
    sealed = run(Spec(daemon.address, steps=5))[0]["sealed"][1]
    until(lambda: is_forgotten(daemon), what="the end of --ttl")
    refused = Trainers(Spec(daemon.address, environment=REQUIRED))
    assert refused.wait() == [1]
    text = refused.errors()
    assert "RestoreError: REFT_RESTORE=require is set, and no step of job job is held." in text
    assert f"Whole was step {sealed}, says the daemon of node test, which freed the job" in text
    assert is_forgotten(daemon), "the refused attach leaves nothing"
    (fresh,) = run(Spec(daemon.address))
    said = fresh["said"]
    assert fresh["began"] == 0 and "[reft] job job STARTS FROM STEP 0, although it had trained before:" in said
    assert (
        f"step {sealed} was whole, says the daemon of node test" in said and "its time to live of 0 s was over" in said
    )


def test_a_job_that_is_new_starts_without_a_block_and_is_refused_if_a_restore_is_required(daemon):
    refused = Trainers(Spec(daemon.address, environment=REQUIRED), 2)
    assert 1 in refused.wait() and "RestoreError: REFT_RESTORE=require is set" in refused.errors()
    assert not daemon.call("Status", pb.StatusRequest()).jobs
    assert "STARTS FROM STEP 0" not in run(Spec(daemon.address))[0]["said"]
    assert run(Spec(daemon.address, steps=13, environment=REQUIRED))[0]["from"] == "memory"


TRAIN = """
import os, torch, reft
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = reft.attach(model, optimizer)
for step in session.steps(3 if session.restored_from is None else 6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert session.seal()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open(os.environ["GATE"]).read()
    os._exit(1)
session.close()
"""


def test_an_agent_remembers_what_a_daemon_lost_with_its_memory(daemon, tmp_path: Path):
    """The daemon and its folder are gone in mid-run."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    with Agents(tmp_path, "--rdzv-backend=reft", endpoint, "--rdzv-id=job", "--max-restarts=1") as agents:
        agents.script.write_text(TRAIN)
        agent = agents.start("a", environment={"REFT_DAEMON": daemon.address, "GATE": str(gate)})
        until(lambda: not is_forgotten(daemon) and daemon.status("job").whole == 3, what="whole(3)")
        until(lambda: daemon.status("job").ranks[0].sealed_age_s > 5 * BEAT_S, what="the agent's next beats")
        daemon.kill()
        shutil.rmtree(daemon.folder)
        daemon.folder.mkdir(0o700)
        daemon.start()
        gate.write_text("")
        assert agent.wait(90) == 0, agents.story()
        log = agents.log("a").read_text()
    assert "STARTS FROM STEP 0" in log
    assert "step 3 was whole, says the torchrun agent of node test, which has lived on." in log
