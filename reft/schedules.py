"""Descriptions of pipeline schedules, for loops that are not torch.distributed.pipelining's own.

They say which stage of how many this process runs and how many microbatches a step has. From that follows what the stage
does in a step, in order, and where it is idle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from reft.core.pipeline import actions, bubbles
from reft.core.pipeline.actions import Action, ActionTimes
from reft.core.pipeline.bubbles import Gap
from reft.errors import ConfigError

__all__ = ["Action", "ActionTimes", "Custom", "GPipe", "Gap", "Interleaved", "OneFOneB", "ZeroBubbleH1", "ZeroBubbleV"]


@dataclass(frozen=True)
class _Pipeline(ABC):
    """
    Attributes:
        stage: this process's place in the pipeline, from 0.
        stages: how many processes the pipeline has.
        microbatches: of one step.
    """

    is_v_shaped: ClassVar[bool] = False

    stage: int
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.stages or self.microbatches < 1:
            raise ConfigError(
                f"stage {self.stage} of {self.stages} with {self.microbatches} microbatches is no pipeline."
            )

    def order(self) -> tuple[Action, ...]:
        """What this stage does in one step."""
        return self._order(self.stage)

    def gaps(self, times: ActionTimes) -> tuple[Gap, ...]:
        """Where this stage is idle in a step, if all stages take these times and links take none.

        Args:
            times: of one action; with virtual stages, of one part of a stage.
        """
        closed = self._closed(times)
        if closed is not None:
            return closed
        spans = actions.simulate([self._order(stage) for stage in range(self.stages)], times, self.is_v_shaped)
        return bubbles.between(spans[self.stage], max(each[-1].end for each in spans))

    @abstractmethod
    def _order(self, stage: int) -> tuple[Action, ...]:
        """What a stage does in one step."""

    @abstractmethod
    def _closed(self, times: ActionTimes) -> tuple[Gap, ...] | None:
        """The gaps by closed form; None if there is none."""


class OneFOneB(_Pipeline):
    """One forward, one backward."""

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.one_f_one_b(stage, self.stages, self.microbatches)

    def _closed(self, times: ActionTimes) -> tuple[Gap, ...]:
        return bubbles.one_f_one_b(self.stage, self.stages, self.microbatches, times)


class GPipe(_Pipeline):
    """All forwards, then all backwards."""

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.gpipe(stage, self.stages, self.microbatches)

    def _closed(self, times: ActionTimes) -> tuple[Gap, ...]:
        return bubbles.gpipe(self.stage, self.stages, self.microbatches, times)


@dataclass(frozen=True)
class Interleaved(_Pipeline):
    """1F1B with `virtual_stages` parts of the model a process."""

    virtual_stages: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.virtual_stages < 2:
            raise ConfigError(f"virtual_stages is {self.virtual_stages}; interleaved means 2 or more.", "OneFOneB")
        self.order()

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.interleaved(stage, self.stages, self.microbatches, self.virtual_stages)

    def _closed(self, times: ActionTimes) -> tuple[Gap, ...] | None:
        return bubbles.interleaved(self.stage, self.stages, self.microbatches, self.virtual_stages, times)


class ZeroBubbleH1(_Pipeline):
    """1F1B with the backward cut in two: gradients of weights fill what would be idle."""

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.zb_h1(stage, self.stages, self.microbatches)

    def _closed(self, times: ActionTimes) -> tuple[Gap, ...] | None:
        return bubbles.zb_h1(self.stage, self.stages, self.microbatches, times)


class ZeroBubbleV(_Pipeline):
    """Zero bubble with two parts of the model a process, the second on the way back (ZBV)."""

    is_v_shaped = True

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.zbv(stage, self.stages, self.microbatches)

    def _closed(self, times: ActionTimes) -> tuple[Gap, ...] | None:
        return bubbles.zbv(self.stage, self.stages, self.microbatches, times)


@dataclass(frozen=True)
class Custom:
    """A loop whose idle times no other description knows: it marks them itself, with `session.idle()`, or lists them.

    On the CPU waits for collectives (FSDP2's, DDP's buckets, those of the loop itself) count as idle times, unmarked.

    Attributes:
        intervals: (start, length) of each idle time, in seconds from the start of a step, in order.
    """

    intervals: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        end = 0.0
        for start, length in self.intervals:
            if start < end or length <= 0:
                raise ConfigError(
                    f"the idle time of {length} s at {start} s is empty or begins before {end} s.",
                    "list idle times in order, without overlap",
                )
            end = start + length

    def gaps(self) -> tuple[Gap, ...]:
        """The listed idle times; their place is that in the list."""
        return tuple(Gap(index, None, start, length) for index, (start, length) in enumerate(self.intervals))
