from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import DaemonProcess


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """A fresh daemon for one test."""
    process = DaemonProcess()
    yield process
    process.close()
