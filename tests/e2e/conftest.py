"""Shares undisturbed runs, and decides which test runs in which worker of pytest-xdist."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reft.cli.demo.records import TrainingResult, read_result

# Each of these files shares one run, or one daemon, among its tests. Tests of all other files
# are distributed one by one.
KEPT_TOGETHER = (
    "test_crash_points.py", "test_daemon_faults.py", "test_demo.py", "test_exchange_faults.py", "test_keyed_jobs.py",
    "test_moves.py", "test_pipeline_gaps.py", "test_sharded_kinds.py", "test_traffic.py",
)  # fmt: skip


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Returns a function that makes a folder once for all tests, also those in other workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder, ended = base / name, base / f"{name}.ended"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ended.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a run that failed
                make(folder)
                ended.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def plain(once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[Any], TrainingResult]:
    """Returns a function: example → its undisturbed run."""
    from tests.e2e.test_example_losses import run_plain

    def of(example: Any) -> TrainingResult:
        name = f"plain-{example.name}-{example.world}-{example.steps}"
        return read_result(once(name, functools.partial(run_plain, example)), example.world)

    return of


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Returns the scheduler for `--dist loadfile`, or None for other modes.

    xdist's own groups are lost under pytest 9.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(KEPT_TOGETHER) else nodeid

    return Scheduling(config, log)
