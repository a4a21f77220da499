from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemons import DaemonProcess
from tests.support.jobs import Trainer


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A process that lives until the test ends or kills it."""
    process = Trainer()
    yield process
    process.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons, and stops them at the end of the test."""
    started: list[DaemonProcess] = []

    def make(*flags: str, **changes: object) -> DaemonProcess:
        started.append(DaemonProcess(*flags, **changes))
        return started[-1]

    yield make
    for process in started:
        process.close()


@pytest.fixture
def cramped() -> Iterator[DaemonProcess]:
    """A daemon whose folder has space for its records, but not for a slot."""
    folder = Path(tempfile.mkdtemp(prefix="reft-test-"))
    if (
        os.getuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "reft-test", folder], check=False).returncode
    ):
        folder.rmdir()
        pytest.skip("mounting a small tmpfs needs root")
    folder.chmod(0o700)
    process = None
    try:
        process = DaemonProcess(folder=folder)
        yield process
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        if process:
            process.close()
        shutil.rmtree(folder, ignore_errors=True)
