"""The state that all agents of a job share: torch's rendezvous state with more fields, as JSON.

torch stores the state as a pickle and unpickles what the store holds. So anyone who can write to
the store runs code in every agent. JSON runs no code, and equal states have equal bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from reft.core.membership.sticky_ranks import Participant, PreviousRank
from reft.elastic.torch_internals import NodeDesc, RendezvousState

FORMAT = 1


@dataclass(frozen=True)
class AgentFacts:
    """The facts about its node that a joining agent tells the other agents.

    Attributes:
        process: of the agent, see `reft.wire.process.mark_of`; empty if unknown.
        home: id of its daemon's arena; empty without a daemon.
        name, domain, addresses: of the daemon.
    """

    process: str = ""
    home: str = ""
    name: str = ""
    domain: str = ""
    addresses: tuple[str, ...] = field(default=())


class SharedState(RendezvousState):
    """torch's rendezvous state with more fields.

    Attributes:
        facts: of each node in the state.
        places: which agent had which rank in the last completed round.
        launch: identifies this launch of the job; made by its first agent.
        token: 32 random bytes in hex; agents and daemons of this launch prove themselves with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[NodeDesc, AgentFacts] = {}
        self.places: list[PreviousRank] = []
        self.launch = ""
        self.token = ""

    def everyone(self) -> set[NodeDesc]:
        """Returns all nodes that take part, wait, or are spare."""
        return {*self.participants, *self.wait_list, *self.redundancy_list}

    def drop(self, node: NodeDesc) -> None:
        """Removes a node from all lists."""
        self.last_heartbeats.pop(node, None)
        self.participants.pop(node, None)
        self.wait_list.discard(node)
        self.redundancy_list.discard(node)


def member(state: SharedState, node: NodeDesc) -> Participant:
    """Returns the node as `reft.core.membership.sticky_ranks` names nodes."""
    return Participant(str(node), state.facts.get(node, AgentFacts()).home)


def encode(state: SharedState) -> bytes:
    """Returns the state as JSON; `decode` reads it."""
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
    """Returns the state from its JSON form.

    Raises:
        RendezvousStateError: the bytes are no such state, or another version of reft wrote them.
    """
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise RendezvousStateError(
                f"the rendezvous state has format {document['format']}, but this reft reads {FORMAT}: "
                "use the same version of reft on all nodes."
            )
        return _state(document)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RendezvousStateError(
            f"the store holds no rendezvous state of reft ({type(error).__name__}: {error}): "
            "do all agents use --rdzv-backend=reft?"
        ) from error


def _state(document: dict[str, Any]) -> SharedState:
    state = SharedState()
    state.round, state.complete, state.closed = (
        int(document["round"]),
        bool(document["complete"]),
        bool(document["closed"]),
    )
    state.deadline = _moment(document["deadline"])
    state.launch, state.token = str(document["launch"]), str(document["token"])
    nodes = []
    for entry in document["nodes"]:
        address, pid, local_id = entry["agent"]
        node = NodeDesc(str(address), int(pid), int(local_id))
        nodes.append(node)
        last_heartbeat = _moment(entry["beat"])
        if last_heartbeat is not None:
            state.last_heartbeats[node] = last_heartbeat
        facts = dict(entry["facts"])
        state.facts[node] = AgentFacts(**{**facts, "addresses": tuple(map(str, facts["addresses"]))})
    state.participants = {nodes[i]: int(rank) for i, rank in document["participants"]}
    state.wait_list = {nodes[i] for i in document["waiting"]}
    state.redundancy_list = {nodes[i] for i in document["redundant"]}
    state.places = [
        PreviousRank(int(rank), Participant(str(agent), str(home))) for rank, agent, home in document["places"]
    ]
    return state


def _entry(state: SharedState, node: NodeDesc) -> dict[str, Any]:
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
