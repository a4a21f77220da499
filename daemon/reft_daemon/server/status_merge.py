"""Joins what the daemons of a job say of it into one status. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from reft.core.recovery.inventory import unique_names
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import WEAKEST_FIRST


def node_names(manifest: pb.Manifest) -> dict[str, str]:
    """Returns node id → name for people, unique in the job."""
    return unique_names({node.id: node.name for node in manifest.nodes})


def merge_signals(gravest: dict[str, pb.NodeSignal], theirs: Iterable[pb.NodeSignal]) -> None:
    """Adds the signals that another daemon of the job sees.

    Not every daemon watches every node.

    Args:
        gravest: node id → the gravest signal so far.
        theirs: the signals of the other daemon.
    """
    for each in theirs:
        if each.node_id not in gravest or each.signal > gravest[each.node_id].signal:
            gravest[each.node_id] = each


def name_ranks(status: pb.JobStatus, node: str) -> None:
    """Gives the ranks of one daemon the unique name of their node.

    Args:
        status: as that daemon reports it.
        node: the unique name; empty: not known.
    """
    for rank in status.ranks:
        rank.node = node or rank.node


def merge_status(ours: pb.JobStatus, theirs: pb.JobStatus) -> None:
    """Adds the status of another daemon of the job, all but its signals."""
    ours.ranks.extend(theirs.ranks)
    ours.whole = max(ours.whole, theirs.whole)
    # Nobody who asks on one node should have to ask on all others: the weakest memory counts.
    ours.backing = next((each for each in WEAKEST_FIRST if each in (ours.backing, theirs.backing)), ours.backing)
    ours.held_bytes += theirs.held_bytes
    ours.peak_bytes += theirs.peak_bytes
    merge_end(ours, theirs)
    if theirs.HasField("storage"):  # from the coordinator
        ours.storage.CopyFrom(theirs.storage)


def merge_end(ours: pb.JobStatus, theirs: pb.JobStatus) -> None:
    """Takes over the end of the last trainer on another daemon, if that was later."""
    if theirs.HasField("ended_s") and (not ours.HasField("ended_s") or theirs.ended_s < ours.ended_s):
        ours.ended_s = theirs.ended_s
