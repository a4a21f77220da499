"""Removes repeated manifests from a survey: thousands of nodes send the same ones in one message.

    asker ──digests of its manifests──► each node ──reply without these──► asker: drops repeats

So until the last node has answered, the asker holds only slot headers, not a manifest of megabytes
from each node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import xxhash

from reft.wire.v1 import daemon_pb2 as pb

ManifestField = Literal["manifest", "base_manifest", "guard_manifest"]


def without_repeats(own: pb.JobRecord, surveyed: Sequence[pb.SurveyedNode]) -> list[pb.SurveyedNode]:
    """Returns the replies without manifests that the asker's record or an earlier reply contains.

    A manifest belongs to an epoch: that of its reply's decision, or that of the decision's base
    or guard. A reader of the replies finds each manifest in one of them (`reft.wire.inventory`).

    Args:
        own: the asker's record of the job.
        surveyed: the replies; their repeated manifests are cleared.
    """
    known: dict[bytes, pb.Manifest] = {}
    for key, _, manifest in _manifests(own.decision, own):
        known.setdefault(key, manifest)
    for each in surveyed:
        for key, name, manifest in _manifests(each.reply.decision, each.reply):
            if key not in known:
                known[key] = manifest
            elif known[key] == manifest:
                each.reply.ClearField(name)
    return list(surveyed)


def digests_of(record: pb.JobRecord) -> list[int]:
    """Returns digests of the manifests in a job's record.

    Each comes with the epoch of its manifest.
    """
    return [_digest(key, manifest) for key, _, manifest in _manifests(record.decision, record)]


def clear_known_manifests(reply: pb.InventoryReply, known: Collection[int]) -> None:
    """Clears the manifests of a reply that the asker has, according to the asker's `digests_of`."""
    if known:
        for key, name, manifest in _manifests(reply.decision, reply):
            if _digest(key, manifest) in known:
                reply.ClearField(name)


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
