"""`reft-cli rehearse` on real trainings: clean ones pass, and each fault is found by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.daemons import ROOT
from tests.support.reached_loop import EPOCH

LOOP = (sys.executable, "-m", "tests.support.rehearsed_loop")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--max-restarts=2", "--rdzv-backend=reft", "--rdzv-id=run1",
            "--nproc-per-node=2")  # fmt: skip


def rehearsed(tmp_path, *command: str, kill: str = "rank", code: int = 0) -> dict:
    """Runs `reft-cli rehearse --json`, and returns its document."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1",
                   "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    arguments = [
        sys.executable,
        "-m",
        "reft.cli.main",
        "rehearse",
        "--json",
        "--steps",
        "12",
        "--kill",
        kill,
        "--",
        *command,
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=1300)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def passed(report: dict) -> bool:
    return (report["outcome"], report["compared_through"], report["restored_from"]) == ("equal", 12, "memory")


def kinds(report: dict) -> list[str]:
    return [cause["kind"] for cause in report["causes"]]


@pytest.mark.slow  # test_quickstart types this command
@pytest.mark.timeout(600)
def test_the_quickstart_passes(tmp_path):
    assert passed(rehearsed(tmp_path, sys.executable, "examples/quickstart.py"))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.timeout(600)
def test_a_prefetched_batch_is_found(tmp_path):
    report = rehearsed(tmp_path, *LOOP, "--fault", "prefetch", code=1)
    assert (report["outcome"], report["difference"]["what"], kinds(report)[0]) == (
        "different",
        "inputs",
        "prefetched-batch",
    )


@pytest.mark.timeout(1500)
def test_what_the_script_reached_on_each_side_of_the_kill_is_told(tmp_path):
    report = rehearsed(tmp_path, sys.executable, "-m", "tests.support.reached_loop")
    assert passed(report)
    end = -(-report["restored_step"] // EPOCH) * EPOCH  # of the epoch in which the run went on

    def event(after_step, how):
        return {"state": "reached", "after_step": after_step, "how": how}

    lines = (ROOT / "tests/support/reached_loop.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith("# the checkpoint"))
    assert report["reached"] == {
        "before_kill": {
            "validation": event(EPOCH, "a forward in eval mode"),
            "epoch_end": event(EPOCH, "epoch 0 of a ResumableLoader"),
            "checkpoint": {"state": "not reached", "after_step": None, "how": None},
        },
        "after_kill": {
            "validation": event(end, "a forward in eval mode"),
            "epoch_end": event(end, f"epoch {end // EPOCH - 1} of a ResumableLoader"),
            "checkpoint": event(end, f"torch.save at reached_loop.py:{line}"),
        },
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("fault", "outcome", "code", "kind"),
    [
        ("moved", "different", 1, "moved-generator"),
        ("drawn", "different", 1, "moved-generator"),
        ("scheduler", "different", 1, "forgotten-scheduler"),
        ("ema", "forgotten", 1, "forgotten-ema"),
        ("worker", "not deterministic", 2, "unseeded-data"),
        ("hash", "not deterministic", 2, "hash-order"),
        ("position", "different", 1, "loader-began-again"),
        ("epoch", "different", 1, "skipped-batches"),
    ],
)
def test_a_fault_is_found_by_name(tmp_path, fault, outcome, code, kind):
    report = rehearsed(tmp_path, *LOOP, "--fault", fault, code=code)
    assert report["outcome"] == outcome and kind in kinds(report), report
    if fault == "moved":
        assert "the first step: `torch.rand(3)` at rehearsed_loop.py:" in report["causes"][0]["cause"]
        assert report["not_seen"][0].startswith("the first batch: ")
    if fault == "drawn":
        moments = "between the first batch and the first forward: `torch.rand(3)  # after the batch` at "
        assert moments in report["causes"][0]["cause"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kill", ["all", "daemon"])
def test_other_kills_pass(tmp_path, kill):
    assert passed(rehearsed(tmp_path, *TORCHRUN, "examples/ddp.py", kill=kill))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "script",
    ["fsdp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("quickstart", "ddp", "zero1", "hsdp"))],
)
def test_the_examples_pass_on_two_ranks(tmp_path, script):
    assert passed(rehearsed(tmp_path, *TORCHRUN, f"examples/{script}.py"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_pipeline_passes_though_its_stages_learn_shapes_from_unwritten_memory(tmp_path):
    assert passed(rehearsed(tmp_path, *TORCHRUN[:-1], "--nproc-per-node=8", "examples/tensor_pipeline_3d.py"))


def test_each_example_is_rehearsed():
    tests = "".join((ROOT / "tests" / each / "test_rehearse.py").read_text() for each in ("e2e", "trainers"))
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"megatron_cpu"}  # of megatron_gpt
    assert [name for name in sorted(examples) if name not in tests] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("command", [LOOP, (sys.executable, "examples/prefetch.py")], ids=["loop", "prefetch"])
def test_other_clean_loops_pass(tmp_path, command):
    assert passed(rehearsed(tmp_path, *command))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_agent_without_restarts_is_started_again(tmp_path):
    command = [each for each in TORCHRUN if "max-restarts" not in each]
    assert passed(rehearsed(tmp_path, *command, "examples/ddp.py"))
