"""What a survey leaves out: thousands of nodes have the same manifests, and one message carries them all.

    asker ──digests of its own manifests──► each node ──reply without these──► asker: without those of earlier replies

So what the asker holds until the last node has answered is the headers of their slots, not a manifest of megabytes from each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import xxhash

from reft.wire.v1 import daemon_pb2 as pb


def without_repeats(own: pb.JobRecord, surveyed: Sequence[pb.SurveyedNode]) -> list[pb.SurveyedNode]:
    """The replies without the manifests that the asker's own inventory has, or an earlier reply.

    A manifest belongs to an epoch: that of its reply's decision, or of the decision's base. A reader of the replies
    finds it in one of them (`reft.wire.inventory`).

    Args:
        own: the asker's record of the job.
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
    """Of the manifests that a job's record has, each with the epoch that it belongs to."""
    return [_digest(key, manifest) for key, _, manifest in _manifests(record.decision, record)]


def leave_out(reply: pb.InventoryReply, known: Collection[int]) -> None:
    """Takes out of a reply what the asker has by its `digests_of`."""
    if known:
        for key, name, manifest in _manifests(reply.decision, reply):
            if _digest(key, manifest) in known:
                reply.ClearField(name)


def _digest(key: bytes, manifest: pb.Manifest) -> int:
    return xxhash.xxh3_64_intdigest(key + manifest.SerializeToString(deterministic=True))


def _manifests(
    decision: pb.Decision, holder: pb.JobRecord | pb.InventoryReply
) -> list[tuple[bytes, Literal["manifest", "base_manifest"], pb.Manifest]]:
    """(epoch, field, manifest) of those that are there."""
    found: list[tuple[bytes, Literal["manifest", "base_manifest"], pb.Manifest]] = []
    if holder.HasField("manifest"):
        found.append((decision.epoch.SerializeToString(deterministic=True), "manifest", holder.manifest))
    if holder.HasField("base_manifest"):
        epoch = decision.base.epoch.SerializeToString(deterministic=True)
        found.append((epoch, "base_manifest", holder.base_manifest))
    return found
