from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.daemons import DaemonProcess, Site

# How long an example takes says how busy the cores are.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
