"""torchrun's real agents with cheap workers: the store outlives them, and they start a daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing

import psutil
import pytest
from torch.distributed import TCPStore

from reft.cli.demo.cluster import free_port
from reft.config import child_environment
from reft.elastic.shared_state import SharedState, decode
from reft.elastic.stores.tcp import TcpBackend
from reft.wire import rpc
from reft.wire.job_key import JobKey
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support import etcd
from tests.support.daemons import ROOT, DaemonProcess, purge_and_stop, until
from tests.support.rendezvous import Agents

SHORT = (
    "daemon=off,last_call_timeout=1,close_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,store_idle_exit=10"
)
QUICK = "last_call_timeout=1,close_timeout=5,keep_alive_interval=2,store_idle_exit=10"


@pytest.fixture
def make(tmp_path):
    made = []

    def agents(*flags, conf=f"daemon=off,{QUICK}"):
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        made.append(
            Agents(tmp_path, "--rdzv-backend=reft", endpoint, f"--rdzv-conf={conf}", "--max-restarts=3", *flags)
        )
        return made[-1]

    yield agents
    for each in made:
        each.__exit__()


def store_of(agents) -> psutil.Process:
    """Returns the process of the rendezvous store."""
    port = next(flag for flag in agents.flags if "endpoint" in flag).rpartition(":")[2]
    for process in psutil.process_iter():
        try:
            if {"reft.elastic.stores.store_host", port} <= set(process.cmdline()):
                return process
        except psutil.Error:
            continue
    raise AssertionError(agents.story())


def state_of(agents) -> SharedState:
    """Returns the state of --rdzv-id=job; an empty one while there is none."""
    port = int(next(flag for flag in agents.flags if "endpoint" in flag).rpartition(":")[2])
    held = TcpBackend(TCPStore("127.0.0.1", port, is_master=False), "id.job").get_state()
    return decode(held[0]) if held else SharedState()


def loops(process: psutil.Process) -> int:
    """Returns a number that grows with each loop of an agent, which sleeps between two."""
    return int(process.num_ctx_switches().voluntary)


def test_a_job_survives_the_agent_that_started_the_store(make):
    agents = make("--nnodes=2", "--rdzv-id=job")
    first = agents.start("a", "--local-addr=127.0.0.1")
    until(lambda: "is process" in agents.log("a").read_text() or first.poll() is not None, 60, "the store")
    agents.start("b", "--local-addr=127.0.0.2")
    assert agents.ranks(2) == {"a": 0, "b": 1}
    store = store_of(agents)
    first.kill()
    first.wait()
    began = len(agents.workers())
    # The address of c sorts last: torch alone would give c rank 1 and b rank 0.
    agents.start("c", "--local-addr=127.0.0.9")
    assert agents.ranks(2, after=began) == {"c": 0, "b": 1}
    agents.finish()
    assert [agent.wait(60) for agent in agents.agents[1:]] == [0, 0], agents.story()
    assert store.is_running(), "the store outlives the agent that started it"


def test_an_agent_starts_a_daemon_and_gives_its_address_to_workers(make, tmp_path):
    agents = make(conf=QUICK)
    agents.script.write_text("import os; print('daemon', os.environ['REFT_DAEMON'], os.environ['REFT_LAUNCH'])")
    agent = agents.start("a")
    assert agent.wait(90) == 0, agents.story()
    socket = agents.runtime / "daemon.sock"
    assert f"daemon unix:{socket}" in agents.log("a").read_text()
    assert socket.exists(), "the daemon outlives the agent"
    purge_and_stop(socket)


HOLDS = """
import os
from reft.config import Config
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb, daemon_pb2_grpc as pb_grpc
node = pb.Node(name="test", id="0", addresses=[Config().daemon], ranks=[0])
manifest = pb.Manifest(job="ran", named=True, token=bytes(32), world=1, nodes=[node], every=1)
decision = pb.Decision(epoch=pb.Epoch(counter=1, ident=bytes(16)))
with rpc.channel(Config().daemon) as channel:
    pb_grpc.DaemonStub(channel).Decide(pb.DecideRequest(manifest=manifest, decision=decision), timeout=10)
raise SystemExit(int(os.environ["ENDS_WITH"]))
"""


@pytest.mark.parametrize(("slurm", "code", "held"), [("7", 0, []), ("7", 1, ["ran"]), (None, 0, ["ran"])])
def test_slots_of_a_finished_job_are_freed_before_its_slurm_step_ends(make, slurm, code, held):
    """Slurm kills the agent's daemon with the step. The slots of a job that failed are kept.

    The daemon of the job's next start adopts them.
    """
    agents = make("--rdzv-id=ran", "--max-restarts=0", conf=QUICK)
    agents.script.write_text(HOLDS)
    surroundings = {"ENDS_WITH": str(code)} | ({"SLURM_JOB_ID": slurm} if slurm else {})
    assert agents.start("a", environment=surroundings).wait(90) == code, agents.story()
    socket = agents.runtime / "daemon.sock"
    with rpc.channel(f"unix:{socket}") as channel:
        jobs = pb_grpc.DaemonStub(channel).Status(pb.StatusRequest(), timeout=10).jobs
    assert [job.job for job in jobs] == held
    purge_and_stop(socket)


def test_an_unused_store_exits(tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    command = [sys.executable, "-m", "reft.elastic.stores.store_host", "--port", str(free_port()), "--idle-exit", "0.5"]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(PYTHONPATH=path), cwd="/")
    with host.stdout as output:
        assert output.readline() == b"ready\n"
    assert host.wait(60) == 0


def test_the_store_takes_as_many_connections_as_the_system_permits():
    """Each agent has two, and a shell often permits 1024 open files."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    words = f"exec {sys.executable} -m reft.elastic.stores.store_host --port {free_port()} --idle-exit 60"
    command = ["sh", "-c", f"ulimit -Sn 256 && {words}"]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(PYTHONPATH=path), cwd="/")
    try:
        with host.stdout as output:
            assert output.readline() == b"ready\n"
        soft, hard = psutil.Process(host.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard > 256
    finally:
        host.kill()
        host.wait()


@pytest.mark.slow
def test_two_unnamed_jobs_on_one_store_stay_apart(make, tmp_path):
    agents = make("--nnodes=1")
    agents.start("a", "--local-addr=127.0.0.1")
    assert agents.ranks(1) == {"a": 0}
    other = tmp_path / "other.py"
    other.write_text(agents.script.read_text())
    agents.script = other
    agents.start("b", "--local-addr=127.0.0.1")
    assert agents.ranks(1, after=1) == {"b": 0}, "otherwise b would wait as a spare of the other job"
    agents.finish()
    assert [agent.wait(60) for agent in agents.agents] == [0, 0], agents.story()


@pytest.mark.slow
def test_after_a_worker_is_killed_all_nodes_keep_their_ranks(make):
    agents = make("--nnodes=2", "--rdzv-id=job")
    agents.start("a", "--local-addr=127.0.0.1")
    agents.start("b", "--local-addr=127.0.0.2")
    before = agents.ranks(2)
    (pid,) = [row[1] for row in agents.workers() if row[0] == "b"]
    began = len(agents.workers())
    os.kill(pid, signal.SIGKILL)
    assert agents.ranks(2, after=began) == before == {"a": 0, "b": 1}
    agents.finish()
    assert [agent.wait(60) for agent in agents.agents] == [0, 0], agents.story()


def test_workers_of_a_killed_agent_end_and_its_successor_takes_its_rank(make):
    agents = make("--nnodes=2", "--rdzv-id=job", "--nproc-per-node=1", "--monitor-interval=0.02")
    agents.start("a", "--local-addr=127.0.0.1")
    killed = agents.start("b", "--local-addr=127.0.0.2")
    assert agents.ranks(2) == {"a": 0, "b": 1}
    (orphan,) = [psutil.Process(row[1]) for row in agents.workers() if row[0] == "b"]
    began = len(agents.workers())
    # The agent sends the workers to the orphan reaper in its next loop. It sleeps between two
    # loops.
    began_at = loops(psutil.Process(killed.pid))
    until(lambda: loops(psutil.Process(killed.pid)) > began_at + 50, 30, "the agent's next loop")
    killed.kill()
    killed.wait()
    until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE, 30, "the end of the orphan")
    agents.start("b", "--local-addr=127.0.0.2")
    assert agents.ranks(2, after=began) == {"a": 0, "b": 1}
    agents.finish()
    assert [agents.agents[i].wait(60) for i in (0, 2)] == [0, 0], agents.story()


def test_a_node_whose_workers_end_first_is_not_missed(make):
    """torch's agent then waits for the others in one call of the store."""
    agents = make("--nnodes=2", "--rdzv-id=job", conf=SHORT)
    agents.start("a", "--local-addr=127.0.0.1")
    agents.start("b", "--local-addr=127.0.0.2")
    assert agents.ranks(2) == {"a": 0, "b": 1}
    (worker,) = [row[1] for row in agents.workers() if row[0] == "b"]
    agents.finish("b")
    until(lambda: not psutil.pid_exists(worker), 30, "the end of b's worker")
    (b,) = [node for node, rank in state_of(agents).participants.items() if rank == 1]
    beats = set()
    # Longer than an agent may be silent. The first one may be from before the wait.
    until(lambda: beats.add(state_of(agents).last_heartbeats[b]) or len(beats) > 5, 30, "b's signs of life")
    agents.finish("a")
    assert [agent.wait(60) for agent in agents.agents] == [0, 0], agents.story()
    assert len(agents.workers()) == 2, agents.story()


def test_after_a_worker_failed_a_spare_stays_a_spare(make):
    agents = make("--nnodes=2", "--rdzv-id=job", "--monitor-interval=0.02", conf=SHORT)
    first = agents.start("a", "--local-addr=127.0.0.1")
    agents.start("b", "--local-addr=127.0.0.2")
    before = agents.ranks(2)
    agents.start("s", "--local-addr=127.0.0.3")
    until(lambda: state_of(agents).redundancy_list, 60, "the spare to be listed")
    (pid,) = [row[1] for row in agents.workers() if row[0] == "a"]
    os.kill(pid, signal.SIGKILL)
    assert agents.ranks(2, after=2) == before
    began_at = loops(psutil.Process(first.pid))
    until(lambda: loops(psutil.Process(first.pid)) > began_at + 50, 30, "some loops of an agent")
    agents.finish()
    assert [agent.wait(60) for agent in agents.agents] == [0, 0, 0], agents.story()
    assert len(agents.workers()) == 4, agents.story()


def test_an_agent_that_died_while_it_waited_ends_no_launch(make):
    agents = make("--nnodes=2", "--rdzv-id=job", conf=f"{SHORT},read_timeout=5")
    dead = agents.start("dead", "--local-addr=127.0.0.9")
    until(lambda: "is process" in agents.log("dead").read_text() or dead.poll() is not None, 60, "the store")
    until(lambda: state_of(agents).participants, 60, "the agent that waits")
    # The others would see that a process of this machine has ended, but not one of another machine.
    os.kill(dead.pid, signal.SIGSTOP)
    agents.start("a", "--local-addr=127.0.0.1")
    until(lambda: state_of(agents).complete, 60, "the round with the dead agent")
    agents.start("b", "--local-addr=127.0.0.2")
    assert agents.ranks(2) == {"a": 0, "b": 1}
    agents.finish()
    assert [agent.wait(60) for agent in agents.agents[1:]] == [0, 0], agents.story()
    assert len(agents.workers()) == 2, agents.story()


@pytest.mark.skipif(bool(etcd.why_not()), reason=etcd.why_not())
def test_agents_continue_when_the_leader_of_etcd_dies(tmp_path):
    with etcd.EtcdCluster(3) as cluster:
        flags = ["--rdzv-backend=reft", f"--rdzv-endpoint={cluster.endpoint}", f"--rdzv-conf=daemon=off,{QUICK}"]
        with Agents(tmp_path, *flags, "--nnodes=2", "--rdzv-id=job", "--max-restarts=3") as agents:
            for number, name in enumerate("ab", 1):
                agents.start(name, f"--local-addr=127.0.0.{number}")
            before = agents.ranks(2)
            began = len(agents.workers())
            cluster.kill(cluster.leader())
            (pid,) = [row[1] for row in agents.workers() if row[0] == "b"]
            os.kill(pid, signal.SIGKILL)
            assert agents.ranks(2, after=began) == before
            agents.finish()
            assert [agent.wait(90) for agent in agents.agents] == [0, 0], agents.story()


@pytest.mark.slow
def test_attach_works_under_torchruns_static_launch_with_a_job_key(tmp_path):
    """Two nodes, each with its own daemon; `tests/e2e/test_keyed_launches` has c10d and Slurm."""
    with (
        closing(DaemonProcess("--listen", "127.0.0.1:0")) as one,
        closing(DaemonProcess("--listen", "127.0.0.1:0")) as other,
        Agents(
            tmp_path, "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--nnodes=2", "--nproc-per-node=1",
            script=["-m", "tests.support.elastic_train", "--steps=12", "--out"],
        ) as agents,
    ):  # fmt: skip
        own = {"GLOO_SOCKET_IFNAME": "lo", "REFT_JOB": "job", "REFT_JOB_KEY": "the key of this job"}
        for rank, daemon in enumerate((one, other)):
            environment = {**own, "REFT_DAEMON": daemon.address}
            agents.start(f"n{rank}", "--local-addr=127.0.0.1", f"--node-rank={rank}", environment=environment)
        assert [agent.wait(150) for agent in agents.agents] == [0, 0], agents.story()
        for daemon in (one, other):
            assert daemon.status("job").whole >= 0
            token = daemon.call("Inventory", pb.InventoryRequest(job="job")).manifest.token
            assert token == JobKey(b"the key of this job").job_token("job")
