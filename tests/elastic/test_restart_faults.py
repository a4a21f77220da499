"""Two faults of torch 2.13's restarts, shown with torch's handler, and fixed in reft's handler."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from reft.elastic.handler import ReftRendezvousHandler
from reft.elastic.shared_state import AgentFacts
from reft.elastic.stores.tcp import TcpBackend


class Agents:
    """Agents of a job of `nodes` nodes in this process, with torch's or reft's handler."""

    def __init__(self, kind: str, nodes: int) -> None:
        self.kind, self.nodes, self.store, self.handlers = kind, nodes, HashStore(), []

    def add(self, number: int):
        options = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}
        parameters = RendezvousParameters(
            self.kind, "", "job", self.nodes, self.nodes, local_addr=f"127.0.0.{number}", **options
        )
        if self.kind == "stock":
            handler = create_handler(self.store, C10dRendezvousBackend(self.store, "job"), parameters)
        else:
            inner = create_handler(self.store, TcpBackend(self.store, "job"), parameters)
            handler = ReftRendezvousHandler(inner, AgentFacts(), "job", 1)
        self.handlers.append(handler)
        return handler

    def round(self, *handlers):
        """Lets these agents join the next round, and returns the info of each."""
        infos = {}
        threads = [
            threading.Thread(target=lambda each=each: infos.update({each: each.next_rendezvous()}), daemon=True)
            for each in handlers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [infos[each] for each in handlers]

    @staticmethod
    def silence(handler) -> None:
        """Ends the keep-alives, as a SIGKILL does."""
        getattr(handler, "_inner", handler)._stop_heartbeats()


@pytest.fixture(params=["stock", "reft"])
def make(request):
    made = []

    def agents(nodes):
        made.append(Agents(request.param, nodes))
        return made[-1]

    yield agents
    for each in made:
        for handler in each.handlers:
            Agents.silence(handler)


def workers_store(info) -> TCPStore:
    """Returns the store that a worker connects to, as `init_process_group` does.

    The store has no prefix for the attempt.
    """
    address = info.bootstrap_store_info
    return TCPStore(address.master_addr, address.master_port, is_master=False, timeout=timedelta(seconds=10))


def test_after_a_restart_workers_read_values_of_the_round_before_only_with_torch(make):
    agents = make(1)
    agent = agents.add(1)
    (first,) = agents.round(agent)
    workers_store(first).set("rank0", "an address of a process that is gone")
    (second,) = agents.round(agent)
    assert workers_store(second).check(["rank0"]) is (agents.kind == "stock")


def test_after_rank_0_is_replaced_workers_look_for_the_lost_node_only_with_torch(make):
    agents = make(2)
    lost, other = agents.add(1), agents.add(2)
    before = [info.bootstrap_store_info for info in agents.round(lost, other)]
    assert before[0] == before[1]
    agents.silence(lost)
    newcomer = agents.add(1)
    infos = agents.round(newcomer, other)
    stores = [info.bootstrap_store_info for info in infos]
    assert [info.rank for info in infos] == [0, 1]
    assert (stores[1].master_port == before[1].master_port) is (agents.kind == "stock")
    assert (stores[0] == stores[1]) is (agents.kind == "reft")
