"""The hooks on the optimizers: they close the window, and count steps in loops without marks.

    pre-hook of each optimizer      the window closes: the optimizer is about to write the state;
                                    its gradients are recorded (`reft.client.records`)
    post-hook of the last one       without marks: the mark
    step of each held GradScaler    notes that the GradScaler skipped the optimizer's step
    any optimizer of the process    `reft.client.schedule.foreign_optimizers`

They run inside the user's optimizer step, in any grad mode.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch

from reft.client.memory.cuda import HostCopy, begin_host_copy
from reft.client.schedule.foreign_optimizers import ForeignOptimizerGuard
from reft.client.schedule.snapshot_window import SnapshotWindow, Stepping
from reft.client.schedule.step_counting import Call, CallCounting, ResumedCounting
from reft.client.state.extract.registry import Removable
from reft.client.state.extract.wrapping import WrappedMethod
from reft.client.state.tracked_objects import required_extractor

log = logging.getLogger("reft")
# After so many calls of the optimizer without a mark, in a job that was marked, the log says that
# no snapshots are taken.
CALLS_WITHOUT_MARK = 1000


class OptimizerHooks:
    """The hooks of one session; see the module.

    Args:
        optimizers: the passed optimizers; the last one ends a step in a loop without marks.
        window: closed before a step, and marked after one.
        begin_copy: begins the copy of a tensor from its device to the host.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        window: SnapshotWindow,
        begin_copy: Callable[[torch.Tensor], HostCopy] = begin_host_copy,
    ) -> None:
        self._window = window
        self._begin_copy = begin_copy
        self._pid = os.getpid()
        self._steps = 0  # steps of passed optimizers
        if any(group.get("capturable") for each in optimizers for group in getattr(each, "param_groups", ())):
            window.stepping = Stepping.UNSEEN
        self._removables: list[Removable] = []
        for index, optimizer in enumerate(optimizers):
            after = self._after_last if optimizer is optimizers[-1] else _nothing
            self._removables += required_extractor(optimizer).hook(optimizer, partial(self._before, index), after)
        self._foreign: ForeignOptimizerGuard | None = None
        if window.snapshots is not None:
            self._foreign = ForeignOptimizerGuard(optimizers, window.holds, self._before_foreign)
            own = {id(each) for each in optimizers}
            for scaler in window.snapshots.planner.tracked.scalers.values():
                self._removables.append(WrappedMethod(scaler, "step", partial(self._scaled_step, own)))

    def mark(self) -> None:
        """Marks the end of an iteration."""
        reason = ""
        if self._foreign is not None and self._window.stepping is Stepping.CALLED:
            reason = self._foreign.mark(isinstance(self._window.counting, CallCounting), self._window.modules())
        self._window.mark(reason)

    def remove(self) -> None:
        """Takes all hooks off."""
        for each in self._removables:
            each.remove()
        if self._foreign is not None:
            self._foreign.remove()

    def _before(self, index: int) -> None:
        window = self._window
        if os.getpid() != self._pid:
            return
        if self._window.is_capturing():
            self._on_captured_step()
            return
        if window.stepping is Stepping.UNSEEN:
            window.stepping = Stepping.CALLED
        self._steps += 1
        window.has_stepped = True
        if self._foreign is not None:
            self._foreign.own_step(index)
        window.written_step = window.step
        if window.snapshots is not None:
            window.snapshots.engine.note_writer()
        window.close()
        if window.snapshots is not None and window.snapshots.recorder is not None:
            window.snapshots.recorder.before_step(index)

    def _scaled_step(
        self, own: Set[int], _: object, call: Callable[..., Any], optimizer: object, *rest: Any, **keywords: Any
    ) -> Any:
        """Runs `GradScaler.step`, and notes if it did not call the optimizer."""
        before = self._steps
        result = call(optimizer, *rest, **keywords)
        if self._steps == before and id(optimizer) in own and self._foreign is not None:
            self._foreign.skipped_step()
        return result

    def _before_foreign(self, trouble: str) -> None:
        if os.getpid() != self._pid or self._window.is_capturing():
            return
        # With marks, the next mark reports the same trouble.
        if trouble and not self._window.is_marked:
            log.warning("no step is counted: %s", trouble)
        self._window.written_step = self._window.step
        if self._window.snapshots is not None:
            self._window.snapshots.engine.note_writer()
        self._window.close()

    def _on_captured_step(self) -> None:
        """Notes that this call of the optimizer is captured in a CUDA graph.

        The call trains nothing. The replays of the graph will train, and call no hook. A snapshot
        in progress is given up: they write the state before it is fenced, and count no writes.
        """
        if self._window.snapshots is not None and (guard := self._window.snapshots.open_guard) is not None:
            guard.tear("the optimizer's step was captured in a CUDA graph before the copy had ended.")
        if self._window.stepping is not Stepping.REPLAYED:
            log.warning(
                "rank %d: the optimizer's step is captured in a CUDA graph, and replays of the graph call no hook. Mark each "
                "step with session.step_end(); the device waits there until the state is copied.",
                self._window.rank,
            )
        self._window.stepping = Stepping.REPLAYED

    def _after_last(self, optimizer: object, *_: object) -> None:
        if os.getpid() != self._pid or self._window.is_capturing():
            return
        counting = self._window.counting
        if isinstance(counting, ResumedCounting) and counting.count() == CALLS_WITHOUT_MARK:
            log.warning(
                "%d calls of the optimizer without a mark: no snapshot is taken, because the restored step was marked. Mark "
                "steps with session.step_end(), or start under another job name.",
                CALLS_WITHOUT_MARK,
            )
        elif isinstance(counting, CallCounting):
            self._count_call(counting, getattr(optimizer, "found_inf", None))

    def _count_call(self, counting: CallCounting, found_inf: object) -> None:
        """Counts a call of the last optimizer in a loop without marks.

        Args:
            counting: how calls are counted.
            found_inf: what a GradScaler gave to a fused optimizer: 1 if the kernel skips the step.
        """
        flag = None
        if isinstance(found_inf, torch.Tensor) and found_inf.device.type != "cpu":
            flag = self._begin_copy(found_inf)
        elif isinstance(found_inf, torch.Tensor) and bool(found_inf):
            return
        call, window = counting.count(flag), self._window
        if call is Call.STEP:
            if window.step == counting.start + 1:
                self._warn_unmarked()
            window.skipped = flag
            self.mark()
        elif call is Call.FIRST:
            window.step += 1
            if self._foreign is not None:
                self._foreign.first_call()

    def _warn_unmarked(self) -> None:
        """Warns once that without marks a restart restores some objects one step behind."""
        if names := self._window.state_names():
            log.warning(
                "no step is marked: a snapshot holds %s as they are when optimizer.step returns. A scheduler, scaler or average "
                "that the loop updates after that comes back one step behind. Mark steps with session.step_end() or "
                "session.steps().",
                ", ".join(names),
            )


def _nothing(*_: object) -> None:
    """Does nothing: the post-hook of all optimizers but the last."""
