"""What the READMEs say to type against daemons: typed as it stands, on a job run1 of two nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.budget import SLOTS
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.node_writer import stored_ranges
from reft_daemon.persist.slot_copy import read_head, verify_file
from reft_daemon.persist.storage_folder import StorageFolder
from tests.support.certificates import why_not
from tests.support.commands import Reader
from tests.support.daemons import DaemonProcess, until
from tests.support.objects import object_server
from tests.support.trainers import Spec, Trainers

HERE = "127.0.0.1:0"  # in place of a node's name and port


@pytest.fixture
def nodes() -> Iterator[list[DaemonProcess]]:
    started = [DaemonProcess("--node", name, "--listen", HERE) for name in ("node1", "node2", "node3")]
    yield started
    for node in started:
        node.close()


def newest_whole(node: DaemonProcess) -> int:
    """The newest whole step of any job there."""
    return max((job.whole for job in node.call("Status", pb.StatusRequest()).jobs), default=-1)


def test_what_is_typed_while_a_job_trains_and_once_a_node_is_lost(nodes, tmp_path):
    node1, node2, node3 = nodes
    reader = Reader(tmp_path, {"node3:29700": node3.address}, REFT_DAEMON=node1.address)
    spec = Spec("", job="run1", steps=12, options={"width": 96, "seal_at": [6, 7], "pause_at": [8]})
    trainers = Trainers(spec, 2, [node1.address, node2.address])
    try:
        until(lambda: newest_whole(node1) >= 7, what="that step 7 is whole")
        assert "PROTECTED" in reader.run("reft-cli status")
        assert reader.run("reft-cli status --check")
        assert "LOSS OF" not in reader.run("reft-cli status")
        assert reader.run("reft-cli status run1").startswith("job     run1")
        assert "LOSS OF" in reader.run("reft-cli status --all")
        job = json.loads(reader.run("reft-cli status --job run1 --json"))["jobs"][0]
        assert [node["node"] for node in job["nodes"]] == ["node1", "node2"]
        reader.run("reft-cli status --job run1 --what-if lose=node2")
        with reader.start("reft-cli status --watch") as watch:
            assert watch.stdout is not None and watch.stdout.readline().startswith("job     run1")
            os.killpg(watch.pid, signal.SIGINT)
            watch.stdout.read()
        assert watch.returncode == 130
        assert "1 rank of job run1" in reader.run("reft-cli timeline run1 --output trace.json")
        assert "after step" in reader.run("python bench/picture.py trace.json")
        assert "after step" in reader.run(".venv/bin/python bench/picture.py trace.json")
    finally:
        trainers.kill()
    node2.kill()
    shutil.rmtree(node2.folder)
    assert "Nothing was changed" in reader.run("reft-cli recover run1")
    assert "node2" in reader.run("reft-cli recover run1 --yes --onto node2=node3:29700")
    assert "freed" in reader.run("reft-cli purge run1 --yes")
    assert "attach did not start this daemon" in reader.run("reft-cli purge --all --yes")


def test_a_checkpoint_is_asked_for_while_a_job_trains(tmp_path):
    """All bytes of a real state are on storage, except parity, and fit their digests."""
    root = tmp_path / "storage"
    root.mkdir()
    nodes = [DaemonProcess("--node", name, "--listen", HERE, "--persist", str(root)) for name in ("node1", "node2")]
    spec = Spec("", job="run1", steps=12, options={"width": 96, "seal_at": [6, 7], "pause_at": [8]})
    trainers = Trainers(spec, 2, [node.address for node in nodes])
    try:
        until(lambda: newest_whole(nodes[0]) >= 7, what="that step 7 is whole")
        (tmp_path / "home").mkdir()
        reader = Reader(tmp_path / "home", {"/nfs/reft": str(root)}, REFT_DAEMON=nodes[1].address)
        assert "is on storage" in reader.run("reft-cli persist run1")
        assert {"memory", "storage"} <= set(reader.run("reft-cli list run1").split())
        assert "job run1" in reader.run("reft-cli list /nfs/reft/")
        assert "0 damaged" in reader.run("reft-cli verify /nfs/reft run1")
        document = json.loads(reader.run("reft-cli persist run1 --json"))
        assert document["step"] >= 7
        (job,) = json.loads(reader.run("reft-cli status --job run1 --json"))["jobs"]
        assert (job["storage"]["persisted_step"], job["storage"]["trouble"]) == (document["step"], None)
        (folder,) = (root / "run1").iterdir()
        store = CheckpointStore(StorageFolder(root), "run1")
        (listed, *_) = store.checkpoints(folder.name)
        manifest = pb.Manifest.FromString(listed.manifest.job_manifest)
        assert manifest.lineage == folder.name and manifest.slots == SLOTS + 1
        files = store.indexes(listed)
        for index, node in enumerate(manifest.nodes):
            for rank, ranges in stored_ranges(manifest, index).items():
                with open(store.open(*files[rank]), "rb") as file:
                    assert sum(verify_file(file.fileno(), files[rank][1], ranges)) > 96
                    parity = ranges[1].begin - ranges[0].end
                    assert parity > 0 and node.name in ("node1", "node2")
                    file.seek(read_head(file.fileno())[1].geometry.data_offset + ranges[0].end)
                    assert not any(file.read(parity)), "parity is left out"
    finally:
        trainers.kill()
        for each in nodes:
            each.close()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("reft-daemon --listen node1:29700 --insecure", "travels in plain text"),
        (
            "reft-daemon --node node1 --listen node1:29700 --tls-cert /etc/reft/alice/nodes/node1.pem "
            "--tls-key /etc/reft/alice/nodes/node1.key --tls-ca /etc/reft/ca.pem",
            "address=127.0.0.1:",
        ),
        ("reft-daemon --spare 24x2.7GiB", "spare"),
    ],
)
def test_a_daemon_starts(command, said, tmp_path):
    if why_not():
        pytest.skip(why_not())
    certificates = tmp_path / "certificates"
    reader = Reader(
        tmp_path, {"/etc/reft": str(certificates), "node1:29700": HERE},
        REFT_DIR=str(tmp_path / "slots"), REFT_MEMORY="1MiB",
    )  # fmt: skip
    reader.run("examples/deploy/certificates.sh /etc/reft alice node1 node2")
    (tmp_path / "run").mkdir()
    with reader.start(command) as daemon:
        until(lambda: Path(tmp_path / "run/daemon.sock").exists() or daemon.poll() is not None, what="its socket")
        assert "no job is held here" in reader.run("reft-cli status")
        os.killpg(daemon.pid, signal.SIGTERM)
        output = daemon.stdout.read() if daemon.stdout else ""
    assert daemon.returncode == 0 and said in output, output


@pytest.mark.parametrize(
    ("command", "later"),
    [
        (
            "reft-daemon --persist s3://bucket/prefix --persist-every 30m",
            {
                "reft-cli verify s3://bucket/prefix": "1 checkpoint read, 0 damaged.",
                "reft-cli export s3://bucket/prefix/run1 --to /shared/run1-hf": "step 4 (epoch 1)",
            },
        ),
        (
            "reft-daemon --persist /shared/reft --persist-key-file /etc/reft/key",
            {"reft-cli verify /shared/reft --persist-key-file /etc/reft/key": "1 checkpoint read, 0 damaged."},
        ),
    ],
)
def test_what_is_typed_of_object_stores_and_keys(command, later, tmp_path):
    """Without the daemon, the checkpoint is verified, and one is exported."""
    storage, key = tmp_path / "storage", tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    for folder in (storage, tmp_path / "run"):
        folder.mkdir()
    with object_server() as server:
        words = {"s3://bucket": f"s3://{server.new_bucket()}", "/shared/reft": str(storage), "/etc/reft/key": str(key)}
        words |= {"/shared/": f"{tmp_path}/"}
        reader = Reader(tmp_path, words, REFT_DIR=str(tmp_path / "slots"))
        with reader.start(command) as daemon:
            try:
                socket = tmp_path / "run/daemon.sock"
                until(lambda: socket.exists() or daemon.poll() is not None, what="its socket")
                trainers = Trainers(Spec(f"unix:{socket}", job="run1", options={"seal_at": [4], "pause_at": [4]}))
                trainers.wait_for(4)
                assert "job run1: step 4 is on storage" in reader.run("reft-cli persist run1")
                trainers.kill()
            finally:
                os.killpg(daemon.pid, signal.SIGTERM)
        for typed, expected in later.items():
            assert expected in reader.run(typed)


@pytest.mark.parametrize(
    "command",
    ["reft-daemon --persist /shared/reft --persist-every 30m --keep 3 --keep-each 24h --flush-on-exit --grace 25s"],
)
def test_what_is_typed_of_checkpoints(command, tmp_path):
    """The daemon flushes at its end, so a newer step is on storage then."""
    storage = tmp_path / "storage"
    reader = Reader(tmp_path, {"/shared/reft": str(storage)}, REFT_DIR=str(tmp_path / "slots"))
    for folder in (storage, tmp_path / "run"):
        folder.mkdir()
    with reader.start(command) as daemon:
        try:
            socket = tmp_path / "run/daemon.sock"
            until(lambda: socket.exists() or daemon.poll() is not None, what="its socket")
            spec = Spec(f"unix:{socket}", job="run1", options={"seal_at": [4, 8], "pause_at": [4, 8]})
            trainers = Trainers(spec)
            trainers.wait_for(4)
            assert "job run1: step 4 is on storage" in reader.run("reft-cli persist run1")
            assert "step 4 (epoch 1)" in reader.run("reft-cli list run1")
            trainers.let_go(4)
            trainers.wait_for(8)
            trainers.kill()
        finally:
            os.killpg(daemon.pid, signal.SIGTERM)
        output = daemon.stdout.read() if daemon.stdout else ""
    assert daemon.returncode == 0 and "step 8 (epoch 1) is on storage" in output, output
    assert "step 8 (epoch 1)" in reader.run("reft-cli list /shared/reft")
    assert "2 checkpoints read, 0 damaged." in reader.run("reft-cli verify /shared/reft")


def test_what_is_typed_to_export_and_to_go_back(tmp_path):
    storage = tmp_path / "storage"
    for folder in (storage, tmp_path / "home"):
        folder.mkdir()
    daemon = DaemonProcess("--persist", str(storage))
    words = {"/shared/reft": str(storage), "/shared/": f"{tmp_path}/", "1200": "4"}
    reader = Reader(tmp_path / "home", words, REFT_DAEMON=daemon.address)
    trainers = Trainers(Spec(daemon.address, job="run1", options={"seal_at": [4, 8], "pause_at": [4, 8]}))
    try:
        trainers.wait_for(4)
        reader.run("reft-cli persist run1 --json")
        trainers.let_go(4)
        trainers.wait_for(8)
        trainers.kill()
        assert "step 8 (epoch 1)" in reader.run("reft-cli export run1 --to /shared/run1-hf --only weights --dtype bf16")
        assert (tmp_path / "run1-hf/model.safetensors").exists()
        typed = "reft-cli export /shared/reft/run1 --to /shared/run1-dcp --format dcp --step 1200"
        assert "step 4 (epoch 1)" in reader.run(typed)
        assert (tmp_path / "run1-dcp/.metadata").exists()
        assert "Nothing was changed" in reader.run("reft-cli recover run1 --step 1200")
        assert "begins from step 4" in reader.run("reft-cli recover run1 --step 1200 --yes")
        assert "left behind" not in reader.run("reft-cli list run1")
    finally:
        trainers.kill()
        daemon.close()
