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
from reft.elastic.bounded_json import parse
from reft.elastic.torch_internals import NodeDesc, RendezvousState
from reft.errors import ConfigError
from reft.wire.messages import TOKEN_BYTES

FORMAT = 2
STATE_MAX = 32 << 20  # bytes of the JSON form: 16,384 nodes with eight addresses each
DEPTH_MAX = 5  # state, nodes, node, facts, addresses
NODES_MAX = 1 << 14
TEXT_MAX = 1024  # characters of one value
ADDRESSES_MAX = 8
NUMBER_MAX = (1 << 63) - 1
PLAIN = "no certificates"


@dataclass(frozen=True)
class AgentFacts:
    """The facts about its node that a joining agent tells the other agents.

    Attributes:
        process: of the agent, see `reft.wire.process.mark_of`; empty if unknown.
        home: id of its daemon's arena; empty without a daemon.
        name, domain, addresses: of the daemon.
        certificates: with what its daemon calls others: "user U" for this user's, or "no
            certificates"; empty if unknown, or if others can't call the daemon.
    """

    process: str = ""
    home: str = ""
    name: str = ""
    domain: str = ""
    addresses: tuple[str, ...] = field(default=())
    certificates: str = ""


class SharedState(RendezvousState):
    """torch's rendezvous state with more fields.

    Attributes:
        facts: of each node in the state.
        places: which agent had which rank in the last completed round.
        launch: identifies this launch of the job; made by its first agent.
        token: 32 random bytes in hex; agents and daemons of this launch prove themselves with it.
            Empty if they derive it from a job key.
        number: grows with each write of the state.
        failed: name of the node whose failure has closed the state; empty: none, or it is open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[NodeDesc, AgentFacts] = {}
        self.places: list[PreviousRank] = []
        self.launch = ""
        self.token = ""
        self.number = 0
        self.failed = ""

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


def check_certificates(own: AgentFacts, state: SharedState) -> None:
    """Raises ConfigError if daemons of the participants and this node's could not call each other.

    Without this check such a node would be taken as a spare, and each attach with it would fail.

    Args:
        own: of this node.
        state: of the job that this node joins.
    """
    for node in state.participants:
        other = state.facts.get(node, AgentFacts())
        known = {own.certificates, other.certificates} - {""}
        if len(known) > 1 and own.home != other.home:
            raise ConfigError(
                f"this node, {own.name}, has {_ownership(own)}, and node {other.name} of this job has {_ownership(other)}. "
                "So their daemons refuse each other, and this node can't join the job.",
                "make certificates of one user for all nodes with examples/deploy/certificates.sh",
            )


def _ownership(facts: AgentFacts) -> str:
    return facts.certificates if facts.certificates == PLAIN else f"certificates of {facts.certificates}"


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
            "failed": state.failed,
            "deadline": _moment_text(state.deadline),
            "launch": state.launch,
            "token": state.token,
            "number": state.number,
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
        document = parse(data, STATE_MAX, DEPTH_MAX)
        if document["format"] != FORMAT:
            raise RendezvousStateError(
                f"the rendezvous state has format {document['format']!r:.20}, but this reft reads {FORMAT}: "
                "use the same version of reft on all nodes."
            )
        return _state(document)
    except (ArithmeticError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RendezvousStateError(
            f"the store holds no rendezvous state of reft ({type(error).__name__}: {str(error)[:TEXT_MAX]}): "
            "do all agents use --rdzv-backend=reft?"
        ) from error


def _state(document: dict[str, Any]) -> SharedState:
    state = SharedState()
    state.round, state.number = _number(document["round"]), _number(document["number"])
    state.complete, state.closed = bool(document["complete"]), bool(document["closed"])
    state.deadline = _moment(document["deadline"])
    state.failed = _text(document.get("failed", ""))  # agents of earlier versions do not write it
    state.launch, state.token = _text(document["launch"]), _text(document["token"])
    if state.token and len(bytes.fromhex(state.token)) != TOKEN_BYTES:
        raise ValueError(f"a token has {TOKEN_BYTES} bytes")
    nodes = []
    for entry in _some(document["nodes"]):
        address, pid, local_id = entry["agent"]
        node = NodeDesc(_text(address), _number(pid), _number(local_id))
        nodes.append(node)
        last_heartbeat = _moment(entry["beat"])
        if last_heartbeat is not None:
            state.last_heartbeats[node] = last_heartbeat
        state.facts[node] = _facts(entry["facts"])
    state.participants = {nodes[_number(i)]: _number(rank) for i, rank in _some(document["participants"])}
    state.wait_list = {nodes[_number(i)] for i in _some(document["waiting"])}
    state.redundancy_list = {nodes[_number(i)] for i in _some(document["redundant"])}
    state.places = [
        PreviousRank(_number(rank), Participant(_text(agent), _text(home)))
        for rank, agent, home in _some(document["places"])
    ]
    return state


def _facts(entry: dict[str, Any]) -> AgentFacts:
    addresses = tuple(map(_text, entry["addresses"]))
    if len(addresses) > ADDRESSES_MAX:
        raise ValueError(f"{len(addresses)} addresses of one node; {ADDRESSES_MAX} are allowed")
    process, home, name, domain = (_text(entry[each]) for each in ("process", "home", "name", "domain"))
    certificates = _text(entry.get("certificates", ""))  # agents of earlier versions do not write it
    return AgentFacts(process, home, name, domain, addresses, certificates)


def _some(values: list[Any]) -> list[Any]:
    if not isinstance(values, list) or len(values) > NODES_MAX:
        raise ValueError(f"a list of at most {NODES_MAX} entries is expected")
    return values


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise ValueError(f"a number from 0 to {NUMBER_MAX} is expected")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > TEXT_MAX or not value.isprintable():  # people see names
        raise ValueError(f"a text of at most {TEXT_MAX} printable characters is expected")
    return value


def _entry(state: SharedState, node: NodeDesc) -> dict[str, Any]:
    facts = state.facts.get(node, AgentFacts())
    return {
        "agent": [node.addr, node.pid, node.local_id],
        "beat": _moment_text(state.last_heartbeats.get(node)),
        "facts": {**vars(facts), "addresses": list(facts.addresses)},
    }


def _moment_text(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None


def _moment(text: object) -> datetime | None:
    return datetime.fromisoformat(_text(text)) if text is not None else None
