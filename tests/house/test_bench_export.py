"""bench/export.py compares each window with its neighbours, and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.export import Step, Window, rows_of

ROOT = Path(__file__).resolve().parents[2]


def windows_of(*medians: float) -> tuple[list[Window], list[Step]]:
    """Returns windows of 100 steps of these lengths, each second one with an export."""
    windows, steps, at = [], [], 0.0
    for number, length in enumerate(medians):
        windows.append(Window(at, at + 101 * length, (7.0,) if number % 2 else ()))
        steps += [Step(at + i * length, at + (i + 1) * length, len(steps) + i) for i in range(100)]
        at += 101 * length
        steps.append(Step(at - length, at + 10.0, len(steps)))  # lies in no window
        at += 20.0
    return windows, steps


def test_each_window_is_compared_with_its_neighbours():
    rows = {row.name: row for row in rows_of(*windows_of(1.0, 1.01 * 1.5, 2.0, 1.05 * 2.5, 3.0))}
    ratio = rows["steps beside exports over steps alone"]
    assert (round(ratio.min, 6), round(ratio.max, 6), round(ratio.value, 6)) == (1.01, 1.05, 1.03)
    assert ratio.is_missed and rows["one export"].value == 7.0
    assert rows["steps alone"].value == 300 and rows["steps beside exports"].value == 200
    assert rows["snapshots alone"].value == rows["snapshots beside exports"].value == 1.0


def test_one_slow_step_of_a_hundred_is_the_99th_percentile():
    windows, steps = windows_of(1.0, 1.0, 1.0)
    slow = [
        step._replace(end_s=step.end_s + 0.5) if windows[1].begin_s < step.begin_s < windows[1].begin_s + 2 else step
        for step in steps
    ]
    for found, is_missed in ((steps, False), (slow, True)):
        median, p99 = rows_of(windows, found)[:2]
        assert (median.is_missed, p99.is_missed) == (False, is_missed)


def test_window_without_a_step_is_an_error():
    windows, steps = windows_of(1.0, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="--seconds"):
        rows_of(windows, steps[:150])


@pytest.mark.soak
def test_the_bench_runs(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "bench/export.py"), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert len(json.loads(file.read_text())["rows"]) == 9
