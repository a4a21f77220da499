"""The state that all agents of a job share, as torch's rendezvous keeps it, with what reft adds; and its form as JSON.

torch writes the state as a pickle, and unpickles what the store holds: anyone who reaches the store runs code in every agent.
JSON runs nothing, and has the same bytes for the same state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from reft.core.membership.sticky_ranks import Participant, PreviousRank

FORMAT = 1


@dataclass(frozen=True)
class AgentFacts:
    """What an agent says of its node when it joins.

    Attributes:
        process: the agent's, see `reft.wire.process.mark_of`; empty if unknown.
        home: id of its daemon's arena; empty if it has no daemon.
        name, domain, addresses: of the daemon.
    """

    process: str = ""
    home: str = ""
    name: str = ""
    domain: str = ""
    addresses: tuple[str, ...] = field(default=())


class SharedState(_RendezvousState):
    """torch's state, and:

    Attributes:
        facts: of each node that is here.
        places: who had which rank in the last completed round.
        launch: tells this launch of the job from every other; made by the first agent to come.
        token: 32 random bytes in hex, by which agents and daemons of this launch know one another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[_NodeDesc, AgentFacts] = {}
        self.places: list[PreviousRank] = []
        self.launch = ""
        self.token = ""

    def everyone(self) -> set[_NodeDesc]:
        """All who take part, wait, or stand by."""
        return {*self.participants, *self.wait_list, *self.redundancy_list}

    def drop(self, node: _NodeDesc) -> None:
        """Forgets a node, whatever it is here."""
        self.last_heartbeats.pop(node, None)
        self.participants.pop(node, None)
        self.wait_list.discard(node)
        self.redundancy_list.discard(node)


def member(state: SharedState, node: _NodeDesc) -> Participant:
    """A node as `reft.core.membership.sticky_ranks` names it."""
    return Participant(str(node), state.facts.get(node, AgentFacts()).home)


def encode(state: SharedState) -> bytes:
    """JSON; `decode` reads it."""
    nodes = sorted({*state.everyone(), *state.last_heartbeats})
    index = {node: i for i, node in enumerate(nodes)}
    return json.dumps(
        {
            "format": FORMAT,
            "round": state.round,
            "complete": state.complete,
            "closed": state.closed,
            "deadline": _text(state.deadline),
            "launch": state.launch,
            "token": state.token,
            "nodes": [_entry(state, node) for node in nodes],
            "participants": [[index[node], rank] for node, rank in state.participants.items()],
            "waiting": sorted(index[node] for node in state.wait_list),
            "redundant": sorted(index[node] for node in state.redundancy_list),
            "places": [[place.rank, place.member.agent, place.member.home] for place in state.places],
        },
        separators=(",", ":"),
    ).encode()


def decode(data: bytes) -> SharedState:
    """The state.

    Raises:
        RendezvousStateError: these bytes are none, or of another version of reft.
    """
    try:
        said = json.loads(data)
        if said["format"] != FORMAT:
            raise RendezvousStateError(
                f"the rendezvous state has format {said['format']}, and this reft reads {FORMAT}: "
                "use the same version of reft on all nodes."
            )
        return _state(said)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RendezvousStateError(
            f"what the store holds is no rendezvous state of reft ({type(error).__name__}: {error}): "
            "do all agents use --rdzv-backend=reft?"
        ) from error


def _state(said: dict[str, Any]) -> SharedState:
    state = SharedState()
    state.round, state.complete, state.closed = int(said["round"]), bool(said["complete"]), bool(said["closed"])
    state.deadline = _moment(said["deadline"])
    state.launch, state.token = str(said["launch"]), str(said["token"])
    nodes = []
    for entry in said["nodes"]:
        address, pid, local_id = entry["agent"]
        node = _NodeDesc(str(address), int(pid), int(local_id))
        nodes.append(node)
        beat = _moment(entry["beat"])
        if beat is not None:
            state.last_heartbeats[node] = beat
        facts = dict(entry["facts"])
        state.facts[node] = AgentFacts(**{**facts, "addresses": tuple(map(str, facts["addresses"]))})
    state.participants = {nodes[i]: int(rank) for i, rank in said["participants"]}
    state.wait_list = {nodes[i] for i in said["waiting"]}
    state.redundancy_list = {nodes[i] for i in said["redundant"]}
    state.places = [PreviousRank(int(rank), Participant(str(agent), str(home))) for rank, agent, home in said["places"]]
    return state


def _entry(state: SharedState, node: _NodeDesc) -> dict[str, Any]:
    facts = state.facts.get(node, AgentFacts())
    return {
        "agent": [node.addr, node.pid, node.local_id],
        "beat": _text(state.last_heartbeats.get(node)),
        "facts": {**vars(facts), "addresses": list(facts.addresses)},
    }


def _text(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
