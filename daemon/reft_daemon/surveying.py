"""What a survey leaves out: thousands of nodes have the same manifests, and one message carries them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from reft.wire.v1 import daemon_pb2 as pb


def without_repeats(own: pb.JobRecord, surveyed: Sequence[pb.Surveyed]) -> list[pb.Surveyed]:
    """The replies without the manifests that the asker's own inventory has, or an earlier reply.

    A manifest belongs to an epoch: that of its reply's decision, or of the decision's base. Whoever reads the replies
    finds it in one of them (`reft.wire.findings`).

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
