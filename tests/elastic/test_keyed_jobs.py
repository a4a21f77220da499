"""A job with a job key, as torchrun's real agents run it, and a stranger who reaches its store."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from reft.cli.demo.cluster import free_port
from reft.elastic.shared_state import decode, encode
from reft.wire.job_key import JobKey
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, until
from tests.support.elastic_train import alone
from tests.support.jobs import Code, tcp_call
from tests.support.processes import children_with
from tests.support.rendezvous import Agent, Agents

KEY = "the key of this job, which nobody else may see"
QUICK = "last_call_timeout=1,close_timeout=5,keep_alive_interval=2,store_idle_exit=10"
STATE = "torch.rendezvous.id.job"
STEPS = 100_000  # more than the job gets to: a test ends it


class KeyedJob:
    """Two agents with a key on this machine, each with a daemon of its own, and their store."""

    def __init__(self, folder: Path) -> None:
        self.daemons = [DaemonProcess("--listen", "127.0.0.1:0") for _ in range(2)]
        self.port = free_port()
        self.key_file = folder / "job.key"
        self.key_file.write_text(KEY)
        self.key_file.chmod(0o600)
        self.agents = Agents(
            folder, "--rdzv-backend=reft", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job", "--nnodes=2",
            f"--rdzv-conf={QUICK}", "--max-restarts=3", "--nproc-per-node=1", "--monitor-interval=0.05",
            script=["-m", "tests.support.elastic_train", f"--steps={STEPS}", "--pause=0.05", "--out"],
        )  # fmt: skip
        for number in range(2):
            self.start(f"n{number}", number, REFT_JOB_KEY_FILE=str(self.key_file))
        self.await_whole(3)
        self.store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=20))

    def start(self, name: str, number: int, **environment: str) -> Agent:
        own = {"REFT_DAEMON": self.daemons[number].address, "GLOO_SOCKET_IFNAME": "lo", **environment}
        return self.agents.start(name, "--local-addr=127.0.0.1", environment=own)

    def close(self) -> None:
        self.agents.__exit__()
        for daemon in self.daemons:
            daemon.close()

    def await_whole(self, step: int) -> None:
        def is_whole() -> bool:
            ended = [agent.poll() for agent in self.agents.agents[:2]]
            assert not any(ended), self.agents.story()
            try:
                return all(daemon.status("job").whole >= step for daemon in self.daemons)
            except Exception:
                return False  # the job is not there yet

        until(is_whole, 120, f"whole({step})")

    def workers(self) -> set[int]:
        found = [children_with(agent.pid, "tests.support.elastic_train") for agent in self.agents.agents[:2]]
        return {child.pid for each in found for child in each}

    def entry(self) -> bytes:
        return self.store.get(STATE)

    def body(self) -> bytes:
        """Returns the JSON of the agents' present state."""
        return self.entry().split(b" ", 2)[2]

    def lines(self) -> list[dict]:
        """Returns what rank 0 has written."""
        text = (self.agents.folder / "rank-0.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def values(self, name: str) -> list[object]:
        return [line[name] for line in self.lines() if name in line]

    def token(self) -> bytes:
        """Returns the job's token, as its first daemon knows it."""
        reply = self.daemons[0].call("Inventory", pb.InventoryRequest(job="job"))
        return reply.manifest.token


@pytest.fixture(scope="module")
def living(tmp_path_factory):
    """Yields a function that returns the job of all tests, and another one after its end."""
    with ExitStack() as stack:
        made: list[KeyedJob] = []

        def job() -> KeyedJob:
            if not made or any(agent.poll() is not None for agent in made[-1].agents.agents[:2]):
                made.append(stack.enter_context(closing(KeyedJob(tmp_path_factory.mktemp("keyed")))))
            return made[-1]

        yield job


@pytest.fixture
def job(living):
    return living()


def secrets_of(job: KeyedJob) -> list[bytes]:
    """Returns all secrets of the job, in the forms in which they might be written."""
    key, launch = JobKey(KEY.encode()), decode(job.body()).launch
    derived = [key.launch_secret("job", launch), key.job_token("job"), key.entry_key("id.job")]
    return [KEY.encode(), *derived, *(each.hex().encode() for each in derived)]


def test_who_reads_the_store_finds_no_secret_and_no_daemon_takes_a_beat(job):
    held = {key: job.store.get(key) for key in job.store.list_keys() if key != "reft/beats"}
    assert STATE in held
    dump = b"\n".join(key.encode() + b" " + value for key, value in held.items())
    assert not any(secret in dump for secret in secrets_of(job))
    state = decode(job.body())
    assert state.token == ""
    facts = next(iter(state.facts.values()))
    beat = pb.AgentBeatRequest(
        job="job", node_id=facts.home, launch=state.launch, round=state.round, pid=1, phase=pb.FAILED
    )
    found = [bytes.fromhex(text.decode()) for text in re.findall(rb"[0-9a-f]{64}", dump)]
    other = next(daemon for daemon in job.daemons if hello(daemon).node_id != facts.home)
    tcp = next(each for each in hello(other).addresses if not each.startswith("unix:"))
    for token in [*found, bytes(32), state.launch.encode()]:
        with pytest.raises(Exception) as refused:
            tcp_call(tcp, "AgentBeat", beat, token)
        assert refused.value.code() is Code.UNAUTHENTICATED
    assert found, "the store has MACs"


def hello(daemon: DaemonProcess) -> pb.HelloReply:
    from reft.wire import daemon_launcher

    return daemon_launcher.hello(daemon.address)


def test_workers_and_the_stores_process_have_no_key(job):
    secrets = [*secrets_of(job), b"REFT_JOB_KEY", str(job.key_file).encode()]
    (store,) = [
        each for each in psutil.process_iter() if {"--port", str(job.port)} <= set(_quietly(each.cmdline) or ())
    ]
    pids = [store.pid, *job.workers()]
    assert len(pids) == 3
    for pid in pids:
        for name in ("environ", "cmdline"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert text and not any(secret in text for secret in secrets), name
    logs = [*job.agents.folder.glob("*.log"), *(daemon.log for daemon in job.daemons)]
    shown = b"\n".join(path.read_bytes() for path in logs)
    shown += b"".join(daemon.status("job").SerializeToString() for daemon in job.daemons)
    assert not any(secret in shown for secret in secrets_of(job))
    assert b"job job: nothing held" in shown and b"REFT_JOB_KEY_FILE" not in shown, "no warning"


def _quietly(function):
    try:
        return function()
    except psutil.Error:
        return None


@pytest.mark.parametrize("what", ["forged", "older"])
def test_a_forged_or_an_older_round_disturbs_nobody(job, what):
    workers, before = job.workers(), job.entry()
    until(lambda: job.entry() != before, 30, "the agents' next sign of life")
    forged = before
    if what == "forged":
        newer = decode(job.body())
        newer.round, newer.number, newer.participants = newer.round + 1, newer.number + 1, {}
        forged = encode(newer)
    job.store.set(STATE, forged)
    until(lambda: job.entry() != forged and job.entry().startswith(b"reft-mac-1 "), 30, "the agents' own state")
    assert decode(job.body()).round == 0 and job.workers() == workers
    until(lambda: "It is refused" in job.agents.story(), 30, "a line about the refusal")


# The ids, too, must not tell the key: pytest puts them into the environment of all processes.
@pytest.mark.parametrize("key", [KEY + "!", ""], ids=["another", "none"])
def test_an_agent_with_another_key_or_without_one_is_refused(job, key):
    name, workers = f"stranger{len(key)}", job.workers()
    agent = job.start(name, 0, **({"REFT_JOB_KEY": key} if key else {}))
    assert agent.wait(60) != 0
    log = job.agents.log(name).read_text()
    assert ("another key or none" if key else "this agent has none") in log and "REFT_JOB_KEY_FILE" in log
    assert key not in log or not key
    assert job.workers() == workers


def test_a_killed_worker_is_restored_with_the_same_token(job):
    """This test ends the job."""
    token = job.token()
    assert token == JobKey(KEY.encode()).job_token("job")
    os.kill(min(job.workers()), signal.SIGKILL)
    until(lambda: len(job.values("restored_from")) == 2 and "loss" in job.lines()[-1], 120, "a step after the restart")
    assert job.values("restored_from") == [None, "memory"], job.agents.story()
    assert job.token() == token
    job.agents.finish()
    assert [agent.wait(150) for agent in job.agents.agents[:2]] == [0, 0], job.agents.story()
    losses = {line["step"]: line["loss"] for line in job.lines() if "loss" in line}
    assert losses == {step: loss.hex() for step, loss in enumerate(alone(max(losses)), 1)}
