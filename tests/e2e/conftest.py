"""Which test runs in which worker of pytest-xdist."""

from __future__ import annotations

from typing import Any

import pytest

# Each has a run, or a daemon, that is made once for all of its tests. All other files are dealt out test by test.
TOGETHER = ("test_crash_points.py", "test_daemon_faults.py", "test_demo.py", "test_moves.py", "test_traffic.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """What `--dist loadfile` means here; xdist's own groups are not kept under pytest 9."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Scheduling(config, log)
