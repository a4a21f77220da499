"""torch's rendezvous with another state holder and executor: its operations and timeouts stay, these things change.

    torch's operations (join, exit, close, keep alive)
       │ next action                         ▲ state
    ┌──▼──────────┐   changes   ┌────────────┴──┐   compare-and-set   ┌─────────┐
    │  Executor   ├────────────►│  StateHolder  │◄───────────────────►│ backend │  TCPStore, etcd
    └─────────────┘             └───────▲───────┘                     └─────────┘
      sticky ranks                      │ who is gone
                              process ended, node lost, silent

1. Ranks are those of the round before (`reft.core.membership.sticky_ranks`), decided once, in the state, by the agent that
   completes the round.
2. Who is silent is judged by the time since his sign of life was last seen to change, by this agent's monotonic clock:
   clocks that differ between hosts kill nobody. Who was late himself judges nobody until he has listened anew.
3. Who is known to be gone (an ended process of this machine; a node that was said to be lost) is removed at once.
4. Waiting agents look at the state soon, then ever less often, at last `poll_s` apart; not once a second.
5. Who leaves a round to join the next stays on the wait list meanwhile: a job between two rounds is never empty.
6. Who waits for more nodes than the minimum does so for `shrink` seconds once the job has run.
7. What torch records of each action costs nothing unless somebody listens. torch walks through all loaded modules for the
   name of the caller, for tens of milliseconds between reading the state and writing it, in which others overtake. Here the
   name of an event is that of the class; the message says which action it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    RendezvousSettings,
    _Action,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _remove_participant_epilogue,
    _RendezvousContext,
    _RendezvousStateHolder,
)

from reft.core.membership.sticky_ranks import PreviousRank, assign
from reft.elastic.shared_state import AgentFacts, SharedState, decode, encode, member

POLL_S = 0.2
POLL_S_PER_NODE = 0.001  # a thousand agents look at the store a thousand times a second, as fifty of them do
POLL_MAX_S = 1.0
FIRST_POLL_S = 0.02

IsGone = Callable[[AgentFacts, float], bool]


def poll_s(max_nodes: int) -> float:
    """How often an agent of a job of so many nodes looks at the state, in seconds."""
    return min(POLL_S + POLL_S_PER_NODE * max_nodes, POLL_MAX_S)


def recorder(name: str, run_id: str, node: _NodeDesc) -> Callable[..., None]:
    """Returns a `_record` for one of torch's classes, whose events get this name; see 7 above."""

    def record(message: str, node_state: NodeState = NodeState.RUNNING, rank: int | None = None) -> None:
        construct_and_record_rdzv_event(
            run_id, message, node_state, name, node.addr, node.pid, local_id=node.local_id, rank=rank
        )

    return record


@dataclass(frozen=True)
class LastBeat:
    """An agent's sign of life: when it was new to us, and from when on its silence counts; both monotonic."""

    beat: datetime
    new_s: float
    silent_s: float


class StateHolder(_RendezvousStateHolder):
    """One agent's copy of the shared state.

    Args:
        backend: holds the shared one.
        settings: of the rendezvous.
        node: this agent.
        is_gone: whether a node is known to be gone, by its facts and the moment (monotonic) of its last sign of life.
    """

    def __init__(
        self, backend: RendezvousBackend, settings: RendezvousSettings, node: _NodeDesc, is_gone: IsGone
    ) -> None:
        self._backend, self._settings, self._node, self._is_gone = backend, settings, node, is_gone
        self._state = SharedState()
        self._token: Any = None
        self._dirty = False
        self._cache_s = poll_s(settings.max_nodes)
        self._expiry_s = (settings.keep_alive_interval * settings.keep_alive_max_attempt).total_seconds()
        self._synced_s = float("-inf")
        self._seen: dict[_NodeDesc, LastBeat] = {}

    @property
    def state(self) -> SharedState:
        """As last read."""
        return self._state

    def mark_dirty(self) -> None:
        """The next `sync` writes our copy, unless somebody was faster."""
        self._dirty = True

    def sync(self, fresh: bool = False) -> bool | None:
        """Writes what we changed, or reads; whether ours was written, None if there was nothing to write.

        Args:
            fresh: read also if that was done a moment ago.
        """
        has_set = None
        if self._dirty:
            answer = self._backend.set_state(encode(self._state), self._token)
            data, self._token, has_set = answer or (None, None, False)
        elif time.monotonic() - self._synced_s < self._cache_s and not fresh:
            return None
        else:
            data, self._token = self._backend.get_state() or (None, None)
        self._state = decode(data) if data is not None else SharedState()
        self._dirty = False
        before_s, self._synced_s = self._synced_s, time.monotonic()
        self._remove_gone(was_late=self._synced_s - before_s > self._expiry_s / 2)
        return has_set

    def replace(self, state: SharedState) -> bool:
        """Writes another state in place of the one that was read; False if somebody changed it meanwhile."""
        self._state, self._dirty = state, True
        return bool(self.sync())

    def leave(self) -> None:
        """Forgets this node in the shared state, so that the next launch need not wait for its silence."""
        self.sync(fresh=True)
        while self._node in self._state.everyone():
            self._state.drop(self._node)
            self.replace(self._state)

    def _remove_gone(self, was_late: bool) -> None:
        now_s = time.monotonic()
        state, before = self._state, self._seen
        self._seen = {node: LastBeat(beat, now_s, now_s) for node, beat in state.last_heartbeats.items()}
        for node, seen in self._seen.items():
            if node in before and before[node].beat == seen.beat:
                self._seen[node] = replace(before[node], silent_s=now_s) if was_late else before[node]
        for node, seen in self._seen.items():
            if node == self._node:
                continue
            known = self._is_gone(state.facts.get(node, AgentFacts()), seen.new_s)
            if not known and now_s - seen.silent_s <= self._expiry_s:
                continue
            was_participant = node in state.participants
            state.drop(node)
            if was_participant:
                _remove_participant_epilogue(state, self._settings)
            self._dirty = True  # the others must not find out one by one


class Executor(_DistributedRendezvousOpExecutor):
    """Carries out what torch's operations say; see the module.

    Args:
        node: this agent.
        facts: what it says of itself.
        shrink_s: how long a job that has run waits for more than the fewest nodes.
    """

    def __init__(
        self, node: _NodeDesc, holder: StateHolder, settings: RendezvousSettings, facts: AgentFacts, shrink_s: float
    ) -> None:
        super().__init__(node, holder, settings)
        self._record = recorder(type(self).__name__, settings.run_id, node)  # type: ignore[method-assign]
        self._holder, self._facts, self._shrink_s = holder, facts, shrink_s
        self._poll_s = poll_s(settings.max_nodes)

    def run(self, state_handler: Any, deadline: float, update_deadline: Any = None) -> None:
        """See torch; but looks again soon where torch waits for a second."""

        def handler(context: _RendezvousContext, until: float) -> _Action:
            pause_s = FIRST_POLL_S
            while (action := state_handler(context, until)) == _Action.SYNC:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self._poll_s)
                self._holder.sync(fresh=True)
                self._state = self._holder.state
                context = _RendezvousContext(self._node, self._state, self._settings)
            return action

        super().run(handler, deadline, update_deadline)

    def _keep_alive(self) -> None:
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

    def _mark_rendezvous_complete(self) -> None:
        super()._mark_rendezvous_complete()
        state = self._state
        nodes = {member(state, node): node for node in sorted(state.participants)}
        ranks = assign(list(nodes), state.places)
        for who, rank in ranks.items():
            state.participants[nodes[who]] = rank
        state.places = [PreviousRank(rank, who) for who, rank in sorted(ranks.items(), key=lambda item: item[1])]
