"""Runs the commands that the READMEs print to install reft, to train, and to measure.

make test    the first command of the README
make soak    all others, for some minutes; benchmarks take half an hour
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.cli.demo.cluster import free_port
from reft.elastic.stores import store_host
from tests.support.commands import BENCHMARK, PYTEST, ROOT, Reader, matching
from tests.support.daemons import purge_and_stop

pytestmark = pytest.mark.timeout(600)
# Replaces train.py where the command starts more ranks than this machine can train.
RANK_PRINTER = "import os; os.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())\n"


@pytest.fixture
def reader(tmp_path) -> Iterator[Reader]:
    reader_in_folder = Reader(tmp_path)
    yield reader_in_folder
    stop_daemons(tmp_path)


def stop_daemons(folder: Path) -> None:
    """Stops the daemons that attach or an agent has started in this folder."""
    for socket in folder.glob("run*/daemon.sock"):
        purge_and_stop(socket)


def assert_trained(output: str) -> None:
    """Fails unless the example printed its last losses, and reft was attached."""
    assert re.search(r"step \d+: loss", output) and "nothing held, starting fresh" in output, output


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 examples/ddp.py",
        *(
            pytest.param(command, marks=pytest.mark.soak)
            for command in (
                "python examples/ddp.py",
                "REFT_JOB=run1 python examples/ddp.py",
                "torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 examples/fsdp2.py",
                "torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 examples/zero1.py",
                "torchrun --nproc-per-node=8 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 "
                "examples/tensor_pipeline_3d.py",
            )
        ),
    ],
)
def test_an_example_trains(command, reader):
    assert_trained(reader.run(command, timeout=300))


@pytest.mark.soak
@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 "
        "--rdzv-conf=warm=yes,warm_imports=json+csv train.py"
    ],
)
def test_workers_are_forked(command, reader):
    shutil.copy(ROOT / "examples/ddp.py", reader.folder / "train.py")
    assert_trained(reader.run(command))


@pytest.fixture
def store() -> Iterator[int]:
    """Yields the port of the agents' store, on a host that does not train."""
    port = free_port()
    command = [sys.executable, "-m", store_host.__name__, "--port", str(port), "--idle-exit", "600"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline(), "the store prints that it is ready"
    yield port
    process.kill()
    process.communicate()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("command", "nodes", "ranks"),
    [
        (
            "torchrun --nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft "
            "--rdzv-endpoint=storehost:29400 examples/hsdp.py",
            2,
            0,
        ),
        (
            "torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=20 --rdzv-backend=reft "
            "--rdzv-endpoint=storehost:29400 --rdzv-id=run1 train.py",
            4,
            32,
        ),
    ],
)
def test_agents_of_several_nodes_meet(command, nodes, ranks, store, tmp_path):
    """Each node is an agent with its own folder."""
    reader = Reader(tmp_path, {"storehost:29400": f"127.0.0.1:{store}"}, REFT_INSECURE="1")
    (tmp_path / "train.py").write_text(RANK_PRINTER)
    agents = [reader.start(command, REFT_RUNTIME_DIR=str(tmp_path / f"run{node}")) for node in range(nodes)]
    try:
        outputs = [agent.communicate(timeout=400)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
        stop_daemons(tmp_path)
    assert [agent.returncode for agent in agents] == [0] * nodes, "\n".join(outputs)
    if ranks:
        assert len(re.findall(r"^rank \d+$", "\n".join(outputs), re.M)) == ranks
    else:
        assert_trained("\n".join(outputs))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("store", "command"),
    [
        (
            "python -c 'import time; from torch.distributed import TCPStore; "
            'store = TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False); time.sleep(1e9)\'',
            "torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=storehost:29400 "
            "--rdzv-conf=is_host=false,keep_alive_interval=4,keep_alive_max_attempt=3 train.py",
        )
    ],
)
def test_agents_meet_at_a_store_of_torch(store, command, tmp_path):
    port = str(free_port())
    reader = Reader(tmp_path, {"storehost": "127.0.0.1", "29400": port})
    (tmp_path / "train.py").write_text(RANK_PRINTER)
    with reader.start(store) as host:
        agents = [reader.start(command) for _ in range(4)]
        try:
            outputs = [agent.communicate(timeout=200)[0] for agent in agents]
        finally:
            for process in (*agents, host):
                process.kill()
    assert [agent.returncode for agent in agents] == [0] * 4, "\n".join(outputs)


@pytest.mark.soak
@pytest.mark.parametrize("command", ["make demo", "reft-cli demo"])
def test_the_demo_passes(command, reader):
    assert "optimizer tensors of every rank equal in every bit" in reader.run(command, timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("command", ["python bench/record_demo.py examples/demo.svg"])
def test_the_demo_is_drawn(command, reader):
    reader.run(command, timeout=300)
    picture = (reader.folder / "examples/demo.svg").read_text()
    assert picture.startswith("<svg") and "SIGKILL" in picture and len(picture) < 60_000


@pytest.mark.soak
@pytest.mark.parametrize(
    ("wheel", "install", "uninstall"),
    [("pip wheel --no-deps -w dist .", "pip install .", "pip uninstall -y torch-reft")],
)
def test_a_checkout_is_installed_and_removed(wheel, install, uninstall, tmp_path):
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", ROOT, checkout], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (tmp_path / "reader").mkdir()
    reader = Reader(tmp_path / "reader", PATH=f"{tmp_path / 'venv/bin'}:/usr/bin:/bin", PYTHONPATH="")
    reader.folder = checkout
    reader.run(wheel, timeout=200)
    assert len(list((checkout / "dist").glob("*.whl"))) == 1
    reader.run(install, timeout=550)
    assert "Shows, recovers and frees the training state" in reader.run("cd / && reft-cli --help")
    reader.run(uninstall)
    assert not (tmp_path / "venv/bin/reft-cli").exists()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", matching(BENCHMARK))
def test_a_benchmark_runs(command, reader):
    shown = reader.start(command)
    try:
        output, _ = shown.communicate(timeout=3500)
    finally:
        if shown.poll() is None:
            shown.send_signal(signal.SIGTERM)
    assert shown.returncode == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("command", matching(PYTEST))
def test_pytest_collects_tests_for_the_command(command, reader):
    """The tests themselves run in make test, make soak or make chaos."""
    assert re.search(r"\d+(/\d+)? tests? collected", reader.run(command, PYTEST_ADDOPTS="--collect-only -q"))
