"""A rendezvous handler that can't be made leaves no process behind. It leaves torch as it was."""

from __future__ import annotations

import os

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from reft.elastic import handler
from reft.elastic.orphan_reaper import OrphanReaper
from reft.elastic.shared_state import AgentFacts
from reft.elastic.warm import torch_patch, warm
from reft.errors import ConfigError


@pytest.fixture
def processes(monkeypatch) -> list:
    """The processes of every fork server and orphan reaper that `create` starts."""
    started = []

    class RecordedServer(warm.ForkServer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self.process)

    class RecordedReaper(OrphanReaper):
        def __init__(self):
            super().__init__()
            started.append(self._process)

    monkeypatch.setattr(warm, "MODULES", ("json",))
    monkeypatch.setattr(warm, "ForkServer", RecordedServer)
    monkeypatch.setattr(handler, "OrphanReaper", RecordedReaper)
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def parameters(endpoint: str) -> RendezvousParameters:
    options = {"daemon": "off", "warm": "yes", "read_timeout": 1, "is_host": "false"}
    return RendezvousParameters("reft", endpoint, "run1", 1, 1, local_addr="127.0.0.1", **options)


@pytest.mark.parametrize(
    ("endpoint", "error"),
    [
        ("127.0.0.1:1", RendezvousConnectionError),
        ("etcd://127.0.0.1:1", RendezvousConnectionError),
        ("etcd://no-port", ConfigError),
    ],
    ids=["silent store", "silent etcd", "wrong etcd endpoint"],
)
def test_a_store_that_can_not_be_reached_leaves_no_fork_server(processes, endpoint, error):
    unpatched = torch_patch.api.get_subprocess_handler
    with pytest.raises(error):
        handler.create(parameters(endpoint))
    assert torch_patch.api.get_subprocess_handler is unpatched
    assert len(processes) == 1 and processes[0].poll() is not None


def test_a_handler_that_fails_to_begin_leaves_no_orphan_reaper(processes, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(handler, "ReftRendezvousHandler", fail)
    unpatched = torch_patch.api.get_subprocess_handler
    with pytest.raises(RuntimeError, match="on purpose"):
        handler.create(parameters(""))
    assert torch_patch.api.get_subprocess_handler is unpatched
    assert len(processes) == 2 and all(process.poll() is not None for process in processes)


def test_a_later_launch_of_this_process_has_the_environment_of_before(monkeypatch):
    monkeypatch.setenv("REFT_DAEMON", "unix:/named")
    for name in handler.TOLD[1:]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(handler, "resolve_node", lambda parameters: (AgentFacts(), None))
    before = dict(os.environ)
    agent = handler.create(RendezvousParameters("reft", "", "run1", 1, 1, local_addr="127.0.0.1", last_call_timeout=1))
    agent.next_rendezvous()
    assert os.environ["REFT_LAUNCH"] and os.environ["REFT_ROUND"] == "0"
    agent.shutdown()
    assert dict(os.environ) == before
