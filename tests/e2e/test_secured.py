"""A job with certificates and a job key: a person starts reft-daemon and torchrun on each node.

Each node has namespaces of its own. Strangers ask to join, then a node is lost with its daemon, its
agent and its trainers. The job goes on as an undisturbed run, bit for bit.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from reft.cli.demo.records import recovery
from reft.cli.main import main
from reft.wire.job_key import JobKey
from tests.support import certificates, elastic_train
from tests.support.daemons import ROOT
from tests.support.netns import marked
from tests.support.nodes import Machine, Nodes, Visitor

KEY, OTHER_KEY = "the key of this job, which nobody else may see", "another key of this job's length, or nearly"
STEPS = 100_000  # more than the job gets to: the test ends it
# Asks a daemon as another daemon or agent of each of these certificates; prints what each is told.
ASKS = """
import sys, grpc
from pathlib import Path
from reft.wire import messages, rpc
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb, daemon_pb2_grpc as pb_grpc
address, ca, *certificates = sys.argv[1:]
for path in map(Path, certificates):
    try:
        with rpc.channel(address, Tls(path, path.with_suffix(".key"), Path(ca))) as channel:
            pb_grpc.DaemonStub(channel).Hello(pb.HelloRequest(protocol=messages.PROTOCOL), timeout=10)
        print("answered")
    except grpc.RpcError as error:
        print(error.code().name)
"""
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(certificates.why_not()), reason=certificates.why_not()),
]


@pytest.fixture
def nodes(tmp_path) -> Iterator[Nodes]:
    """Yields two nodes that train with certificates and a key."""
    key_file = tmp_path / "job.key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    made = certificates.Certificates(tmp_path / "certificates")
    with Nodes(2, ranks_per_node=1, certificates=made, are_typed=True) as nodes:
        nodes.launch(
            "job", STEPS, backend="reft", environment={"REFT_JOB_KEY_FILE": str(key_file)},
            script=["-m", "tests.support.elastic_train"], arguments=["--pause", "0.1"],
        )  # fmt: skip
        nodes.await_protection(epoch=1)
        yield nodes


def ask(nodes: Nodes, caller: Machine, asked: Machine, *files: Path) -> list[str]:
    """Returns what a daemon answers to a node that calls with each of these certificates."""
    command = [sys.executable, "-c", ASKS, asked.living.listen, *map(str, files)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"}
    done = subprocess.run(
        caller.living.enter(command), env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.split() or [done.stderr]


def secrets_of(launch: str) -> list[bytes]:
    """Returns all secrets of the job, in the forms in which they might be written."""
    key = JobKey(KEY.encode())
    derived = [key.launch_secret("job", launch), key.job_token("job"), key.entry_key("id.job")]
    return [KEY.encode(), OTHER_KEY.encode(), *derived, *(each.hex().encode() for each in derived)]


def is_agent(process: psutil.Process) -> bool:
    return "--rdzv-backend=reft" in process.cmdline()


def check_processes(nodes: Nodes) -> list[bytes]:
    """Fails if a secret is in /proc, or the key's path outside of an agent; returns the secrets."""
    trainers = nodes.trainers()
    assert sorted(trainers) == [0, 1], nodes.story()
    secrets = secrets_of(trainers[0].environ()["REFT_LAUNCH"])
    for machine in nodes.living:
        processes = marked(nodes.mark(machine))
        assert {is_agent(process) for process in processes} == {True, False}
        for process in processes:
            names = [] if is_agent(process) else [b"REFT_JOB_KEY", b"job.key"]
            for file in ("environ", "cmdline"):
                text = Path(f"/proc/{process.pid}/{file}").read_bytes()
                assert text and not any(each in text for each in (*secrets, *names)), (file, process)
    return secrets


def refusal_of(visitor: Visitor, number: int) -> str:
    """Returns the log of a visitor's agent, which must have ended with an error."""
    assert visitor.agents[number].wait(200) == 1, visitor.logs[number].read_text()
    return visitor.logs[number].read_text()


def test_a_secured_job_goes_on_after_strangers_and_the_loss_of_a_node(nodes, tmp_path):
    training = nodes._training
    secrets = check_processes(nodes)

    bob = nodes.visit("bob", {})
    others = nodes.visit("alice", {"REFT_JOB_KEY_FILE": "", "REFT_JOB_KEY": OTHER_KEY}, {"REFT_JOB_KEY_FILE": ""})
    made = tmp_path / "certificates/ours"
    files = [made / f"{user}/{kind}/{name}.pem" for user, kind, name in (
        ("bob", "nodes", bob.machine.name), ("bob", "agents", bob.machine.name), ("alice", "agents", "node-1"),
    )]  # fmt: skip
    told = ask(nodes, bob.machine, nodes.living[0], made / "ca.pem", *files)
    assert told == ["UNAVAILABLE", "UNAVAILABLE", "answered"]
    refusal = refusal_of(bob, 0)
    assert "has certificates of user bob" in refusal and "of this job has certificates of user alice" in refusal
    assert "Fix: make certificates of one user for all nodes with examples/deploy/certificates.sh" in refusal
    for number, why in enumerate(
        ("another agent has another key or none", "was made with a job key, and this agent has none")
    ):
        refusal = refusal_of(others, number)
        assert why in refusal and "need the same REFT_JOB_KEY_FILE" in refusal
    assert nodes._training.result().attempts[0][1:] == [], "no worker was restarted"

    whole = nodes.whole("job")[1]
    lost_s = nodes.lose(nodes.living[0])
    nodes.replace()
    nodes.await_recovery(lost_s)
    recovered = recovery(training.result(), lost_s)
    assert recovered is not None and recovered.base >= whole, recovered
    nodes.await_protection(epoch=2)
    check_processes(nodes)
    environment = {"REFT_DAEMON": nodes.living[0].address}
    shown = "".join(
        CliRunner().invoke(main, ["status", *words], env=environment).output for words in ((), ("job", "--json"))
    )
    assert "job" in shown

    (training.out / "done").touch()
    result = nodes.await_end()
    shown += "".join(path.read_text() for path in nodes.folder.rglob("*.log"))
    assert "job job: restored step" in shown and "holds a secret of this launch" not in shown
    assert not any(secret in shown.encode() for secret in secrets)
    elastic_train.check(result)
    assert all(len(attempts) > 1 for attempts in result.attempts.values())
