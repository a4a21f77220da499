from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.daemons import DaemonProcess, Site

# Hypothesis must not fail an example for its duration: on busy cores examples are slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
