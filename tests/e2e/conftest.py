"""Decides which test runs in which worker of pytest-xdist."""

from __future__ import annotations

from typing import Any

import pytest

# Each of these files shares one run, or one daemon, among its tests. Tests of all other files
# are distributed one by one.
KEPT_TOGETHER = (
    "test_crash_points.py", "test_daemon_faults.py", "test_demo.py", "test_exchange_faults.py", "test_moves.py",
    "test_traffic.py",
)  # fmt: skip


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
