"""`reft-cli demo`, shortened: two nodes, and two kinds of SIGKILL.

The result equals an undisturbed run bit for bit, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from reft.cli.demo.records import TrainingResult, compare, read_result
from tests.support.daemons import HEEDFUL, ROOT, until

STEPS = 24
SHARED = Path("/dev/shm")
pytestmark = pytest.mark.timeout(300)


class Demo:
    """One run of the demo, in its own folder for temporary files.

    Args:
        module: the module to start: the demo itself, or a variant that forks its workers.
    """

    def __init__(self, *arguments: str, module: str = "reft.cli.main") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="reft-t-"))
        self.shared_before = set(SHARED.glob("reft-demo-*"))
        command = [*HEEDFUL, sys.executable, "-m", module, "demo", "--steps", str(STEPS), *arguments]
        home = self.folder / "home"
        home.mkdir(mode=0o500)
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        foreign = {"RANK": "3", "WORLD_SIZE": "9", "REFT_MODE": "off", "REFT_JOB": "other", "SLURM_JOB_ID": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
            env={**os.environ, **foreign, "PYTHONPATH": path, "TMPDIR": str(self.folder), "HOME": str(home)},
        )  # fmt: skip

    def descendants(self, containing: str = "") -> list[psutil.Process]:
        """Returns every living process with our TMPDIR, without the demo itself."""
        processes = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("TMPDIR") == str(self.folder) and process.pid != self.process.pid
                if is_ours and process.status() != psutil.STATUS_ZOMBIE and containing in " ".join(process.cmdline()):
                    processes.append(process)
            except psutil.Error:
                continue
        return processes

    def leftovers(self) -> list[object]:
        """Returns processes and files that still exist."""
        files = [
            path for path in self.folder.iterdir() if path.name.startswith("reft-demo") and "logs" not in path.name
        ]
        shared = set(SHARED.glob("reft-demo-*")) - self.shared_before
        return [*self.descendants(), *files, *(path for path in shared if not is_in_use(path))]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        until(lambda: not self.leftovers(), what="that nothing is left")
        shutil.rmtree(self.folder)


def is_in_use(folder: Path) -> bool:
    """Decides whether a living process names the folder.

    The folder then belongs to another test, which runs at the same time.
    """
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


@pytest.fixture
def demo() -> Iterator[Demo]:
    demo = Demo()
    yield demo
    demo.close()


# Started like this by a person, sixteen trainers import torch: a minute of one core.
@pytest.fixture(scope="module", params=["tests.support.demo", pytest.param("reft.cli.main", marks=pytest.mark.soak)])
def finished(request: pytest.FixtureRequest) -> Iterator[tuple[Demo, dict]]:
    """Yields a completed demo, and the document that it printed."""
    demo = Demo("--json", "--keep-logs", module=request.param)
    output, errors = demo.process.communicate(timeout=280)
    assert demo.process.returncode == 0, output + errors
    yield demo, json.loads(output)
    demo.close()


@pytest.fixture
def results(finished) -> tuple[TrainingResult, TrainingResult]:
    logs = Path(finished[1]["logs"])
    return read_result(logs / "demo-faults", 4), read_result(logs / "demo-plain", 4)


def test_both_kills_happen_and_the_results_are_equal(finished):
    document = finished[1]
    assert next(iter(document)) == "schema_version"
    assert document["passed"] is True and document["failures"] == []
    one_rank_fault, all_ranks_fault = document["faults"]
    assert list(one_rank_fault["pids"]) == ["1"] and list(all_ranks_fault["pids"]) == ["0", "1", "2", "3"]
    assert [fault["restored_from"] for fault in document["faults"]] == ["memory", "memory"]
    assert STEPS // 3 - 3 <= one_rank_fault["restored_step"] < STEPS // 3
    assert all(0 < fault["ranks_up_s"] < fault["first_step_s"] for fault in document["faults"])
    assert all(0 < fault["load_s"] < fault["first_step_s"] - fault["ranks_up_s"] for fault in document["faults"])
    assert (document["losses_compared"], document["ranks"]) == (4 * STEPS, 4)
    assert document["parameters_compared"] == 16 and document["optimizer_tensors_compared"] == 48
    assert document["steps_trained_twice"] >= 1


def test_nothing_is_left_behind(finished):
    until(lambda: not finished[0].leftovers(), what="that nothing is left")  # other tests make such folders, too
    assert finished[0].descendants() == []


def test_the_comparison_reads_what_was_trained(results):
    disturbed, plain = results
    assert compare(disturbed, plain, STEPS).differences == []
    assert [len(attempts) for attempts in disturbed.attempts.values()] == [3, 3, 3, 3]
    assert [len(attempts) for attempts in plain.attempts.values()] == [1, 1, 1, 1]


def test_the_comparison_fails_when_one_loss_is_altered(results):
    disturbed, plain = results
    steps = disturbed.attempts[2][1].steps
    steps[3] = replace(steps[3], loss=(float.fromhex(steps[3].loss) * (1 + 2**-40)).hex())
    (difference,) = compare(disturbed, plain, STEPS).differences
    assert difference.startswith(f"rank 2 step {steps[3].step}: loss")


def test_the_comparison_fails_when_one_tensor_is_altered(results):
    disturbed, plain = results
    disturbed.digests[3]["optimizer norm.weight.exp_avg_sq"] = "0" * 64
    assert compare(disturbed, plain, STEPS).differences == ["rank 3: optimizer norm.weight.exp_avg_sq differs"]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_ends_the_demo_and_nothing_is_left(demo, number, code):
    until(lambda: len(demo.descendants("reft.demo.train")) >= 4, 120, "the trainers' start")
    demo.process.send_signal(number)
    demo.process.communicate(timeout=250)
    assert demo.process.returncode == code
    until(lambda: not demo.leftovers(), what="that nothing is left")
