"""bench/restore.py computes ratios and goals from measured seconds, and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from bench import restore, result
from bench.restore import CASES, SIZES, SMALLER, Measured
from bench.restoring import STEPS, TimedSteps, timed_steps

ROOT = Path(__file__).resolve().parents[2]
ROUND = {
    "attach": 0.5, "load": 0.25, "make": 0.1, "rest": 0.15, "existing_load": 0.2, "memcpy": 0.125, "memcpy_2": 0.1,
    "double_buffer": 0.3, "pages": 0.05, "dcp": 1.0, "existing_attach": 0.4, "dcp_again": 0.8,
    "dcp_restore": 2.0, "dcp_restore_again": 1.6,
}  # fmt: skip


def rows(
    case: str = "1-rank", wanted: str = "1.5GB", size: str = "", **changed: float
) -> dict[tuple[str, str], result.Row]:
    """Returns (name without case and size, unit) → row, of one made-up round."""
    seconds = {key: value for key, value in (ROUND | changed).items() if value}
    measured = Measured(CASES[case], wanted, size or wanted, [seconds])
    return {(row.name.removeprefix(f"{measured.name}: "), row.unit): row for row in measured.rows()}


def test_times_are_given_in_memcpys_of_their_round():
    rounds = [ROUND, {**ROUND, "attach": 1.0, "memcpy": 0.25}, {**ROUND, "attach": 0.75}]
    row, *_ = Measured(CASES["1-rank"], "1.5GB", "1.5GB", rounds).rows()
    assert (row.name, row.unit) == ("1 rank, 1.5 GB: whole attach", "memcpy")
    assert (row.value, row.min, row.max) == (4, 4, 6), "a round's attach by the same round's memcpy"


def test_a_small_state_is_given_in_milliseconds():
    small = rows(wanted="10MB")
    assert small["whole attach", "s"].value == 0.5 and small["whole attach", "s"].goal == "<= 0.25"
    assert small["load into existing pages", "ms"].value == 200
    assert small["load into existing pages", "ms"].goal is None


def test_a_first_attach_is_compared_with_a_first_restore_and_a_second_with_a_second():
    assert rows()["whole attach", "of DCP's restore"].value == 0.25
    assert rows()["whole attach", "of DCP's load"].value == 0.5
    assert rows()["second attach", "of DCP's second restore"].value == 0.25
    assert rows()["second attach", "of DCP's second load"].value == 0.5
    assert ("second attach", "of DCP's second restore") not in rows("lost-node", existing_attach=0)


@pytest.mark.parametrize(
    ("case", "wanted", "size", "goal"),
    [
        ("1-rank", "1.5GB", "", "<= 3"),
        ("2-ranks", "1.5GB", "", "<= 3.5"),
        ("1-rank", "6GB", "", "<= 2"),
        ("2-ranks", "6GB", "5GB", "<= 2.5"),
        ("lost-node", "1.5GB", "", None),
    ],
)
def test_a_whole_attach_has_the_goal_of_its_size_and_ranks(case, wanted, size, goal):
    assert rows(case, wanted, size)["whole attach", "memcpy"].goal == goal


def test_an_attach_that_is_slower_than_dcp_misses_its_goal():
    assert not rows(attach=1.5)["whole attach", "of DCP's restore"].is_missed
    assert rows("lost-node", attach=2.5)["whole attach", "of DCP's restore"].is_missed
    assert rows(attach=1.5)["whole attach", "of DCP's load"].is_missed


def test_a_case_without_a_second_attach_has_no_load_into_existing_pages():
    assert ("load into existing pages", "memcpy") in rows()
    assert ("load into existing pages", "memcpy") not in rows("lost-node", existing_load=0)


@pytest.mark.parametrize(("free_gib", "size"), [(20, "6GB"), (17.5, "5GB"), (9.5, "2GB"), (8, None)])
def test_a_state_that_does_not_fit_is_replaced_by_a_smaller_one(free_gib, size, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {int(free_gib * 2**20)} kB\n")
    monkeypatch.setattr(restore, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(os, "statvfs", lambda path: mock.Mock(f_bavail=2**30, f_frsize=4096))
    assert restore.fitting("6GB", CASES["1-rank"]) == size


def test_a_note_names_the_size_that_was_measured_instead():
    assert restore.note(CASES["2-ranks"], "6GB", "6GB") == []
    (smaller,), (none,) = (restore.note(CASES["2-ranks"], "6GB", size) for size in ("5GB", None))
    assert "6GB does not fit" in smaller and "5GB was measured, against the goals of 6GB" in smaller
    assert "nothing was measured" in none


def test_each_size_has_the_bytes_that_its_name_says():
    for name, shape in {**SIZES, **SMALLER}.items():
        unit = 10**9 if name.endswith("GB") else 10**6
        assert restore.state_bytes(shape) == pytest.approx(float(name[:-2]) * unit, rel=0.12), name


def test_steps_of_a_restore_are_timed_and_return_what_they_return():
    seconds = dict.fromkeys(STEPS, 0.0)
    steps = TimedSteps(mock.Mock(remote_read_s=3.0, **{"load.return_value": "report"}), seconds)
    assert steps.load(1, 2) == "report" and steps.remote_read_s == 3.0
    assert seconds["load"] > 0 and seconds["make"] == 0


def test_a_block_without_a_restore_is_refused():
    with pytest.raises(RuntimeError, match="nothing was restored"), timed_steps():
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "names"),
    [("2-ranks", ["2 ranks, 10 MB"]), ("1-rank,lost-node", ["1 rank, 10 MB", "a lost node, 10 MB"])],
)
def test_the_bench_of_a_restore_runs(cases, names, tmp_path):
    """All ways bring back every byte; whether goals are met is not tested."""
    target = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "bench" / "restore.py"), "--quick", "--cases", cases, f"--json={target}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert target.exists(), done.stdout + done.stderr
    details = json.loads(target.read_text())["details"]
    assert list(details) == names and result.read(target).rows
    for (each,) in details.values():
        assert max(each["load"], each["make"], each["rest"]) < each["attach"] and min(each.values()) > 0
