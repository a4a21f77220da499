"""The agents' TCPStore: keep-alives while torch's agent waits, a deleted state, a lost store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from reft.elastic.stores import tcp
from reft.elastic.stores.tcp import PREFIX, TcpBackend


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_the_state_is_written_while_torchs_agent_waits_for_others(server):
    """As at the end of a job: an agent whose workers have ended waits for the others."""
    parameters = RendezvousParameters("reft", f"127.0.0.1:{server.port}", "job", 2, 2, is_host="false", read_timeout=20)
    backend, store = tcp.connect(parameters, "job")
    begins, ended = threading.Event(), threading.Event()

    def wait():
        begins.set()
        with pytest.raises(DistStoreError):
            store.wait(["never"], timedelta(seconds=8))
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begins.wait(20)
    token = backend.get_state()
    for number in range(200):  # the wait itself begins some time after its thread
        _, token, is_ours = backend.set_state(b"%d" % number, token)
        assert is_ours
    assert not ended.is_set(), "the keep-alives waited, too"
    waiting.join(20)


def test_a_deleted_state_is_told_from_one_that_did_not_change(server):
    backend = TcpBackend(server, "job")
    assert backend.set_state(b"one") is None, "as if it had been deleted: the next write succeeds"
    _, token, _ = backend.set_state(b"one")
    assert server.delete_key(PREFIX + "job")
    assert backend.set_state(b"two", token) is None
    assert backend.set_state(b"two") == (b"two", b"two", True)
    assert backend.set_state(b"two", b"two") == (b"two", b"two", True)
    assert backend.set_state(b"three", b"one") == (b"two", b"two", False)


def test_a_lost_store_is_asked_once(capfd):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = TcpBackend(TCPStore("127.0.0.1", server.port, is_master=False), "job")
    assert backend.get_state() is None
    del server
    with pytest.raises(RendezvousConnectionError) as first:
        backend.get_state()
    capfd.readouterr()
    with pytest.raises(RendezvousConnectionError) as second:
        backend.set_state(b"one")
    assert str(second.value) == str(first.value)
    assert not capfd.readouterr().err, "torch prints twenty lines at each call, and agents call five times a second"
