"""Descriptions of pipeline schedules, for loops that are not torch.distributed.pipelining's own.

They say which stage of how many this process runs and how many microbatches a step has. This version accepts them and
copies beside compute; it does not yet place copies by them (attach says so).
"""

from __future__ import annotations

from dataclasses import dataclass

from reft.errors import ConfigError


@dataclass(frozen=True)
class _Pipeline:
    stage: int
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.stages or self.microbatches < 1:
            raise ConfigError(
                f"stage {self.stage} of {self.stages} with {self.microbatches} microbatches is no pipeline."
            )


class OneFOneB(_Pipeline):
    """One forward, one backward."""


class GPipe(_Pipeline):
    """All forwards, then all backwards."""


@dataclass(frozen=True)
class Interleaved(_Pipeline):
    """1F1B with `virtual_stages` model chunks a process."""

    virtual_stages: int = 2


@dataclass(frozen=True)
class Custom:
    """A loop that marks its idle times itself, with `session.idle()`."""
