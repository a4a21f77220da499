"""bench/persist_restore.py computes ratios and goals from measured seconds, and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import persist_restore
from bench.persist_restore import rows_of

ROOT = Path(__file__).resolve().parents[2]
ROUND = {
    "ask": 0.001, "checkpoint": 2.0, "daemon_bytes": 50e6, "persister_bytes": 40e6, "memory": 1.0, "memory_attach": 1.5,
    "storage": 1.2, "storage_attach": 3.0, "dcp_ask": 0.5, "dcp_checkpoint": 4.0, "dcp": 2.0,
}  # fmt: skip


def test_a_restore_from_storage_is_compared_with_memory_in_its_round():
    rounds = [ROUND, {**ROUND, "memory": 2.0, "storage": 2.0}, {**ROUND, "storage": 1.9}]
    first, *_ = rows_of(rounds)
    assert (first.value, first.min, first.max, first.goal) == (1.2, 1.0, 1.9, "<= 1.5") and not first.is_missed
    slow, *_ = rows_of([{**ROUND, "storage": 1.6}])
    assert slow.is_missed


def test_memory_and_times_have_their_units():
    rows = {row.name: row for row in rows_of([ROUND])}
    assert rows["the daemon's own memory"].value == 50 and rows["the persister's own memory"].value == 40
    assert rows["session.persist, until it returns"].value == 1
    assert {row.is_missed for row in rows_of([{**ROUND, "daemon_bytes": 101e6}])} == {False, True}


def test_anonymous_memory_is_that_of_the_process():
    assert persist_restore.anonymous_bytes(os.getpid()) > 1e6
    assert persist_restore.anonymous_bytes(1 << 30) == 0


@pytest.mark.soak
def test_the_bench_runs(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "bench/persist_restore.py"), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert len(json.loads(file.read_text())["rows"]) == len(rows_of([ROUND]))
