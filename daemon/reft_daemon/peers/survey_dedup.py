"""Removes repeated manifests from a survey: thousands of nodes send the same ones in one message.

    asker ──digests of its manifests──► each node ──reply without these──► asker: drops repeats

So until the last node has answered, the asker holds only slot headers, not a manifest of megabytes
from each node.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import xxhash

from reft.wire.v1 import daemon_pb2 as pb

ManifestField = Literal["manifest", "base_manifest", "guard_manifest"]


def known_manifests(record: pb.JobRecord) -> dict[bytes, pb.Manifest]:
    """Returns the manifests of the asker's record of the job, by their epochs.

    A manifest belongs to an epoch: that of its holder's decision, or that of the decision's base or
    guard.
    """
    known: dict[bytes, pb.Manifest] = {}
    for key, _, manifest in _manifests(record.decision, record):
        known.setdefault(key, manifest)
    return known


def clear_repeats(known: dict[bytes, pb.Manifest], reply: pb.InventoryReply) -> None:
    """Clears the known manifests of a reply; the others become known.

    A reader of all replies finds each manifest in one of them (`reft.wire.inventory`).

    Args:
        known: the manifests of the asker's record, and of the replies before.
        reply: the next reply.
    """
    for key, name, manifest in _manifests(reply.decision, reply):
        if key not in known:
            known[key] = manifest
        elif known[key] == manifest:
            reply.ClearField(name)


def digests_of(record: pb.JobRecord) -> list[int]:
    """Returns digests of the manifests in a job's record.

    Each comes with the epoch of its manifest.
    """
    return [_digest(key, manifest) for key, _, manifest in _manifests(record.decision, record)]


def known_fields(record: pb.JobRecord, known: Collection[int]) -> set[str]:
    """Returns the manifests of a record that the asker has: names of their fields.

    Args:
        record: this daemon's record of the job.
        known: the asker's `digests_of`.
    """
    if not known:
        return set()
    return {name for key, name, manifest in _manifests(record.decision, record) if _digest(key, manifest) in known}


def _digest(key: bytes, manifest: pb.Manifest) -> int:
    return xxhash.xxh3_64_intdigest(key + manifest.SerializeToString(deterministic=True))


def _manifests(
    decision: pb.Decision, holder: pb.JobRecord | pb.InventoryReply
) -> list[tuple[bytes, ManifestField, pb.Manifest]]:
    """Returns (epoch, field, manifest) of each manifest that is present."""
    fields: tuple[tuple[ManifestField, pb.Epoch], ...] = (
        ("manifest", decision.epoch),
        ("base_manifest", decision.base.epoch),
        ("guard_manifest", decision.guard.epoch),
    )
    return [
        (epoch.SerializeToString(deterministic=True), name, getattr(holder, name))
        for name, epoch in fields
        if holder.HasField(name)
    ]
