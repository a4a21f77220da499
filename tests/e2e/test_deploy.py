"""Checks what `examples/deploy` offers and a test can run without a cluster.

These are its scripts, and the commands in its files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed.run import parse_args

from reft.cli.demo.cluster import free_port
from reft.elastic.stores import store_host
from reft.wire import rpc
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.main import main as daemon_command
from tests.support.certificates import why_not
from tests.support.daemons import ROOT, until

DEPLOY = ROOT / "examples" / "deploy"
BIN = Path(sys.executable).parent

# Stand-ins for Slurm: a step starts one process for each node. A node is a loopback address with
# its own folder.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in $NODES; do
    SLURMD_NODENAME=$node REFT_RUNTIME_DIR=$FOLDER/$node REFT_DIR=$FOLDER/arena-$node "$@" &
    pids+=($!)
done
[[ $* == *reft-daemon* ]] && echo "${pids[@]}" > $FOLDER/daemons
for pid in "${pids[@]}"; do wait $pid || code=$?; done
exit ${code:-0}
"""
SCANCEL = """#!/bin/bash
echo "$@" > $FOLDER/scancelled
kill $(cat $FOLDER/daemons)
"""


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """Returns the environment of a batch script on three nodes."""
    for name, text in (("srun", SRUN), ("scancel", SCANCEL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}", "FOLDER": str(tmp_path), "SLURM_JOB_ID": "77",
        "SLURM_NNODES": "3", "SLURMD_NODENAME": "127.0.0.2", "NODES": "127.0.0.2 127.0.0.3 127.0.0.4",
        "STORE_PORT": str(free_port()), "DAEMON_PORT": str(free_port()), "PROCESSES_PER_NODE": "1", "REFT_INSECURE": "1",
        "MAX_RESTARTS": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def living_processes(slurm: dict[str, str]) -> list[psutil.Process]:
    """Returns processes of the job that still live."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FOLDER") == slurm["FOLDER"]:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


# A script that fails at once ends the job. A spare node that arrives later would wait for ten
# minutes, so that case has one node.
@pytest.mark.parametrize(
    "script, code, nodes, training_nodes", [("examples/ddp.py", 0, 3, 2), ("examples/missing.py", 1, 1, 1)]
)
def test_the_slurm_script_trains_and_leaves_nothing_behind(slurm, script, code, nodes, training_nodes):
    slurm["NODES"] = " ".join(slurm["NODES"].split()[:nodes])
    slurm |= {"SLURM_NNODES": str(nodes), "TRAINING_NODES": str(training_nodes)}
    done = subprocess.run(
        ["bash", DEPLOY / "train.sbatch", ROOT / script, "--steps", "300"],
        env=slurm, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if not code:
        assert "job 77: nothing held, starting fresh; 2 ranks on 2 nodes" in done.stderr
        assert "step 50: loss" in done.stdout and "was a spare" in done.stderr
    until(lambda: not living_processes(slurm), what="the end of all processes")
    folder = Path(slurm["FOLDER"])
    assert (folder / "scancelled").read_text().split() == ["--signal=TERM", "77.0"]
    assert not list(folder.glob("arena-*")), "daemons free their memory"


@pytest.mark.slow
def test_a_requeued_slurm_job_goes_on_from_storage(slurm, tmp_path):
    """Daemons that get SIGTERM flush, also with --purge; the requeued job keeps its number."""
    slurm |= {"NODES": "127.0.0.2", "SLURM_NNODES": "1", "TRAINING_NODES": "1"}
    slurm |= {"REFT_PERSIST": str(tmp_path / "storage"), "REFT_FLUSH_ON_EXIT": "1", "REFT_GRACE": "25s"}
    (tmp_path / "storage").mkdir()
    for steps, said in ((20, "nothing held, starting fresh"), (30, "GOES ON FROM STORAGE: step 20 (epoch 1)")):
        done = subprocess.run(
            ["bash", DEPLOY / "train.sbatch", ROOT / "examples/ddp.py", "--steps", str(steps)],
            env=slurm, capture_output=True, text=True, timeout=110, cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and said in done.stderr, done.stderr
        until(lambda: not living_processes(slurm), what="the end of all processes")


@pytest.mark.timeout(400)
def test_a_preempted_training_goes_on_from_storage(tmp_path):
    """The script gets SIGTERM, the daemon's memory is removed, and the same command is given."""
    storage = tmp_path / "storage"
    storage.mkdir()

    def start(name: str, **changes: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1",
            "REFT_RUNTIME_DIR": str(tmp_path / name), "REFT_DIR": str(tmp_path / f"arena-{name}"), "REFT_JOB": "run1",
            **changes,
        }  # fmt: skip
        command = [DEPLOY / "preemptible.sh", storage, "python", ROOT / "examples/ddp.py", "--steps", "400"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    preempted = start("first", REFT_FAILPOINTS="snapshot.chunk:stop:from=100")
    try:
        trainer = until(lambda: stopped_child(preempted), 200, what="a trainer that stands in a copy")
        until(lambda: whole_step(f"unix:{tmp_path}/first/daemon.sock") > 0, what="a whole step")
    finally:
        preempted.terminate()
    trainer.resume()
    output, errors = preempted.communicate(timeout=100)
    assert preempted.returncode == 143, errors
    assert not living_processes({"FOLDER": str(tmp_path)})
    shutil.rmtree(tmp_path / "arena-first")
    after, plain = start("second"), start("third", REFT_JOB="plain")
    (output, errors), (expected, _) = (each.communicate(timeout=100) for each in (after, plain))
    assert (after.returncode, plain.returncode) == (0, 0), errors
    step = int(re.findall("job run1 GOES ON FROM STORAGE: step ([0-9]+) ", errors)[0])
    assert output.splitlines() == expected.splitlines()[step // 50 :] and "step 400: loss" in output


def stopped_child(process: subprocess.Popen[str]) -> psutil.Process | None:
    """Returns the child of a process that SIGSTOP has stopped."""
    children = psutil.Process(process.pid).children()
    return next((child for child in children if child.status() == psutil.STATUS_STOPPED), None)


def whole_step(address: str) -> int:
    """Returns the newest whole step of the only job that a daemon holds; -1 if there is none."""
    try:
        with rpc.channel(address) as channel:
            jobs = pb_grpc.DaemonStub(channel).Status(pb.StatusRequest(), timeout=5).jobs
    except Exception:
        return -1
    return jobs[0].whole if jobs else -1


def test_the_files_name_variables_that_exist():
    known = {f"REFT_{option.name.upper()}" for option in daemon_command.params}
    known |= {"REFT_DAEMON", "REFT_RUNTIME_DIR", "REFT_JOB", "REFT_DIR"}
    texts = [path.read_text() for path in DEPLOY.iterdir() if path.suffix != ".md"]
    named = {name for text in texts for name in re.findall(r"REFT_[A-Z_]+", text)}
    assert {"REFT_PERSIST", "REFT_FLUSH_ON_EXIT"} <= named <= known


@pytest.fixture
def certificates(tmp_path) -> Path:
    if why_not():
        pytest.skip(why_not())
    folder = tmp_path / "certificates"
    for hosts in (["127.0.0.1"], ["node2.example,127.0.0.3"]):  # the second call adds a host to the first authority
        subprocess.run([DEPLOY / "certificates.sh", folder, *hosts], check=True, capture_output=True)
    return folder


def test_certificates_of_one_authority_for_each_host(certificates):
    for host, alternative_names in (
        ("127.0.0.1", "IP Address:127.0.0.1"),
        ("node2.example", "DNS:node2.example, IP Address:127.0.0.3"),
    ):
        Tls(certificates / f"{host}.pem", certificates / f"{host}.key", certificates / "ca.pem")
        command = ["openssl", "x509", "-in", certificates / f"{host}.pem", "-noout", "-ext", "subjectAltName"]
        assert alternative_names in subprocess.run(command, check=True, capture_output=True, text=True).stdout
        verify = ["openssl", "verify", "-x509_strict", "-CAfile", certificates / "ca.pem", certificates / f"{host}.pem"]
        subprocess.run(verify, check=True, capture_output=True)
    assert all(path.stat().st_mode & 0o077 == 0 for path in certificates.iterdir())


def test_the_unit_starts_a_daemon(certificates, tmp_path):
    unit = (DEPLOY / "reft-daemon@.service").read_text()
    environment = dict(
        pair.split("=", 1) for line in re.findall(r"^Environment=(.+)$", unit, re.M) for pair in line.split()
    )
    known = {f"REFT_{option.name.upper()}" for option in daemon_command.params}
    assert set(environment) == {"REFT_LISTEN", "REFT_TLS_CERT", "REFT_TLS_KEY", "REFT_TLS_CA"} <= known
    here = {
        **environment, "REFT_LISTEN": environment["REFT_LISTEN"].replace("%H", "127.0.0.1").replace("29700", "0"),
        "REFT_TLS_CERT": str(certificates / "127.0.0.1.pem"), "REFT_TLS_KEY": str(certificates / "127.0.0.1.key"),
        "REFT_TLS_CA": str(certificates / "ca.pem"), "REFT_RUNTIME_DIR": str(tmp_path / "run"),
    }  # fmt: skip
    program = Path(re.findall(r"^ExecStart=(.+)$", unit, re.M)[0]).name
    process = subprocess.Popen([BIN / program], env={**os.environ, **here}, stderr=subprocess.PIPE, text=True)
    try:
        until((tmp_path / "run/daemon.sock").exists, what="the socket")
        status = subprocess.run(
            [BIN / "reft-cli", "status"], env={**os.environ, **here}, capture_output=True, text=True, check=False
        )
        assert status.returncode == 0 and "no job is held" in status.stdout
    finally:
        process.terminate()
        _, log = process.communicate(timeout=20)
    assert "address=127.0.0.1:" in log


@pytest.mark.parametrize(
    ("manifest", "listen"),
    [("kubernetes.yaml", "train-$(JOB_COMPLETION_INDEX).train:29700"), ("kubernetes-node.yaml", "$(ADDRESS):29700")],
)
def test_the_commands_of_the_pods_are_valid(manifest, listen):
    text = (DEPLOY / manifest).read_text()
    commands = [json.loads(text_of_command) for text_of_command in re.findall(r"command: (\[.*?\])", text, re.S)]
    by_program = {command[0]: command[1:] for command in commands}
    assert set(by_program) - {"python"} == {"test", "reft-daemon", "torchrun"}
    with daemon_command.make_context("reft-daemon", list(by_program["reft-daemon"])) as context:
        assert context.params["listen"] == listen
    assert by_program.get("python", ["-m", store_host.__name__])[:2] == ["-m", store_host.__name__]
    assert parse_args(by_program["torchrun"]).rdzv_backend == "reft"
    assert by_program["test"][-1].startswith("/run/reft/own/")  # the folder that the file sets as REFT_RUNTIME_DIR
