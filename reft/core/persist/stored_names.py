"""Names of what lies on storage: lineages, decisions, and checkpoints with their files.

    ROOT/JOB/LINEAGE/DECISION-<counter>-<ident>
                     e<counter>-<ident8>-s<step>/MANIFEST.json
                                                 node-<i>.<attempt>/index.json
                                                                    rank-<r>.slot

A lineage is one job from its first attach on, through all its restarts. A *checkpoint* is one
version on storage, complete once it has its manifest. Names are made and read here only. A name
that another program wrote is not read, so it is neither restored nor removed.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from reft.core.commit.version import Epoch, Version

MANIFEST: Final = "MANIFEST.json"
INDEX: Final = "index.json"
ENDED: Final = "ENDED"  # in a lineage that a purge has ended
LINEAGE_BYTES: Final = 8
_LINEAGE: Final = re.compile(r"[0-9a-f]{16}")
_DECISION: Final = re.compile(r"DECISION-([0-9]{1,10})-([0-9a-f]{32})")
_CHECKPOINT: Final = re.compile(r"e([0-9]{1,10})-([0-9a-f]{8})-s([0-9]{1,19})")
_NODE: Final = re.compile(r"node-([0-9]{1,6})\.([0-9]{1,19})")
_RANK: Final = re.compile(r"rank-([0-9]{1,7})\.slot")


class CheckpointName(NamedTuple):
    """What the name of a checkpoint's folder says of its version.

    Attributes:
        counter: of the version's epoch.
        ident: the first four bytes of the epoch's id.
        step: the version's step.
    """

    counter: int
    ident: bytes
    step: int

    @classmethod
    def of(cls, version: Version) -> CheckpointName:
        """Returns the name of a version's checkpoint."""
        return cls(version.epoch.counter, version.epoch.ident[:4], version.step)

    def __str__(self) -> str:
        return f"e{self.counter}-{self.ident.hex()}-s{self.step}"


def checkpoint_name(text: str) -> CheckpointName | None:
    """Reads the name of a folder; None if it is no checkpoint's."""
    match = _CHECKPOINT.fullmatch(text)
    return CheckpointName(int(match[1]), bytes.fromhex(match[2]), int(match[3])) if match else None


def is_lineage(text: str) -> bool:
    """Whether this is the name of a lineage's folder."""
    return _LINEAGE.fullmatch(text) is not None


def decision_file(epoch: Epoch) -> str:
    """Returns the name of the file with the decision of an epoch."""
    return f"DECISION-{epoch.counter}-{epoch.ident.hex()}"


def decided_epoch(text: str) -> Epoch | None:
    """Reads the name of a decision's file; None if it is none."""
    match = _DECISION.fullmatch(text)
    return Epoch(int(match[1]), bytes.fromhex(match[2])) if match else None


def node_folder(node: int, attempt: int) -> str:
    """Returns the folder that a node writes in one attempt.

    Args:
        node: index of the node in the manifest.
        attempt: number of the coordinator's attempt; grows in an epoch.
    """
    return f"node-{node}.{attempt}"


def node_attempt(text: str) -> tuple[int, int] | None:
    """Reads the name of a node's folder: node and attempt; None if it is none."""
    match = _NODE.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def rank_file(rank: int) -> str:
    """Returns the name of the file with a rank's slot."""
    return f"rank-{rank}.slot"


def rank_of(text: str) -> int | None:
    """Reads the name of a rank's file; None if it is none."""
    match = _RANK.fullmatch(text)
    return int(match[1]) if match else None
