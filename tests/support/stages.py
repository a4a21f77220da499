"""Scripted stages for torch's pipeline schedules: a fake clock gives their times.

The schedule's loop is torch's. Receives and computation are simulated. Before each action the clock
moves by the stage's idle time, as reft.core.pipeline.actions simulates it. In the action the clock
moves by the length of the action.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining import stage as torch_stage

from reft.core.pipeline.actions import Action, ActionKind, ActionSpan


class Clock:
    """A clock that moves only when `now` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedStage(torch_stage._PipelineStageBase):
    """One stage of a pipeline whose other stages do not exist.

    Args:
        index: the number of this stage.
        stages: the number of all stages.
        spans: the actions of this process's stages in a step, with their times from the step's
            start.
        clock: the clock that this stage moves.
        doing: called in each action. The attribute `waiting` is called in each idle time.
    """

    def __init__(
        self,
        index: int,
        stages: int,
        spans: list[ActionSpan],
        clock: Clock,
        doing: Callable[[Action], None],
        part: int = 0,
    ) -> None:
        self.stage_index, self.num_stages, self.submod = index, stages, nn.Linear(1, 1)
        self.is_last_stage = index == stages - 1
        self.group_size, self.group_rank, self.group = stages, index, None
        self.stage_index_to_group_rank = {i: i for i in range(stages)}
        self.has_backward, self.output_chunks, self.device = True, [], torch.device("cpu")
        self.spans, self.clock, self.doing, self.part = spans, clock, doing, part
        self.waiting: Callable[[], None] = lambda: None
        self.began = 0.0

    def clear_runtime_states(self) -> None:
        self.began = self.clock.now

    def _play(self, kind: ActionKind, microbatch: int) -> None:
        action = Action(kind, microbatch, self.part)
        span = next(span for span in self.spans if span.action == action)
        self.doing(action)
        assert self.clock.now == self.began + span.start, f"{action} did not begin at the scripted time"
        self.clock.now = self.began + span.end

    def wait(self, kind: ActionKind, microbatch: int) -> None:
        span = next(span for span in self.spans if span.action == Action(kind, microbatch, self.part))
        if self.clock.now < self.began + span.start:
            self.waiting()
            self.clock.now = self.began + span.start

    def get_fwd_recv_ops(self, microbatch: int) -> list:
        self.wait(ActionKind.FORWARD, microbatch)
        return []

    def get_bwd_recv_ops(self, microbatch: int) -> list:
        self.wait(ActionKind.BACKWARD, microbatch)
        return []

    def get_fwd_send_ops(self, microbatch: int) -> list:
        return []

    get_bwd_send_ops = get_fwd_send_ops

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self._play(ActionKind.FORWARD, microbatch)

    def backward_one_chunk(self, microbatch: int, *_: object, full_backward: bool = True, **__: object) -> None:
        self._play(ActionKind.BACKWARD if full_backward else ActionKind.INPUT, microbatch)

    def backward_weight_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self._play(ActionKind.WEIGHT, microbatch)

    def _get_init_p2p_neighbors_ops(self) -> list:
        return []

    def perform_reduce_grad(self, *_: object) -> None:
        """Does nothing: there are no gradients to reduce."""

    def scale_grads(self, *_: object) -> None:
        """Does nothing: there are no gradients to scale."""

    def _prepare_forward_infra(self, *_: object, **__: object) -> tuple:
        return ()

    def _prepare_backward_infra(self, *_: object, **__: object) -> None:
        """No buffers."""

    _create_grad_recv_info = _prepare_backward_infra
