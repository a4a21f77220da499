"""Checks what `examples/deploy` offers and a test can run without a cluster.

These are its scripts, and the commands in its files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.run import parse_args

from reft.cli.demo.cluster import free_port
from reft.client.attach.report import NO_KEY
from reft.config import JOB_KEY_VARIABLES
from reft.elastic.stores import store_host
from reft.wire import rpc
from reft.wire.certificate_role import Role
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


# A spare node that arrives after the end of a job would wait for ten minutes. So training begins
# once each node has an agent. A script that fails at once has one node.
TRAIN = f"""
import os, runpy, threading
while not os.path.exists(os.path.join(os.environ["FOLDER"], "go")):
    threading.Event().wait(0.05)
runpy.run_path("{ROOT / "examples/ddp.py"}", run_name="__main__")
"""


@pytest.mark.parametrize(
    "script, code, nodes, training_nodes",
    [pytest.param("train.py", 0, 3, 2, marks=pytest.mark.slow), ("missing.py", 1, 1, 1)],
)
@pytest.mark.timeout(600)  # five processes import torch
def test_the_slurm_script_trains_and_leaves_nothing_behind(slurm, script, code, nodes, training_nodes, tmp_path):
    names = slurm["NODES"].split()[:nodes]
    slurm |= {"NODES": " ".join(names), "SLURM_NNODES": str(nodes), "TRAINING_NODES": str(training_nodes)}
    (tmp_path / "train.py").write_text(TRAIN)
    job = subprocess.Popen(
        ["bash", DEPLOY / "train.sbatch", tmp_path / script, "--steps", "300"],
        env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    if not code:
        sockets = [f"unix:{tmp_path}/{name}/daemon.sock" for name in names]
        until(lambda: all(has_agent(socket) for socket in sockets), 300, "an agent on each node")
        (tmp_path / "go").touch()
    output, errors = job.communicate(timeout=200)
    assert job.returncode == code, errors
    if not code:
        assert "job 77: nothing held, starting fresh; 2 ranks on 2 nodes" in errors
        assert "step 50: loss" in output and "was a spare" in errors
        assert errors.count(NO_KEY) == 1, "two nodes without a job key are told what that means, once"
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
            env=slurm, capture_output=True, text=True, timeout=250, cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and said in done.stderr, done.stderr
        until(lambda: not living_processes(slurm), what="the end of all processes")


@pytest.mark.timeout(900)
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
    until(lambda: has_ended(trainer), 200, what="the end of the trainer")
    output, errors = preempted.communicate(timeout=200)
    assert preempted.returncode == 143, errors
    assert not living_processes({"FOLDER": str(tmp_path)})
    shutil.rmtree(tmp_path / "arena-first")
    after, plain = start("second"), start("third", REFT_JOB="plain")
    (output, errors), (expected, _) = (each.communicate(timeout=200) for each in (after, plain))
    assert (after.returncode, plain.returncode) == (0, 0), errors
    step = int(re.findall("job run1 GOES ON FROM STORAGE: step ([0-9]+) ", errors)[0])
    assert output.splitlines() == expected.splitlines()[step // 50 :] and "step 400: loss" in output


def stopped_child(process: subprocess.Popen[str]) -> psutil.Process | None:
    """Returns the child of a process that SIGSTOP has stopped."""
    children = psutil.Process(process.pid).children()
    return next((child for child in children if child.status() == psutil.STATUS_STOPPED), None)


def has_ended(trainer: psutil.Process) -> bool:
    """Resumes a trainer, which may stop again before the script passes on the signal."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if trainer.status() == psutil.STATUS_STOPPED:
            trainer.resume()
        return trainer.status() == psutil.STATUS_ZOMBIE
    return True


def status_of(address: str) -> pb.StatusReply:
    """Returns the status of a daemon; an empty one if none answers."""
    try:
        with rpc.channel(address) as channel:
            return pb_grpc.DaemonStub(channel).Status(pb.StatusRequest(), timeout=5)
    except Exception:
        return pb.StatusReply()


def has_agent(address: str) -> bool:
    return bool(status_of(address).agents)


def whole_step(address: str) -> int:
    """Returns the newest whole step of the only job that a daemon holds; -1 if there is none."""
    jobs = status_of(address).jobs
    return jobs[0].whole if jobs else -1


def test_the_files_name_variables_that_exist():
    known = {f"REFT_{option.name.upper()}" for option in daemon_command.params}
    known |= {"REFT_DAEMON", "REFT_RUNTIME_DIR", "REFT_JOB", "REFT_DIR", *JOB_KEY_VARIABLES}
    texts = [path.read_text() for path in DEPLOY.iterdir() if path.suffix != ".md"]
    named = {name for text in texts for name in re.findall(r"REFT_[A-Z_]+", text)}
    assert {"REFT_PERSIST", "REFT_FLUSH_ON_EXIT"} <= named <= known


@pytest.fixture
def certificates(tmp_path) -> Path:
    if why_not():
        pytest.skip(why_not())
    folder = tmp_path / "certificates"
    for arguments in (["alice", socket.gethostname(), "node2"], ["bob", "node2"]):  # bob's are of the same authority
        subprocess.run([DEPLOY / "certificates.sh", folder, *arguments], check=True, capture_output=True)
    return folder


def test_certificates_of_one_authority_for_each_daemon_and_agent(certificates):
    ca = certificates / "ca.pem"
    for user, kind, name, role, purposes in (
        ("alice", "nodes", socket.gethostname(), Role("alice", socket.gethostname()), {"sslserver", "sslclient"}),
        ("alice", "agents", "node2", Role("alice", agent="node2"), {"sslclient"}),
        ("bob", "nodes", "node2", Role("bob", "node2"), {"sslserver", "sslclient"}),
    ):
        cert = certificates / user / kind / f"{name}.pem"
        assert Tls(cert, cert.with_suffix(".key"), ca).role == role
        for purpose in ("sslserver", "sslclient"):
            verify = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", ca, cert]
            fits = subprocess.run(verify, capture_output=True, check=False).returncode == 0
            assert fits == (purpose in purposes), (cert, purpose)
    assert all(path.stat().st_mode & 0o077 == 0 for path in certificates.rglob("*"))


@pytest.mark.parametrize(("user", "node"), [("Alice", "n"), ("a/b", "n"), ("", "n"), ("alice", "../n"), ("alice", "")])
def test_names_that_no_certificate_can_have_are_refused(tmp_path, user, node):
    folder = tmp_path / "certificates"
    done = subprocess.run([DEPLOY / "certificates.sh", folder, user, node], check=False, capture_output=True, text=True)
    assert done.returncode != 0 and not folder.exists()
    assert re.search(r"Allowed are|FOLDER USER NODE", done.stderr)


def test_the_unit_starts_a_daemon(certificates, tmp_path):
    unit = (DEPLOY / "reft-daemon@.service").read_text()
    environment = dict(
        pair.split("=", 1) for line in re.findall(r"^Environment=(.+)$", unit, re.M) for pair in line.split()
    )
    known = {f"REFT_{option.name.upper()}" for option in daemon_command.params}
    assert set(environment) == {"REFT_LISTEN", "REFT_TLS_CERT", "REFT_TLS_KEY", "REFT_TLS_CA"} <= known
    words = {"%i": "alice", "%H": socket.gethostname(), "/etc/reft": str(certificates)}
    for word, replacement in words.items():
        environment = {name: value.replace(word, replacement) for name, value in environment.items()}
    here = {
        **environment, "REFT_LISTEN": "127.0.0.1:0",
        "REFT_RUNTIME_DIR": str(tmp_path / "run"),
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


# Kubernetes

MANIFESTS = ("kubernetes.yaml", "kubernetes-node.yaml")


def pods_of(manifest: str) -> list[dict[str, Any]]:
    """Returns the pod specifications in a file."""
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((DEPLOY / manifest).read_text()))
    assert all({"apiVersion", "kind", "metadata"} <= set(document) for document in documents)
    templates = [document.get("template") or document.get("spec", {}).get("template") for document in documents]
    return [template["spec"] for template in templates if template]


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize(
    ("manifest", "name", "listen", "bulk"),
    [
        ("kubernetes.yaml", "train-$(INDEX)", "train-$(INDEX).train:29700", "train-$(INDEX).train:29701"),
        ("kubernetes-node.yaml", "$(NODE)", "$(ADDRESS):29700", "$(ADDRESS):29701"),
    ],
)
def test_the_commands_of_the_pods_are_valid(manifest, name, listen, bulk):
    containers = {each["name"]: each for pod in pods_of(manifest) for each in containers_of(pod)}
    daemon, train = containers["reft-daemon"], containers["train"]
    with daemon_command.make_context("reft-daemon", daemon["command"][1:]) as context:
        assert [context.params[key] for key in ("node", "listen", "bulk")] == [name, listen, bulk]
    if "store" in containers:
        assert containers["store"]["command"][:3] == ["python", "-m", store_host.__name__]
    assert parse_args(train["command"][1:]).rdzv_backend == "reft"
    probe = daemon.get("startupProbe") or daemon["readinessProbe"]
    variables = {variable["name"]: variable.get("value") for variable in daemon["env"]}
    assert probe["exec"]["command"][-1] == f"{variables['REFT_RUNTIME_DIR']}/daemon.sock"
    for container in (daemon, train):  # Kubernetes puts in only what stands further up
        known: set[str] = set()
        for variable in container["env"]:
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= known, variable
            known.add(variable["name"])
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container["command"]))) <= known


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_the_pods_have_least_privilege(manifest):
    for pod in pods_of(manifest):
        assert pod["automountServiceAccountToken"] is False
        of_pod = pod["securityContext"]
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"} and of_pod["runAsUser"] == 1000
        for container in containers_of(pod):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True
            assert own["capabilities"]["drop"] == ["ALL"] and not own.get("privileged")
            # One container is root's: it gives away a folder of the host, and ends.
            if container["name"] == "folder":
                assert own["runAsUser"] == 0 and own["capabilities"]["add"] == ["CHOWN"]
            else:
                assert "add" not in own["capabilities"] and (own | of_pod)["runAsNonRoot"] is True
                assert own.get("runAsUser", 1000) == 1000


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_secrets_are_read_by_their_user_alone_and_no_port_of_the_host_is_taken_but_those_of_the_page(manifest):
    page = (DEPLOY / "README.md").read_text()
    for pod in pods_of(manifest):
        secrets = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
        # fsGroup gives them to the group of user 1000. Nobody may write them.
        assert all(secret["defaultMode"] == 0o440 for secret in secrets.values())
        assert pod["securityContext"].get("fsGroup") == 1000 or not secrets
        assert not (pod.get("hostNetwork") and manifest == "kubernetes.yaml")
        for container in containers_of(pod):
            mounts = [each for each in container.get("volumeMounts", []) if each["name"] in secrets]
            assert all(mount["readOnly"] is True for mount in mounts)
            assert not any("hostPort" in port for port in container.get("ports", []))
            ports = set(re.findall(r":(\d{4,5})\b", " ".join(container["command"])))
            assert all(port in page for port in ports)


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_each_capability_and_each_share_of_the_host_says_why(manifest):
    lines = (DEPLOY / manifest).read_text().splitlines()
    added = [line for line in lines if re.match(r"\s*- [A-Z_]+\b", line)]
    shares = [line for line in lines if re.match(r"\s*(hostPID|hostNetwork|hostIPC|shareProcessNamespace): true", line)]
    assert all(re.search(r" # \w", line) for line in (*added, *shares)) and shares
    assert not any("add: [" in line for line in lines), "each capability stands on a line of its own"


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_only_daemons_have_the_keys_of_daemons(manifest):
    for pod in pods_of(manifest):
        secrets = {each["name"]: each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
        for container in containers_of(pod):
            mounted = {
                secrets[mount["name"]] for mount in container.get("volumeMounts", []) if mount["name"] in secrets
            }
            expected = {"reft-daemon": {"reft-nodes"}, "train": {"reft-agents"}}
            assert mounted == expected.get(container["name"], set())


def test_only_the_pods_of_the_job_reach_its_pods_and_its_store():
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    policies = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    members = {"podSelector": {"matchLabels": {"job-name": "train"}}}
    assert [policy["podSelector"]["matchLabels"] for policy in policies] == [
        {"job-name": "train"},
        {"app": "train-store"},
    ]
    for policy in policies:
        assert policy["policyTypes"] == ["Ingress"] and [each["from"] for each in policy["ingress"]] == [[members]]
    assert policies[1]["ingress"][0]["ports"] == [{"port": 29400}]
