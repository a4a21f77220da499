from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import DaemonProcess, Site


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """A fresh daemon for one test."""
    process = DaemonProcess()
    yield process
    process.close()


@pytest.fixture
def site() -> Iterator[Site]:
    """Nodes for one test."""
    made = Site()
    yield made
    made.close()
