"""Two faults of torch 2.13's restarts, shown with its own handler and seen gone with reft's."""

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
    """Agents of a job of `nodes` nodes in this process, with torch's handler or with reft's."""

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
        """All of these join the next round: what each was told."""
        told = {}
        threads = [
            threading.Thread(target=lambda each=each: told.update({each: each.next_rendezvous()}), daemon=True)
            for each in handlers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [told[each] for each in handlers]

    @staticmethod
    def silence(handler) -> None:
        """As a SIGKILL does."""
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
    """What a worker connects to, as `init_process_group` does under an agent: without a prefix for the attempt."""
    told = info.bootstrap_store_info
    return TCPStore(told.master_addr, told.master_port, is_master=False, timeout=timedelta(seconds=10))


def test_after_a_restart_workers_meet_what_the_round_before_wrote(make):
    agents = make(1)
    agent = agents.add(1)
    (first,) = agents.round(agent)
    workers_store(first).set("rank0", "an address of a process that is gone")
    (second,) = agents.round(agent)
    assert workers_store(second).check(["rank0"]) is (agents.kind == "stock")


def test_when_the_node_of_rank_0_is_replaced_the_others_look_for_the_lost_one(make):
    agents = make(2)
    lost, other = agents.add(1), agents.add(2)
    before = [info.bootstrap_store_info for info in agents.round(lost, other)]
    assert before[0] == before[1]
    agents.silence(lost)
    newcomer = agents.add(1)
    infos = agents.round(newcomer, other)
    told = [info.bootstrap_store_info for info in infos]
    assert [info.rank for info in infos] == [0, 1]
    assert (told[1].master_port == before[1].master_port) is (agents.kind == "stock")
    assert (told[0] == told[1]) is (agents.kind == "reft")
