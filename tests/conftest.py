from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.support.daemons import DaemonProcess, Site

# Tests of whole jobs wait for half of their time. They are distributed one by one, but for these
# files: each of them shares one run, or one daemon, among its tests.
WHOLE_JOBS = "tests/e2e/"
AT_LAST = ("tests/core/", "tests/house/", "tests/wire/")  # without processes: short, so they fill the end
KEPT_TOGETHER = (
    "test_crash_points.py", "test_daemon_faults.py", "test_demo.py", "test_exchange_faults.py", "test_moves.py",
    "test_traffic.py",
)  # fmt: skip

# Hypothesis must not fail an example for its duration: on busy cores examples are slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell starts commands in the background with SIGINT ignored, and each child inherits this.
# Tests interrupt their children.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """Yields a fresh daemon for one test."""
    process = DaemonProcess()
    yield process
    process.close()


@pytest.fixture
def site() -> Iterator[Site]:
    """Yields nodes for one test."""
    nodes = Site()
    yield nodes
    nodes.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Returns the scheduler for `--dist loadfile`, or None for other modes.

    Each second worker takes whole jobs, which wait; the others take files of tests that compute.
    Who has no more of its kind helps the others. xdist's own groups are lost under pytest 9.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file.startswith(WHOLE_JOBS) and not file.endswith(KEPT_TOGETHER) else file

        def _reschedule(self, node: Any) -> None:
            # No test waits behind more than one other, which may take a minute.
            if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

        def _assign_work_unit(self, node: Any) -> None:
            wants_jobs = not self.nodes.index(node) % 2

            def is_later(unit: str) -> tuple[bool, bool]:
                return unit.startswith(WHOLE_JOBS) != wants_jobs, unit.startswith(AT_LAST)

            self.workqueue.move_to_end(min(self.workqueue, key=is_later), last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)
