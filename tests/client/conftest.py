from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import reft
from tests.support.daemons import DaemonProcess
from tests.support.snapshot import ENGINES


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonProcess]:
    """One daemon for all tests of a module; each test has jobs of its own."""
    process = DaemonProcess()
    yield process
    process.close()


@pytest.fixture
def attach(shared_daemon: DaemonProcess) -> Iterator[Callable[..., Any]]:
    """`reft.attach` with a daemon and a job of this test.

    It closes all sessions that a test leaves open.
    """
    job = f"job-{uuid.uuid4().hex[:12]}"
    open_sessions = []

    def call(model: Any, optimizer: Any, **arguments: Any) -> Any:
        for session in open_sessions:
            session.close()
        session = reft.attach(model, optimizer, **{"daemon": shared_daemon.address, "job": job, **arguments})
        open_sessions.append(session)
        return session

    yield call
    for session in open_sessions:
        session.close()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """A copying engine, and the device that its tensors lie on."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: the engine runs on the inline device above")
    copy_engine, device = ENGINES[request.param]()
    yield copy_engine, device
    copy_engine.close()
