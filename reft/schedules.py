"""Descriptions of pipeline schedules, for loops that do not use torch.distributed.pipelining.

A description names the stage of this process, the number of stages, and the number of microbatches
in a step. From these follow the stage's actions in a step, in order, and the gaps between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from reft.core.pipeline import actions, bubbles
from reft.core.pipeline.actions import Action, Times
from reft.core.pipeline.bubbles import Gap
from reft.errors import ConfigError

__all__ = ["Action", "Custom", "GPipe", "Gap", "Interleaved", "OneFOneB", "Times", "ZeroBubbleH1", "ZeroBubbleV"]


@dataclass(frozen=True)
class _Pipeline(ABC):
    """A schedule whose order of actions is known.

    Attributes:
        stage: this process's index in the pipeline, from 0.
        stages: number of processes in the pipeline.
        microbatches: number of microbatches in one step.
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
        """Returns the actions of this stage in one step, in order."""
        return self._order(self.stage)

    def gaps(self, times: Times) -> tuple[Gap, ...]:
        """Returns the gaps of this stage in one step.

        All stages are assumed to take the same times, and links to take no time.

        Args:
            times: duration of one action; with virtual stages, of one part of a stage.
        """
        closed = self._closed(times)
        if closed is not None:
            return closed
        spans = actions.simulate([self._order(stage) for stage in range(self.stages)], times, self.is_v_shaped)
        return bubbles.between(spans[self.stage], max(each[-1].end for each in spans))

    @abstractmethod
    def _order(self, stage: int) -> tuple[Action, ...]:
        """Returns the actions of a stage in one step, in order."""

    @abstractmethod
    def _closed(self, times: Times) -> tuple[Gap, ...] | None:
        """Returns the gaps by closed form; None if there is no closed form."""


class OneFOneB(_Pipeline):
    """The 1F1B schedule: one forward, one backward."""

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.one_f_one_b(stage, self.stages, self.microbatches)

    def _closed(self, times: Times) -> tuple[Gap, ...]:
        return bubbles.one_f_one_b(self.stage, self.stages, self.microbatches, times)


class GPipe(_Pipeline):
    """The GPipe schedule: all forwards, then all backwards."""

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.gpipe(stage, self.stages, self.microbatches)

    def _closed(self, times: Times) -> tuple[Gap, ...]:
        return bubbles.gpipe(self.stage, self.stages, self.microbatches, times)


@dataclass(frozen=True)
class Interleaved(_Pipeline):
    """1F1B with `virtual_stages` parts of the model in each process."""

    virtual_stages: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.virtual_stages < 2:
            raise ConfigError(f"virtual_stages is {self.virtual_stages}; interleaved means 2 or more.", "OneFOneB")
        self.order()

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.interleaved(stage, self.stages, self.microbatches, self.virtual_stages)

    def _closed(self, times: Times) -> tuple[Gap, ...] | None:
        return bubbles.interleaved(self.stage, self.stages, self.microbatches, self.virtual_stages, times)


class ZeroBubbleH1(_Pipeline):
    """1F1B with a split backward pass: gradients of weights are computed in the gaps (ZB-H1)."""

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.zb_h1(stage, self.stages, self.microbatches)

    def _closed(self, times: Times) -> tuple[Gap, ...] | None:
        return bubbles.zb_h1(self.stage, self.stages, self.microbatches, times)


class ZeroBubbleV(_Pipeline):
    """Zero bubble with two parts of the model in each process (ZBV).

    The first parts follow the order of the processes, the second parts the reverse order.
    """

    is_v_shaped = True

    def _order(self, stage: int) -> tuple[Action, ...]:
        return actions.zbv(stage, self.stages, self.microbatches)

    def _closed(self, times: Times) -> tuple[Gap, ...] | None:
        return bubbles.zbv(self.stage, self.stages, self.microbatches, times)


@dataclass(frozen=True)
class Custom:
    """A loop that marks its gaps with `session.idle()`, or lists them here.

    On the CPU, waits for collectives count as gaps without a mark: those of FSDP2, of DDP's
    buckets, and of the loop itself.

    Attributes:
        intervals: (start, length) of each gap, in seconds from the start of a step, in order.
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
        """Returns the listed gaps; the place of a gap is its index in the list."""
        return tuple(Gap(index, None, start, length) for index, (start, length) in enumerate(self.intervals))
