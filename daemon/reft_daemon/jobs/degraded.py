"""Measures how long a job was less protected than requested, after a loss of nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from reft.wire.v1 import daemon_pb2 as pb


@dataclass
class DegradedTime:
    """The degraded time of an epoch.

    It begins with an attach that found a node gone, and ends with the first whole version of the
    epoch.

    Attributes:
        lasted_s: length of that time in this epoch; 0 if there was none, or if it still lasts.
    """

    lasted_s: float = 0.0
    _since_s: float | None = None

    @property
    def is_degraded(self) -> bool:
        return self._since_s is not None

    @property
    def seconds(self) -> float:
        """Seconds of degraded time so far in this epoch."""
        return self.lasted_s if self._since_s is None else time.monotonic() - self._since_s

    def start_epoch(self, record: pb.JobRecord) -> None:
        """Starts a new epoch.

        Also called after a restart of the daemon, which forgets the earlier start time.
        """
        self.lasted_s, self._since_s = 0.0, None
        base_nodes = {node.id for node in record.base_manifest.nodes} if record.decision.HasField("base") else set()
        if base_nodes - {node.id for node in record.manifest.nodes}:
            self._since_s = time.monotonic()

    def note_whole(self, whole: int) -> None:
        """Ends the degraded time once a step of the epoch is whole. Before that, `whole` is -1."""
        if self._since_s is not None and whole >= 0:
            self.lasted_s, self._since_s = self.seconds, None
