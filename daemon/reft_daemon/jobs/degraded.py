"""How long a job was less protected than was asked for, after a restore that followed a loss."""

from __future__ import annotations

import time
from dataclasses import dataclass

from reft.wire.v1 import daemon_pb2 as pb


@dataclass
class DegradedTime:
    """From the decision of an attach that found a node gone until the first whole version of its epoch.

    Attributes:
        lasted_s: how long it was so in this epoch; 0 if it was not, or is so still.
    """

    lasted_s: float = 0.0
    _since_s: float | None = None

    @property
    def is_so(self) -> bool:
        return self._since_s is not None

    @property
    def seconds(self) -> float:
        """How long it is or was so."""
        return self.lasted_s if self._since_s is None else time.monotonic() - self._since_s

    def decided(self, record: pb.JobRecord) -> None:
        """A new epoch began, or this daemon was restarted within it and has forgotten since when."""
        self.lasted_s, self._since_s = 0.0, None
        before = {node.id for node in record.base_manifest.nodes} if record.decision.HasField("base") else set()
        if before - {node.id for node in record.manifest.nodes}:
            self._since_s = time.monotonic()

    def heard(self, whole: int) -> None:
        """The newest whole step of the epoch is known, -1 if there is none."""
        if self._since_s is not None and whole >= 0:
            self.lasted_s, self._since_s = self.seconds, None
