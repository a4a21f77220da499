"""The rendezvous handler: torch's own dynamic rendezvous, made fit for restarts; `reft.elastic.rounds` says what differs.

    create ─► options ─► this node's daemon (started if none runs) ─► store (tcp.py or etcd.py) ─► Handler
    Handler.next_rendezvous:  begin the launch, if nobody is here ─► torch's join ─► a fresh store for the workers
    Handler.num_nodes_waiting, asked ten times a second:  somebody waits, somebody of our round is gone, or this node's
                                                          daemon says that a node is UNHEALTHY or OFFLINE ─► restart

Two faults of torch 2.13's restarts are worked around: it keeps one store and one address for the workers over all rounds
(`_shared_tcp_store_server` and `_bootstrap_store_info`), while workers add no prefix of their own per attempt. After a
restart they read what the round before wrote (most restarts then fail or hang), and if the node of rank 0 was replaced,
they look for the lost one. Both are forgotten here before each round.

What torch does not say either: agents that lose the store go on as long as their workers do; a spare that is not needed
any more ends with 0; a job can be started again under its name once all agents of the launch before are gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
import weakref
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler as create_torchs

from reft.console import say
from reft.core.membership.agent_policy import AgentReaction
from reft.core.membership.failure_detector import AgentPhase
from reft.elastic.heartbeat_client import HeartbeatClient, RoundMembers
from reft.elastic.node import free_under_slurm, has_ended, resolve_node, tls
from reft.elastic.options import check, job_of, number, rendezvous_id_of, text, truth
from reft.elastic.orphan_reaper import OrphanReaper
from reft.elastic.rounds import Executor, StateHolder, poll_s, recorder
from reft.elastic.shared_state import AgentFacts, SharedState
from reft.elastic.store_poller import StorePoller
from reft.elastic.stores import etcd, tcp
from reft.elastic.warm.warm import WarmWorkers, begin
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.v1 import daemon_pb2 as pb

SILENCE_S = 2.0  # of the store, before a person is told
CACHED = ("_bootstrap_store_info", "_shared_tcp_store_server")


class RestartSignals:
    """What the daemons' signals mean for this agent, as the heartbeat client's thread tells it."""

    def __init__(self) -> None:
        self.latest: tuple[RoundMembers | None, AgentReaction] = (None, AgentReaction())
        self._lost_s: dict[str, float] = {}  # home → when this agent was told that it is lost

    def heard(self, term: RoundMembers, reaction: AgentReaction) -> None:
        """Takes in a reaction; called from a thread of the heartbeat client."""
        # Once a term: a node that comes back must not be counted out again by each further piece of news.
        known = self.latest[1].lost if self.latest[0] is term else frozenset()
        self._lost_s = {**self._lost_s, **dict.fromkeys(reaction.lost - known, time.monotonic())}
        self.latest = (term, reaction)

    def is_gone(self, facts: AgentFacts, seen_s: float) -> bool:
        """Whether a node is lost, or its agent has ended, since it was seen at `seen_s`."""
        told_s = self._lost_s.get(facts.home, float("-inf"))
        return told_s >= seen_s or (bool(facts.process) and has_ended(facts.process))


def _end(
    poller: StorePoller, listener: HeartbeatClient | None, reaper: OrphanReaper | None, warm: WarmWorkers | None
) -> None:
    """Ends the threads and processes of a handler that is gone."""
    poller.close()
    for each in (listener and listener.stop, reaper and reaper.close, warm and warm.close):
        if each:
            each()


class ReftRendezvousHandler(RendezvousHandler):
    """See the module.

    Args:
        inner: torch's handler, whose holder and executor are replaced.
        facts: what this agent says of itself.
        run_id: as the workers see it.
        shrink_s: see `reft.elastic.rounds`.
        daemon: address of this node's daemon, and who starts it again; None means that nobody tells signals.
        reaper: what ends the workers if this agent is killed; None: nobody does.
        warm: what workers are forked from; None: each is started anew.
    """

    def __init__(
        self, inner: DynamicRendezvousHandler, facts: AgentFacts, run_id: str, shrink_s: float,
        daemon: tuple[str, DaemonRestarter] | None = None, reaper: OrphanReaper | None = None, warm: WarmWorkers | None = None,
    ) -> None:  # fmt: skip
        self._inner, self._run_id, self._facts = inner, run_id, facts
        self._node, settings = inner._this_node, inner.settings
        self._news = RestartSignals()
        self._holder = StateHolder(inner._state_holder._backend, settings, self._node, self._news.is_gone)
        inner._state_holder = self._holder
        inner._record = recorder(type(inner).__name__, settings.run_id, self._node)  # type: ignore[method-assign]
        inner._op_executor = Executor(self._node, self._holder, settings, facts, shrink_s)
        self._poller = StorePoller(inner.num_nodes_waiting)
        self._poll_s = poll_s(settings.max_nodes)
        self._close_s = settings.timeout.close.total_seconds()
        self._round = -1  # that our workers run in
        self._members: frozenset[Any] = frozenset()  # of that round
        self._said = ""
        self._reaper, self._is_guarded, self._warm = reaper, False, warm
        self._daemon = daemon
        self._heartbeat_client = HeartbeatClient(*daemon, tls(), self._news.heard) if daemon else None
        self._term: RoundMembers | None = None
        # No thread may hold this handler, or one that torch drops without `shutdown` would never end them.
        weakref.finalize(self, _end, self._poller, self._heartbeat_client, reaper, warm).atexit = False

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
        self._is_stopping()
        self._settle()
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
        self._begin(self._holder.state)
        return info

    def _begin(self, state: SharedState) -> None:
        """Tells this node's workers and its daemon of the round."""
        self._is_guarded = False
        job = job_of(self._run_id, state.launch)
        os.environ["REFT_ROUND"], os.environ["REFT_LAUNCH"] = str(state.round), state.launch
        os.environ["REFT_UNNAMED_JOB"] = "" if job.named else job.id
        self._term = None
        if self._heartbeat_client is None:
            return
        ordered = sorted(state.participants, key=lambda node: state.participants[node])
        members = [facts for facts in (state.facts[node] for node in ordered) if facts.home]
        if len({facts.home for facts in members}) < len(members):
            say("several agents of this job share one daemon: signals of nodes are off.")
            return
        nodes = tuple(
            pb.Node(name=facts.name, id=facts.home, addresses=facts.addresses, domain=facts.domain) for facts in members
        )
        token = bytes.fromhex(state.token)
        self._term = RoundMembers(job.id, self._facts.home, state.launch, state.round, token, nodes)
        self._heartbeat_client.begin(self._term)

    def _settle(self) -> None:
        """From here on this thread may ask the store itself."""
        if not self._poller.settle(SILENCE_S):
            self._say("the rendezvous store does not answer: workers can't restart before it does.")
            self._poller.settle()

    def _is_stopping(self) -> None:
        if self._heartbeat_client and self._term:
            self._heartbeat_client.say(AgentPhase.STOPPING)

    def _enter(self) -> None:
        """Begins a launch of the job if nobody else is here; waits for the end of one that is just ending."""
        end = time.monotonic() + self._close_s
        while True:
            self._holder.sync(fresh=True)
            state = self._holder.state
            if not state.everyone():
                fresh = SharedState()
                fresh.round = state.round + 1 if state.launch else 0  # keys of rounds before must not be met again
                fresh.places = state.places
                fresh.launch, fresh.token = secrets.token_hex(8), secrets.token_hex(32)
                if self._holder.replace(fresh):
                    return
            elif not state.closed or time.monotonic() > end:
                return
            time.sleep(self._poll_s)

    def num_nodes_waiting(self) -> int:
        if self._reaper and not self._is_guarded:  # once a round: it looks at all processes of the node
            self._reaper.look()
            self._is_guarded = True
        waiting = self._reasons_to_restart()
        if waiting:
            self._is_stopping()
        return waiting

    def _reasons_to_restart(self) -> int:
        """How many nodes wait, or are lost; torch's agent restarts its workers if there are any."""
        term, reaction = self._news.latest
        if term is not None and term is self._term and reaction.reason:
            self._say(f"{reaction.reason} Workers restart without waiting for errors.")
            return 1
        try:
            waiting = self._poller.look()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise
        except RendezvousError as error:  # torch's agent would end the job, and needs the store for a restart alone
            self._say(f"the rendezvous store is lost: training goes on, but can't be restarted. {error}")
            return 0
        if waiting is None:
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
        if self._warm:
            self._warm.close()
        if self._round < 0:  # who never was a member has no right to end the job
            self._inner._stop_heartbeats()
            return True
        has_finished = sys.exc_info()[0] is None
        if self._heartbeat_client and self._term:
            self._heartbeat_client.close(AgentPhase.FINISHED if has_finished else AgentPhase.FAILED)
        self._settle()
        is_closed = bool(self._inner.shutdown())
        try:
            self._holder.leave()
        except RendezvousError as error:
            say(f"could not sign off: {error}")
        if has_finished and self._daemon and self._daemon[1].unattended and self._term:
            free_under_slurm(self._daemon[0], self._term.job)
        return is_closed


def create(parameters: RendezvousParameters) -> Any:
    """The handler for one agent.

    Raises:
        ConfigError: an option, or the endpoint, is not allowed.
        RendezvousConnectionError: no store answers at the endpoint.
    """
    check(parameters)
    rendezvous_id = rendezvous_id_of(parameters.run_id)
    with contextlib.ExitStack() as cleanup:
        warm = None
        if truth(parameters, "warm"):
            warm = begin(text(parameters, "warm_imports"))  # imports while this agent connects
            cleanup.callback(warm.close)
        facts, daemon = resolve_node(parameters)
        connect = etcd.connect if parameters.endpoint.startswith(etcd.SCHEME) else tcp.connect
        backend, store = connect(parameters, rendezvous_id)
        if daemon:
            os.environ["REFT_DAEMON"], _ = daemon
        run_id, parameters.run_id = parameters.run_id, rendezvous_id
        inner = create_torchs(store, backend, parameters)
        shrink_s = number(parameters, "shrink_timeout")
        reaper = OrphanReaper()
        cleanup.callback(reaper.close)
        handler = ReftRendezvousHandler(inner, facts, run_id, shrink_s, daemon, reaper, warm)
        cleanup.pop_all()  # from here on the handler ends its processes itself
    return handler
