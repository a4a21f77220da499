"""The rendezvous handler: torch's dynamic rendezvous with working restarts (`reft.elastic.rounds`).

    create             options ─► daemon of this node (started if none runs) ─► store ─► handler
    next_rendezvous    begin a launch if no agent is there ─► torch's join ─► new store for workers
                       ─► are all members there? no: torch's join again
    num_nodes_waiting  asked ten times a second. Above 0 torch restarts the workers: a node waits, a
                       node of this round is gone, or the daemon reports UNHEALTHY or OFFLINE

Two faults of restarts in torch 2.13 are worked around. torch keeps one store and one address for
the workers over all rounds (`torch_internals.CACHES`), but workers add no prefix per attempt. So
restarted workers read what the round before wrote, and most restarts fail or hang. And if the node
of rank 0 was replaced, the workers connect to the lost node. The handler clears both attributes
before each round.

Also different from torch: agents that lose the store continue while their workers run. A spare node
that is no longer needed exits with 0. A job can be started again under its name after all agents of
the launch before have ended.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler as create_torchs

from reft.console import say
from reft.core.membership.agent_policy import AgentReaction
from reft.core.membership.failure_detector import AgentPhase
from reft.elastic.entry_seal import EntrySeal
from reft.elastic.heartbeat_client import HeartbeatClient, RoundMembers
from reft.elastic.meeting import meet
from reft.elastic.node import OwnDaemon, free_under_slurm, has_ended, resolve_node
from reft.elastic.options import check, job_of, number, rendezvous_id_of, text, truth
from reft.elastic.orphan_reaper import OrphanReaper
from reft.elastic.rounds import Executor, StateHolder, label, poll_s, recorder, unlike_any_other
from reft.elastic.shared_state import AgentFacts, SharedState
from reft.elastic.store_poller import StorePoller
from reft.elastic.stores import etcd, tcp
from reft.elastic.stores.sealed import ForeignEntry, SealedStore
from reft.elastic.torch_internals import (
    CACHES,
    NodeDesc,
    backend_of,
    forget_worker_store,
    missing_in,
    replace_parts,
    stop_heartbeats,
    store_of,
    this_node,
)
from reft.elastic.warm.warm import WarmWorkers, begin
from reft.wire import job_key
from reft.wire.job_key import AgentSecrets
from reft.wire.messages import TOKEN_BYTES
from reft.wire.v1 import daemon_pb2 as pb

# What an agent tells its workers. They inherit its environment, and so would a later launch of this
# process.
TOLD = ("REFT_DAEMON", "REFT_ROUND", "REFT_LAUNCH", "REFT_WHOLE_STEP", "REFT_UNNAMED_JOB", "REFT_KEYED")
SILENCE_S = 2.0  # without an answer of the store, then a line is printed


class RestartSignals:
    """The signals of the daemons, as one reaction. The heartbeat client's thread writes it."""

    def __init__(self) -> None:
        self.latest: tuple[RoundMembers | None, AgentReaction] = (None, AgentReaction())
        self._lost_s: dict[str, float] = {}  # node id of a lost node → when this agent learned of the loss

    def heard(self, round_members: RoundMembers, reaction: AgentReaction) -> None:
        """Stores a reaction. Called from a thread of the heartbeat client."""
        # Only the first report in a round counts. A node that comes back is not removed again by
        # later ones.
        known_lost = self.latest[1].lost if self.latest[0] is round_members else frozenset()
        self._lost_s = {**self._lost_s, **dict.fromkeys(reaction.lost - known_lost, time.monotonic())}
        self.latest = (round_members, reaction)

    def is_gone(self, facts: AgentFacts, seen_s: float) -> bool:
        """Returns whether a node was reported lost, or its agent has ended, since `seen_s`."""
        reported_s = self._lost_s.get(facts.home, float("-inf"))
        return reported_s >= seen_s or (bool(facts.process) and has_ended(facts.process))


@contextlib.contextmanager
def _shorter_timeout(store: Store, seconds: float) -> Iterator[None]:
    """Lets calls of the store wait for at most `seconds` meanwhile."""
    before = store.timeout
    store.set_timeout(min(before, timedelta(seconds=seconds)))
    try:
        yield
    finally:
        store.set_timeout(before)


def _end(
    poller: StorePoller, heartbeat_client: HeartbeatClient | None, reaper: OrphanReaper | None, warm: WarmWorkers | None
) -> None:
    """Ends the threads and processes of a handler that no longer exists."""
    poller.close()
    for close in (heartbeat_client and heartbeat_client.stop, reaper and reaper.close, warm and warm.close):
        if close:
            close()


@dataclass(frozen=True)
class WorkerRound:
    """The round in which this agent's workers run.

    Attributes:
        number: of the round; -1 before the first.
        names: agents in the round → name of their node.
        members: the members as daemons know them; None: daemons send no signals of this round.
    """

    number: int = -1
    names: Mapping[NodeDesc, str] = field(default_factory=dict)
    members: RoundMembers | None = None


class ReftRendezvousHandler(RendezvousHandler):
    """One agent's rendezvous handler; see the module.

    Args:
        inner: torch's handler. Its state holder and executor are replaced.
        facts: what this agent tells the other agents of itself.
        run_id: torchrun's --rdzv-id, as the workers see it.
        shrink_s: see `reft.elastic.rounds`.
        daemon: of this node; None: no signals of nodes.
        reaper: ends the workers if this agent is killed; None: nothing ends them.
        warm: forks the workers; None: each worker is started as a new process.
        taken: the job key, if any. Without one, the launch's secret lies in the store.
    """

    def __init__(
        self, inner: DynamicRendezvousHandler, facts: AgentFacts, run_id: str, shrink_s: float,
        daemon: OwnDaemon | None = None, reaper: OrphanReaper | None = None, warm: WarmWorkers | None = None,
        taken: AgentSecrets = AgentSecrets(),  # noqa: B008  frozen
    ) -> None:  # fmt: skip
        self._inner, self._run_id, self._facts, self._taken = inner, run_id, facts, taken
        self._node, settings = unlike_any_other(this_node(inner)), inner.settings
        self._signals = RestartSignals()
        seal = EntrySeal(settings.run_id, taken.key.entry_key(settings.run_id) if taken.key else None)
        self._holder = StateHolder(backend_of(inner), settings, self._node, self._signals.is_gone, seal)
        executor = Executor(self._node, self._holder, settings, facts, shrink_s)
        record = recorder(type(inner).__name__, settings.run_id, self._node)
        replace_parts(inner, self._node, self._holder, executor, record)
        for name in missing_in(CACHES, inner):
            say(f"this torch has no {name}: {name.use}.")
        self._poller = StorePoller(inner.num_nodes_waiting)
        self._round = WorkerRound()
        self._last_line = ""
        self._reaper, self._is_reaper_current, self._warm = reaper, False, warm
        self._daemon = daemon
        self._heartbeat_client = HeartbeatClient(*daemon, self._signals.heard) if daemon else None
        # No thread may reference this handler. Otherwise a handler that torch drops without
        # `shutdown` would never be freed, and its threads and processes would stay.
        weakref.finalize(self, _end, self._poller, self._heartbeat_client, reaper, warm).atexit = False

    @property
    def use_agent_store(self) -> bool:
        return bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        """Returns the name that --rdzv-backend must have."""
        return "reft"

    def next_rendezvous(self) -> RendezvousInfo:
        self._report_stopping()
        self._settle()
        if self._round.number < 0:
            self._begin_launch()
        try:
            info, state = self._join()
        except RendezvousGracefulExitError as error:
            # torch's agent does not handle this error: it would fail with an AttributeError.
            say("this node was a spare and was not needed: the job has ended.")
            raise SystemExit(0) from error
        self._is_reaper_current, self._last_line = False, ""
        names = {node: state.facts[node].name or label(node) for node in state.participants}
        self._round = WorkerRound(state.round, names, self._announce_round(state))
        return info

    def _join(self) -> tuple[RendezvousInfo, SharedState]:
        """Joins a round whose members are all there; returns the state with these members.

        Raises:
            RendezvousError: torch's join failed, or no such round came within join_timeout after
                the first one.
        """
        end_s = math.inf
        while True:
            forget_worker_store(self._inner)
            info = None
            try:
                # Before the members meet, a dead first node costs no more than its silence.
                with _shorter_timeout(store_of(self._inner), self._holder.expiry_s):
                    info = self._inner.next_rendezvous()
            except ForeignEntry:
                raise
            except DistStoreError:
                why = "the first node of the new round did not come"
            # Not from the start: a spare waits for its first round without a limit.
            end_s = min(end_s, time.monotonic() + self._inner.settings.timeout.join.total_seconds())
            if info:
                state = self._holder.state
                # One that is missing in this state would not be missed later.
                has_all = len(state.participants) == info.world_size
                if has_all and meet(info, functools.partial(self._is_intact, info), end_s):
                    return info, state
                why = "a node of the new round is gone"
            if time.monotonic() > end_s:
                raise RendezvousTimeoutError(f"{why}, and join_timeout is over. Start the launch again.")
            self._say(f"{why}. This node joins the next one.")

    def _is_intact(self, info: RendezvousInfo) -> bool:
        """Returns whether all members of the round are still in it.

        Members of a complete round only leave it, and none comes back into it.
        """
        self._inner.num_nodes_waiting()  # reads the state, if it was not read a moment ago
        members = self._holder.state.participants
        return self._node in members and len(members) == info.world_size

    def _announce_round(self, state: SharedState) -> RoundMembers | None:
        """Tells this node's workers and daemon which round runs now.

        Returns the members; None if daemons send no signals of this round.
        """
        job = job_of(self._run_id, state.launch)
        os.environ["REFT_ROUND"], os.environ["REFT_LAUNCH"] = str(state.round), state.launch
        os.environ["REFT_UNNAMED_JOB"] = "" if job.named else job.id
        os.environ["REFT_KEYED"] = "0"
        if self._heartbeat_client is None:
            return None
        os.environ["REFT_WHOLE_STEP"] = str(self._heartbeat_client.whole)
        nodes_by_rank = sorted(state.participants, key=lambda node: state.participants[node])
        members = [facts for facts in (state.facts[node] for node in nodes_by_rank) if facts.home]
        if len({facts.home for facts in members}) < len(members):
            say("several agents of this job share one daemon, so lost nodes are found late.")
            return None
        nodes = tuple(
            pb.Node(name=facts.name, id=facts.home, addresses=facts.addresses, domain=facts.domain) for facts in members
        )
        key = self._taken.key
        token = key.launch_secret(job.id, state.launch) if key else bytes.fromhex(state.token)
        job_token = key.job_token(job.id) if key else b""
        round_members = RoundMembers(job.id, self._facts.home, state.launch, state.round, token, nodes, job_token)
        self._heartbeat_client.begin(round_members)
        # Workers then wait for the job's token, which this agent gives to its daemon.
        os.environ["REFT_KEYED"] = "1" if key else "0"
        return round_members

    def _settle(self) -> None:
        """Waits until this thread may use the store: the poller asks nothing meanwhile."""
        if not self._poller.settle(SILENCE_S):
            self._say("the rendezvous store does not answer. Workers can't restart until it does.")
            self._poller.settle()

    def _report_stopping(self) -> None:
        if self._heartbeat_client and self._round.members:
            self._heartbeat_client.say(AgentPhase.STOPPING)

    def _begin_launch(self) -> None:
        """Begins a launch of the job if no other agent is there.

        If a launch is just ending, waits for its end, at most for `close_timeout`.
        """
        end = time.monotonic() + self._inner.settings.timeout.close.total_seconds()
        while True:
            self._holder.sync(fresh=True)
            state = self._holder.state
            if not state.everyone():
                fresh = SharedState()
                fresh.round = (
                    state.round + 1 if state.launch else 0
                )  # so that keys of earlier rounds are not read again
                fresh.places = state.places
                fresh.launch = secrets.token_hex(8)
                fresh.token = "" if self._taken.key else secrets.token_hex(TOKEN_BYTES)
                if self._holder.replace(fresh):
                    return
            elif not state.closed or time.monotonic() > end:
                return
            time.sleep(poll_s(self._inner.settings.max_nodes))

    def num_nodes_waiting(self) -> int:
        if self._reaper and not self._is_reaper_current:  # once a round, because it reads all processes of the node
            self._reaper.look()
            self._is_reaper_current = True
        waiting = self._count_restart_reasons()
        if waiting:
            self._report_stopping()
        return waiting

    def _count_restart_reasons(self) -> int:
        """Returns how many nodes wait or are lost. torch restarts the workers if it is not 0."""
        round_members, reaction = self._signals.latest
        if round_members is not None and round_members is self._round.members and reaction.reason:
            names = {node.id: node.name for node in round_members.nodes}
            self._say(f"node {names.get(reaction.node, reaction.node)}: {reaction.reason} Workers restart now.")
            return 1
        try:
            waiting = self._poller.look()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise
        except RendezvousError as error:
            # torch's agent would end the job on this error. But the store is needed only for a
            # restart.
            self._say(f"the rendezvous store does not work: training continues, but workers can't restart. {error}")
            return 0
        if waiting is None:
            return 0
        state = self._holder.state
        if state.failed:
            self._say(f"node {state.failed} has failed, and its agent ended the launch. Workers end now.")
            return 1
        if waiting or state.closed:
            return waiting
        if state.round != self._round.number or self._node not in state.participants:
            self._say("the other nodes started a round without this node. Its workers stop and join the next round.")
            return 1
        lost = sorted(name for node, name in self._round.names.items() if node not in state.participants)
        if lost:
            self._say(f"lost node: {', '.join(lost)}. Workers restart now.")
        return len(lost)

    def _say(self, text: str) -> None:
        if text != self._last_line:
            say(text)
        self._last_line = text

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        _give_back(self._taken)  # the workers have ended; this process may launch again
        if self._warm:
            self._warm.close()
        if self._round.number < 0:  # an agent that never took part must not end the job
            stop_heartbeats(self._inner)
            self._leave()
            return True
        has_finished = sys.exc_info()[0] is None
        if self._heartbeat_client and self._round.members:
            self._heartbeat_client.close(AgentPhase.FINISHED if has_finished else AgentPhase.FAILED)
        self._settle()
        self._holder.has_failed = not has_finished
        is_closed = bool(self._inner.shutdown())
        try:
            self._holder.leave()
        except RendezvousError as error:
            say(f"could not remove this node from the rendezvous: {error}")
        if has_finished and self._daemon and self._daemon[1].unattended and self._round.members:
            free_under_slurm(self._daemon[0], self._round.members.job)
        return is_closed

    def _leave(self) -> None:
        """Removes this node from the rendezvous, so that no round counts on it.

        It does not wait for a silent store: the user may have interrupted this agent.
        """
        holder = self._holder

        def leave() -> None:
            with contextlib.suppress(RendezvousError):  # the other agents will miss its keep-alives
                holder.leave()

        if self._node in holder.state.everyone():
            leaving = threading.Thread(target=leave, name="reft-leave", daemon=True)
            leaving.start()
            leaving.join(SILENCE_S)


def _take_environment() -> AgentSecrets:
    """Takes the secrets out of the environment, and notes what else `_give_back` shall restore.

    Raises:
        ConfigError: the job key can't be used.
    """
    taken = job_key.take(os.environ)
    told = {name: os.environ[name] for name in TOLD if name in os.environ}
    return replace(taken, variables={**taken.variables, **told})


def _give_back(taken: AgentSecrets) -> None:
    """Gives this process the variables that it had before the handler was made."""
    for name in TOLD:
        os.environ.pop(name, None)
    os.environ.update(taken.variables)


def create(parameters: RendezvousParameters) -> Any:
    """Returns the handler of one agent.

    If anything fails, every process that was started here is ended first, and torch's patch and the
    environment are restored.

    Raises:
        ConfigError: an option or the endpoint is not valid.
        RendezvousConnectionError: no store answers at the endpoint.
    """
    check(parameters)
    rendezvous_id = rendezvous_id_of(parameters.run_id)
    with contextlib.ExitStack() as cleanup:
        # Before any process is started: no child of this agent may have the key.
        taken = _take_environment()
        cleanup.callback(_give_back, taken)
        warm = None
        if truth(parameters, "warm"):
            warm = begin(text(parameters, "warm_imports"))  # imports while this agent connects
            cleanup.callback(warm.close)
        facts, daemon = resolve_node(parameters)
        if parameters.endpoint.startswith(etcd.SCHEME):
            backend, store = etcd.connect(parameters, rendezvous_id, taken.etcd_password)
        else:
            backend, store = tcp.connect(parameters, rendezvous_id)
        if daemon:
            os.environ["REFT_DAEMON"] = daemon[0]
        if taken.key:
            store = SealedStore(store, taken.key.entry_key(rendezvous_id))
        run_id, parameters.run_id = parameters.run_id, rendezvous_id
        inner = create_torchs(store, backend, parameters)
        shrink_s = number(parameters, "shrink_timeout")
        reaper = OrphanReaper()
        cleanup.callback(reaper.close)
        handler = ReftRendezvousHandler(inner, facts, run_id, shrink_s, daemon, reaper, warm, taken)
        cleanup.pop_all()  # from here on the handler ends its processes itself
    return handler
