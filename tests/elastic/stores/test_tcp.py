"""The agents' TCPStore: keep-alives while torch's agent waits, a deleted state, a lost store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from reft.elastic.stores import tcp
from reft.elastic.stores.tcp import PREFIX, TcpBackend
from tests.support.daemons import ROOT
from tests.support.netns import why_not

# A machine with two network cards, whose name nothing resolves.
TWO_CARDS = """
hostname nobody-resolves-this && ip link set lo up && ip link add card type veth peer name other &&
ip addr add 10.99.0.5/24 dev card && ip addr add 10.99.1.5/24 dev other && ip link set card up && exec "$@"
"""
LEADS_HERE = "import sys; from reft.elastic.stores.tcp import _leads_here; print(*map(_leads_here, sys.argv[1:]))"


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


@pytest.mark.skipif(bool(why_not()), reason=f"needs namespaces: {why_not()}")
def test_each_address_of_the_machine_leads_here_also_if_its_name_leads_nowhere():
    hosts = {"10.99.0.5": True, "10.99.1.5": True, "10.99.0.6": False, "0.0.0.0": False, "127.0.0.1": True,
             "127.0.0.2": True, "localhost": True, "nosuch.invalid": False}  # fmt: skip
    command = ["unshare", "--net", "--uts", "sh", "-c", TWO_CARDS, "sh", sys.executable, "-c", LEADS_HERE, *hosts]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.split() == [str(each) for each in hosts.values()], done.stderr
