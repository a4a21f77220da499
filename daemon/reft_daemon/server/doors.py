"""Who may call what: one row for each method at each door.

    LOCAL    the unix socket, in a folder that only the daemon's user can enter: all methods
    REMOTE   TCP: the methods that other daemons and agents need, each with a proof

What stands in no row is not served. `judge.py` obeys these rows; `SECURITY.md` shows them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from reft.wire import rpc
from reft.wire.messages import LANES_MAX, NODE_REPORTS_MAX, TOKENS_MAX
from reft_daemon.server.callers import Door

KIB: Final = 1 << 10
MIB: Final = 1 << 20
# The repeated fields that the daemon loops over; one entry each takes time and memory.
NODES_MAX: Final = 1 << 14  # of a job
RANKS_MAX: Final = 1 << 20  # of a job
SLOTS_MAX: Final = 1 << 16  # of a node, or capsules in one message
PIDS_MAX: Final = 4096  # of trainers, or numbers of CPUs, of a node
STEPS_MAX: Final = 1024  # that are not decided yet; a rank has at most 32
MANIFESTS_MAX: Final = 1024
CELLS_MAX: Final = 1 << 20


class Proof(enum.Enum):
    """What a call must prove. The value is for people."""

    SOCKET = "it came in by the unix socket"
    NONE = "nothing; the request is not read"
    JOB = "the job's token"
    EPOCH = "the job's token of the present epoch"  # beside which older ones count for a time
    LAUNCH = "the token of the job's agents"
    # of a job that this daemon does not hold: the token that an agent of this node registered
    REBUILD = "the job's token, or the token of the job's agents if the job is not held"


@dataclass(frozen=True)
class MethodRow:
    """One method at one door.

    Attributes:
        method: full name, as gRPC spells it.
        door: where the method is served.
        proof: what a call must prove before the request is read.
        request_max: bytes of the largest request.
        read_s: seconds in which the request must have arrived, to its end.
        calls_max: calls under way at the same time.
        unset: fields that only calls at the unix socket may set.
        speaker: field with the id of the node in whose name the call speaks; empty: none.
        from_agents: whether agents make this call, with their own certificates. All other calls
            over TCP come from daemons.
        lists: path of a repeated field → the most entries.
    """

    method: str
    door: Door
    proof: Proof
    request_max: int
    read_s: float
    calls_max: int
    unset: tuple[str, ...] = ()
    speaker: str = ""
    from_agents: bool = False
    lists: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


_LISTS: Final[dict[str, dict[str, int]]] = {
    "reft.v1.Daemon/Inventory": {"pids": PIDS_MAX, "known": MANIFESTS_MAX},
    "reft.v1.Daemon/Decide": {"manifest.nodes": NODES_MAX, "dropped": SLOTS_MAX, "trainers": PIDS_MAX},
    "reft.v1.Daemon/Lease": {"cpus": PIDS_MAX},
    "reft.v1.Daemon/Survey": {"nodes": NODES_MAX, "tokens": TOKENS_MAX},
    "reft.v1.Daemon/Read": {"tokens": TOKENS_MAX},
    "reft.v1.Daemon/FetchCapsule": {"tokens": TOKENS_MAX},
    "reft.v1.Daemon/OpenStored": {"ranks": SLOTS_MAX},
    "reft.v1.Daemon/Rebuild": {
        "manifest.nodes": NODES_MAX, "nodes": NODES_MAX, "slots": RANKS_MAX, "lost": SLOTS_MAX, "parity": RANKS_MAX,
    },
    "reft.v1.Daemon/AgentBeat": {"nodes": NODES_MAX},
    "reft.v1.Peer/GoBack": {"manifest.nodes": NODES_MAX},
    "reft.v1.Peer/Keep": {"capsules": SLOTS_MAX, "outcome.open": STEPS_MAX, "outcome.mismatched": CELLS_MAX},
    "reft.v1.Peer/Gather": {
        "steps.sealed": STEPS_MAX, "steps.pending": STEPS_MAX, "mismatched": CELLS_MAX, "guard.lanes": LANES_MAX,
    },
    "reft.v1.Peer/Announce": {"open": STEPS_MAX, "mismatched": CELLS_MAX},
    "reft.v1.Peer/Beat": {"reports": NODE_REPORTS_MAX, "last_heard": NODES_MAX},
}  # fmt: skip


def _row(
    name: str, door: Door, proof: Proof, request_max: int, calls_max: int, unset: tuple[str, ...] = (),
    speaker: str = "", from_agents: bool = False,
) -> MethodRow:  # fmt: skip
    method = name if name.startswith("grpc.") else f"reft.v1.{name}"
    read_s = 10.0 if request_max <= MIB else 60.0
    lists = MappingProxyType(_LISTS.get(method, {}))
    return MethodRow(method, door, proof, request_max, read_s, calls_max, unset, speaker, from_agents, lists)


def _local(name: str, request_max: int, calls_max: int = 256) -> MethodRow:
    return _row(name, Door.LOCAL, Proof.SOCKET, request_max, calls_max)


def _remote(
    name: str, proof: Proof, request_max: int, calls_max: int = 256, unset: tuple[str, ...] = (),
    speaker: str = "", from_agents: bool = False,
) -> MethodRow:  # fmt: skip
    return _row(name, Door.REMOTE, proof, request_max, calls_max, unset, speaker, from_agents)


ROWS: Final = (
    _local("Daemon/Hello", 4 * KIB),
    _local("Daemon/Inventory", 64 * KIB),
    _local("Daemon/Pin", 4 * KIB),
    _local("Daemon/Decide", rpc.MESSAGE_MAX, 64),
    _local("Daemon/StoreDecision", 64 * KIB),
    _local("Daemon/Secure", 4 * KIB),
    _local("Daemon/Lease", 64 * KIB),
    _local("Daemon/Release", 4 * KIB),
    _local("Daemon/Read", 1 * MIB, 1024),
    _local("Daemon/Survey", 16 * MIB, 64),
    _local("Daemon/FetchCapsule", 1 * MIB),
    _local("Daemon/Rebuild", rpc.MESSAGE_MAX, 16),
    _local("Daemon/Status", 4 * KIB),
    _local("Daemon/Stored", 4 * KIB),
    _local("Daemon/OpenStored", 1 * MIB),
    _local("Daemon/Purge", 4 * KIB),
    _local("Daemon/PersistJob", 4 * KIB),
    _local("Daemon/Hold", 4 * KIB),
    _local("Daemon/AgentBeat", 16 * MIB, 1024),
    _local("Daemon/Signals", 4 * KIB, 1024),
    # Daemons of one node that do not listen reach each other by their unix sockets.
    _local("Peer/Keep", 20 * MIB),
    _local("Peer/OpenBulk", 4 * KIB),
    _local("Peer/Persist", 4 * KIB),
    _local("Peer/GoBack", rpc.MESSAGE_MAX, 16),
    _local("Peer/Gather", 20 * MIB, 1024),
    _local("Peer/Announce", 4 * MIB, 1024),
    _local("Peer/Beat", 1 * MIB, 1024),
    _local("grpc.health.v1.Health/Check", 1 * KIB),
    _remote("Daemon/Hello", Proof.NONE, 0, 64),
    _remote("Daemon/Inventory", Proof.JOB, 64 * KIB, unset=("pids",)),
    _remote("Daemon/Read", Proof.JOB, 4 * KIB, 1024, unset=("node", "tokens")),
    _remote("Daemon/FetchCapsule", Proof.JOB, 4 * KIB, unset=("node", "tokens")),
    _remote("Daemon/Rebuild", Proof.REBUILD, rpc.MESSAGE_MAX, 16, unset=("onto",)),
    _remote("Daemon/Status", Proof.JOB, 4 * KIB, unset=("deep",)),
    _remote("Daemon/PersistJob", Proof.JOB, 4 * KIB),
    _remote("Daemon/Hold", Proof.JOB, 4 * KIB),
    _remote(
        "Daemon/AgentBeat",
        Proof.LAUNCH,
        4 * KIB,
        1024,
        unset=("nodes", "token", "job_token"),
        speaker="node_id",
        from_agents=True,
    ),
    _remote("Peer/Keep", Proof.JOB, 20 * MIB),
    _remote("Peer/OpenBulk", Proof.JOB, 4 * KIB),
    _remote("Peer/Persist", Proof.JOB, 4 * KIB),
    _remote("Peer/GoBack", Proof.EPOCH, rpc.MESSAGE_MAX, 16, unset=("node", "dropped", "trainers")),
    _remote("Peer/Gather", Proof.JOB, 20 * MIB, 1024),
    _remote("Peer/Announce", Proof.JOB, 4 * MIB, 1024),
    _remote("Peer/Beat", Proof.LAUNCH, 1 * MIB, 1024, speaker="source"),
    _remote("grpc.health.v1.Health/Check", Proof.NONE, 0, 64),
)
