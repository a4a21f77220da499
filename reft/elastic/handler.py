"""The rendezvous handler: torch's own dynamic rendezvous, made fit for restarts; `reft.elastic.rounds` says what differs.

    create ─► options ─► this node's daemon (started if none runs) ─► store (tcp.py or etcd.py) ─► Handler
    Handler.next_rendezvous:  begin the launch, if nobody is here ─► torch's join ─► a fresh store for the workers
    Handler.num_nodes_waiting, asked ten times a second:  somebody waits, or somebody of our round is gone ─► restart

Two faults of torch 2.13's restarts are worked around: it keeps one store and one address for the workers over all rounds
(`_shared_tcp_store_server` and `_bootstrap_store_info`), while workers add no prefix of their own per attempt. After a
restart they read what the round before wrote (most restarts then fail or hang), and if the node of rank 0 was replaced,
they look for the lost one. Both are forgotten here before each round.

What torch does not say either: agents that lose the store go on as long as their workers do; a spare that is not needed
any more ends with 0; a job can be started again under its name once all agents of the launch before are gone.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler as create_torchs

from reft.elastic import etcd, tcp
from reft.elastic.node import has_ended, settle
from reft.elastic.options import check, job_of_this_agent, number
from reft.elastic.rounds import Executor, StateHolder, poll_s
from reft.elastic.say import say
from reft.elastic.state import Facts, State

CACHED = ("_bootstrap_store_info", "_shared_tcp_store_server")


class ReftRendezvousHandler(RendezvousHandler):
    """See the module.

    Args:
        inner: torch's handler, whose holder and executor are replaced.
        facts: what this agent says of itself.
        run_id: as the workers see it.
        shrink_s: see `reft.elastic.rounds`.
    """

    def __init__(self, inner: DynamicRendezvousHandler, facts: Facts, run_id: str, shrink_s: float) -> None:
        self._inner, self._run_id = inner, run_id
        self._node, settings = inner._this_node, inner.settings
        self._holder = StateHolder(inner._state_holder._backend, settings, self._node, self._is_gone)
        inner._state_holder = self._holder
        inner._op_executor = Executor(self._node, self._holder, settings, facts, shrink_s)
        self._poll_s = poll_s(settings.max_nodes)
        self._close_s = settings.timeout.close.total_seconds()
        self._round = -1  # that our workers run in
        self._members: frozenset[Any] = frozenset()  # of that round
        self._said = ""

    @property
    def use_agent_store(self) -> bool:
        return bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        """The name that --rdzv-backend must have."""
        return "reft"

    def next_rendezvous(self) -> RendezvousInfo:
        for name in CACHED:
            # A torch that no longer has these attributes no longer has the fault.
            if hasattr(self._inner, name):
                setattr(self._inner, name, None)
        if self._round < 0:
            self._enter()
        try:
            info = self._inner.next_rendezvous()
        except RendezvousGracefulExitError as error:
            # torch's agent fails on its way out of this one, with an AttributeError of its own.
            say("this node stood by, and the job has ended: it was not needed.")
            raise SystemExit(0) from error
        self._round = self._holder.state.round
        self._members = frozenset(self._holder.state.participants)
        os.environ["REFT_ROUND"] = str(self._round)
        os.environ["REFT_LAUNCH"] = self._holder.state.launch
        return info

    def _enter(self) -> None:
        """Begins a launch of the job if nobody else is here; waits for the end of one that is just ending."""
        end = time.monotonic() + self._close_s
        while True:
            self._holder.sync(fresh=True)
            state = self._holder.state
            if not state.everyone():
                fresh = State()
                fresh.round = state.round + 1 if state.launch else 0  # keys of rounds before must not be met again
                fresh.places = state.places
                fresh.launch, fresh.token = secrets.token_hex(8), secrets.token_hex(32)
                if self._holder.replace(fresh):
                    return
            elif not state.closed or time.monotonic() > end:
                return
            time.sleep(self._poll_s)

    def num_nodes_waiting(self) -> int:
        try:
            waiting = int(self._inner.num_nodes_waiting())
        except RendezvousConnectionError as error:
            self._say(f"the rendezvous store is lost: training goes on, but can't be restarted. {error}")
            return 0
        state = self._holder.state
        if waiting or state.closed:
            return waiting
        if state.round != self._round or self._node not in state.participants:
            self._say("the others went on without this node: its workers stop, and join again.")
            return 1
        lost = self._members - set(state.participants)
        if lost:
            self._say(f"lost: {', '.join(map(str, sorted(lost)))}. Workers restart without waiting for errors.")
        return len(lost)

    def _is_gone(self, facts: Facts, seen_s: float) -> bool:
        return bool(facts.process) and has_ended(facts.process)

    def _say(self, text: str) -> None:
        if text != self._said:
            say(text)
        self._said = text

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        if self._round < 0:  # who never was a member has no right to end the job
            self._inner._stop_heartbeats()
            return True
        is_closed = bool(self._inner.shutdown())
        try:
            self._holder.leave()
        except RendezvousError as error:
            say(f"could not sign off: {error}")
        return is_closed


def create(parameters: RendezvousParameters) -> Any:
    """The handler for one agent.

    Raises:
        ConfigError: an option, or the endpoint, is not allowed.
        RendezvousConnectionError: no store answers at the endpoint.
    """
    check(parameters)
    rendezvous_id = job_of_this_agent(parameters.run_id)
    facts, address = settle(parameters)
    connect = etcd.connect if parameters.endpoint.startswith(etcd.SCHEME) else tcp.connect
    backend, store = connect(parameters, rendezvous_id)
    if address:
        os.environ["REFT_DAEMON"] = address
    run_id, parameters.run_id = parameters.run_id, rendezvous_id
    inner = create_torchs(store, backend, parameters)
    return ReftRendezvousHandler(inner, facts, run_id, number(parameters, "shrink_timeout"))
