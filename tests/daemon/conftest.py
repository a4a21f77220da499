from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.daemons import DaemonProcess
from tests.support.limits import cramped_daemon
from tests.support.open_files import OpenFiles
from tests.support.trainer_forks import Trainer


@pytest.fixture(autouse=True)
def open_files() -> Iterator[None]:
    """Closes what a test's arenas leave open, after all its other fixtures."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        files = OpenFiles(monkeypatch)
        yield
        files.close()


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
    with cramped_daemon("1m") as process:
        yield process
