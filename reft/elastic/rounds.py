"""torch's dynamic rendezvous with another state holder and executor.

torch's operations and timeouts stay. What differs is numbered below.

    torch's operations (join, exit, close, keep alive)
       │ next action                         ▲ state
    ┌──▼──────────┐   changes   ┌────────────┴──┐   compare-and-set   ┌─────────┐
    │  Executor   ├────────────►│  StateHolder  │◄───────────────────►│ backend │  TCPStore, etcd
    └─────────────┘             └───────▲───────┘                     └─────────┘
      sticky ranks                      │ which nodes are gone
                              process ended, node lost, no keep-alive

1. A node keeps its rank of the round before (`reft.core.membership.sticky_ranks`). The agent that
   completes the round assigns all ranks, in the shared state.
2. A node is silent if its keep-alive has not changed for too long, measured by this agent's own
   monotonic clock. So clocks that differ between hosts remove no node. An agent that was itself
   late removes no node until it has listened for the full time again.
3. A node that is known to be gone is removed at once: its process on this machine has ended, or it
   was reported lost.
4. A waiting agent reads the state soon, then less and less often, at last every `poll_s` seconds.
   torch reads it once a second.
5. A node that leaves a round to join the next one stays on the wait list meanwhile. So a job
   between two rounds is never empty.
6. A job that has run before waits `shrink` seconds for more nodes than the minimum.
7. torch's record of each action is cheap here. torch searches all loaded modules for the name of
   the caller. That takes tens of milliseconds between reading and writing the state, and other
   agents write first. Here an event has the name of the class, and its message names the action.
8. A node is refused when it joins if its daemon and those of the job could not call each other.
9. A newcomer waits while nodes that had a rank in the round before can fill the new one. Otherwise
   a spare would take a living node's rank whenever it is faster.
10. Who waits when a round is complete with all of --nnodes becomes a spare. torch leaves it on the
    wait list, and then all workers would be restarted again and again for a node without a place.
11. A state says which node's failure has closed it. Then the others end, as nobody restarts there.
    torch tells nobody. Without a daemon's signal they trained on, if no worker noticed.
12. A wall clock that is set back delays no sign of life of this node. torch compares with that
    clock: others missed the node, and all workers restarted. Each agent measures by itself how long
    an open round waits for more nodes, from when it first reads that the round waits. torch
    compares with a time by another host's clock: where that was behind, no round waited.
13. An agent has random bits in its number. torch tells agents apart by host name and process id.
    Containers share the name of their host, and have the same ids: both agents waited for a second.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, RendezvousSettings

from reft.console import say
from reft.core.membership.sticky_ranks import PreviousRank, assign
from reft.core.text import counted
from reft.elastic.entry_seal import EntrySeal, RefusedEntry
from reft.elastic.shared_state import AgentFacts, SharedState, check_certificates, member
from reft.elastic.torch_internals import (
    Action,
    NodeDesc,
    OpExecutor,
    RendezvousContext,
    RendezvousStateHolder,
    finish_removal,
    is_beat_due,
)

POLL_S = 0.2
POLL_S_PER_NODE = 0.001  # 1000 agents then read the store 1000 times a second, not 5000 times
POLL_MAX_S = 1.0
FIRST_POLL_S = 0.02
WAIT_SAID_S = 10.0  # then a line says for whom this node waits

OWN_BITS = 48  # of an agent's number; above them is torch's, which grows with each handler of a process

IsGone = Callable[[AgentFacts, float], bool]


def poll_s(max_nodes: int) -> float:
    """Returns the seconds between an agent's reads of the state.

    The agent's job has `max_nodes` nodes.
    """
    return min(POLL_S + POLL_S_PER_NODE * max_nodes, POLL_MAX_S)


def unlike_any_other(node: NodeDesc) -> NodeDesc:
    """Returns an agent's description that no agent of another process has (13)."""
    return NodeDesc(node.addr, node.pid, node.local_id << OWN_BITS | secrets.randbits(OWN_BITS))


def label(node: NodeDesc) -> str:
    """Returns an agent's name for people, where its node has no name."""
    return f"{node.addr}_{node.pid}"


def recorder(name: str, run_id: str, node: NodeDesc) -> Callable[..., None]:
    """Returns a `_record` method for one of torch's classes, with a fixed event name (7)."""

    def record(message: str, node_state: NodeState = NodeState.RUNNING, rank: int | None = None) -> None:
        construct_and_record_rdzv_event(
            run_id, message, node_state, name, node.addr, node.pid, local_id=node.local_id, rank=rank
        )

    return record


@dataclass(frozen=True)
class LastBeat:
    """The last keep-alive of an agent.

    Attributes:
        beat: the time that the agent wrote, by its own clock.
        new_s: when this agent first saw it; monotonic.
        silent_s: from when on silence counts; monotonic.
    """

    beat: datetime
    new_s: float
    silent_s: float


class StateHolder(RendezvousStateHolder):
    """One agent's copy of the shared state.

    Args:
        backend: holds the shared state.
        settings: of the rendezvous.
        node: this agent.
        is_gone: returns whether a node is known to be gone, from the node's facts and the time
            (monotonic) of its last keep-alive.
        seal: signs and judges what is written and read.

    Attributes:
        has_failed: whether this node's failure ends the launch, so that the others end, too.
        expiry_s: after so long a silence an agent is removed.
    """

    def __init__(
        self, backend: RendezvousBackend, settings: RendezvousSettings, node: NodeDesc, is_gone: IsGone, seal: EntrySeal
    ) -> None:
        self._backend, self._settings, self._node, self._is_gone = backend, settings, node, is_gone
        self._seal = seal
        self._state = SharedState()
        self._token: Any = None
        self._dirty = False
        self._cache_s = poll_s(settings.max_nodes)
        self.has_failed = False
        self.expiry_s = (settings.keep_alive_interval * settings.keep_alive_max_attempt).total_seconds()
        self._synced_s = float("-inf")
        self._last_beats: dict[NodeDesc, LastBeat] = {}

    @property
    def state(self) -> SharedState:
        """Returns the state as last read."""
        return self._state

    def mark_dirty(self) -> None:
        """Makes the next `sync` write this copy, unless another agent wrote first."""
        self._dirty = True

    def sync(self, fresh: bool = False) -> bool | None:
        """Writes this copy if it was changed, or else reads the state.

        Returns whether this copy was written; None if there was nothing to write.

        Args:
            fresh: read even if the state was read a moment ago.

        Raises:
            RefusedEntry: somebody else wrote the state, before this agent has read any.
        """
        has_set = None
        if self._dirty:
            answer = self._backend.set_state(self._seal.entry(self._state), self._token)
            data, self._token, has_set = answer or (None, None, False)
        elif time.monotonic() - self._synced_s < self._cache_s and not fresh:
            return None
        else:
            data, self._token = self._backend.get_state() or (None, None)
        self._dirty = False
        try:
            self._state = self._seal.state(data)
        except RefusedEntry as error:
            last_state = self._seal.last_state()
            if last_state is None:
                raise
            self._seal.say_once(error)
            self._state, self._dirty = last_state, True  # the next sync writes over the refused entry
        previous_s, self._synced_s = self._synced_s, time.monotonic()
        self._remove_gone(was_late=self._synced_s - previous_s > self.expiry_s / 2)
        return has_set

    def replace(self, state: SharedState) -> bool:
        """Writes another state over the one that was read; False if another agent wrote first."""
        self._state, self._dirty = state, True
        return bool(self.sync())

    def leave(self) -> None:
        """Removes this node from the shared state. The next launch then need not wait for it.

        Raises:
            RendezvousTimeoutError: other agents, or a stranger, always wrote first.
        """
        close_s = self._settings.timeout.close.total_seconds()
        end = time.monotonic() + close_s
        self.sync(fresh=True)
        while self._node in self._state.everyone():
            if time.monotonic() > end:
                raise RendezvousTimeoutError(f"the state could not be written within close_timeout ({close_s:.0f} s).")
            self._drop(self._node)
            self.replace(self._state)

    def _remove_gone(self, was_late: bool) -> None:
        now_s = time.monotonic()
        state, earlier_beats = self._state, self._last_beats
        self._last_beats = {node: LastBeat(beat, now_s, now_s) for node, beat in state.last_heartbeats.items()}
        for node, last in self._last_beats.items():
            earlier = earlier_beats.get(node)
            if earlier and earlier.beat == last.beat:
                self._last_beats[node] = replace(earlier, silent_s=now_s) if was_late else earlier
        for node, last in self._last_beats.items():
            if node == self._node:
                continue
            is_known_gone = self._is_gone(state.facts.get(node, AgentFacts()), last.new_s)
            if not is_known_gone and now_s - last.silent_s <= self.expiry_s:
                continue
            self._drop(node)
            self._dirty = True  # write the removal, so that not every agent must find it out

    def _drop(self, node: NodeDesc) -> None:
        was_participant = node in self._state.participants
        self._state.drop(node)
        if was_participant:
            finish_removal(self._state, self._settings)


class Executor(OpExecutor):
    """Executes the actions of torch's operations; see the module.

    Args:
        node: this agent.
        holder: this agent's copy of the state.
        settings: of the rendezvous.
        facts: what this agent tells the other agents of itself.
        shrink_s: how long a job that has run waits for more nodes than the minimum.
    """

    def __init__(
        self, node: NodeDesc, holder: StateHolder, settings: RendezvousSettings, facts: AgentFacts, shrink_s: float
    ) -> None:
        super().__init__(node, holder, settings)
        self._record = recorder(type(self).__name__, settings.run_id, node)  # type: ignore[method-assign]
        self._holder, self._facts, self._shrink_s = holder, facts, shrink_s
        self._poll_s = poll_s(settings.max_nodes)
        self._open_round: tuple[int, float] | None = None  # its number, and when it ends by this agent's clock

    def run(self, state_handler: Any, deadline: float, update_deadline: Any = None) -> None:
        """Runs torch's loop, but reads the state again soon where torch waits for a second."""

        began_s, told = time.monotonic(), ""

        def handler(context: RendezvousContext, until: float) -> Action:
            nonlocal told
            pause_s = FIRST_POLL_S
            self._mend_times()
            while (action := self._patient(state_handler(context, until), context)) == Action.SYNC:
                if not told and (told := self._waiting_words(time.monotonic() - began_s)):
                    say(told)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self._poll_s)
                self._holder.sync(fresh=True)
                self._state = self._holder.state
                self._mend_times()
                context = RendezvousContext(self._node, self._state, self._settings)
            return action

        super().run(handler, deadline, update_deadline)

    def _mend_times(self) -> None:
        """Replaces times of other clocks by those of this one (12)."""
        state, now = self._state, datetime.now(timezone.utc)
        beat = state.last_heartbeats.get(self._node)
        if beat is not None and beat > now:
            state.last_heartbeats[self._node] = now - self._settings.keep_alive_interval
        if state.deadline is None:
            self._open_round = None
            return
        now_s = time.monotonic()
        if self._open_round is None or self._open_round[0] != state.round:
            wait_s = self._shrink_s if state.places else self._settings.timeout.last_call.total_seconds()
            self._open_round = state.round, now_s + wait_s
        state.deadline = now + timedelta(seconds=self._open_round[1] - now_s)

    def _waiting_words(self, waited_s: float) -> str:
        """Returns what this node waits for, if people should know; else empty."""
        state, settings = self._state, self._settings
        if self._node in state.redundancy_list:
            return f"this node stands by: the job has its {counted(settings.max_nodes, 'node')}."
        if waited_s < WAIT_SAID_S:
            return ""
        if state.complete and self._node in state.wait_list:
            return (
                f"this node waits for the next round. {counted(len(state.participants), 'node')} did not leave the round before: "
                "workers there are ending, or have ended well."
            )
        if state.complete or len(state.participants) >= settings.min_nodes:
            return ""
        return (
            f"{len(state.participants)} of {counted(settings.min_nodes, 'node')} have come to the rendezvous. This node "
            f"waits for the others, at most for join_timeout ({settings.timeout.join.total_seconds():.0f} s)."
        )

    def _patient(self, action: Action, context: RendezvousContext) -> Action:
        """Returns the action; in the place of joining, waiting, while this node must wait (9)."""
        if action != Action.ADD_TO_PARTICIPANTS or not self._yields():
            return action
        if self._node not in self._state.wait_list:  # so that the other agents know of this one
            return Action.ADD_TO_WAIT_LIST
        return Action.KEEP_ALIVE if is_beat_due(context) else Action.SYNC

    def _yields(self) -> bool:
        """Returns whether the participants, and waiting nodes with an earlier rank, fill the round.

        A waiting node that has died is removed for its silence, and then this one joins.
        """
        state = self._state
        agents = {place.member.agent for place in state.places}
        homes = {place.member.home for place in state.places} - {""}

        def had_rank(node: NodeDesc) -> bool:
            return str(node) in agents or member(state, node).home in homes

        # This node's home is in the state only once it has signed in.
        if str(self._node) in agents or self._facts.home in homes:
            return False
        return len(state.participants) + sum(map(had_rank, state.wait_list)) >= self._settings.max_nodes

    def _keep_alive(self) -> None:
        """Signs this node in, and at each sign of life again.

        Raises:
            ConfigError: this node's daemon could not work with those of the job.
        """
        check_certificates(self._facts, self._state)
        super()._keep_alive()
        self._state.facts[self._node] = self._facts

    def _add_to_participants(self) -> None:
        had_deadline = self._state.deadline is not None
        super()._add_to_participants()
        if self._state.deadline is not None and not had_deadline and self._state.places:
            self._state.deadline = datetime.now(timezone.utc) + timedelta(seconds=self._shrink_s)

    def _remove_from_participants(self) -> None:
        super()._remove_from_participants()
        self._state.wait_list.add(self._node)
        self._keep_alive()

    def _mark_rendezvous_closed(self) -> None:
        super()._mark_rendezvous_closed()
        if self._holder.has_failed:
            self._state.failed = self._facts.name or label(self._node)

    def _mark_rendezvous_complete(self) -> None:
        super()._mark_rendezvous_complete()
        state = self._state
        nodes = {member(state, node): node for node in sorted(state.participants)}
        ranks = assign(list(nodes), state.places)
        for participant, rank in ranks.items():
            state.participants[nodes[participant]] = rank
        ordered = sorted(ranks.items(), key=lambda item: item[1])
        state.places = [PreviousRank(rank, participant) for participant, rank in ordered]
        if len(nodes) >= self._settings.max_nodes:
            state.redundancy_list |= state.wait_list
            state.wait_list.clear()
