from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.daemon.jobs import Trainer
from tests.support.daemons import DaemonProcess


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A process that lives until the test ends or kills it."""
    process = Trainer()
    yield process
    process.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons, and ends them with the test."""
    started: list[DaemonProcess] = []

    def make(*flags: str, **changes: object) -> DaemonProcess:
        started.append(DaemonProcess(*flags, **changes))
        return started[-1]

    yield make
    for process in started:
        process.close()
