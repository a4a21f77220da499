from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.daemons import DaemonProcess, Site

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
