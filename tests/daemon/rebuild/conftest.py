"""A job of four nodes, one of them lost, for daemons that run in the process of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from reft.wire.v1 import daemon_pb2 as pb
from tests.daemon.rebuild.test_rebuild import Held, Lost, cluster, request_for
from tests.support.daemons import DaemonProcess


@pytest.fixture(scope="module")
def three_of_four() -> Iterator[Held]:
    """A job with four nodes, of which the last one is lost."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> DaemonProcess:
            return stack.enter_context(contextlib.closing(DaemonProcess(*flags)))

        held = Held(cluster(start, 4), 1).end()
        stack.enter_context(Lost(held.job.daemons[3]))
        yield held


@pytest.fixture(scope="module")
def request_of_rank_3(three_of_four: Held) -> pb.RebuildRequest:
    """A request to rebuild rank 3, whose node is lost."""
    return request_for(three_of_four, 3)
