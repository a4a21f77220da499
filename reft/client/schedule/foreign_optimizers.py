"""Detects marks whose state is not complete in a snapshot.

A passed optimizer is one that was passed to attach; any other is foreign.

    a foreign optimizer steps held parameters ─► the window ends; without marks, the second such
                                                 step in a row writes a warning
    a mark, but no passed optimizer stepped   ─► no snapshot if a foreign optimizer stepped, or
                                                 if gradients exist that no GradScaler dropped
    both step, the foreign one in a second    ─► no snapshot: the foreign one's state is part of the
    iteration, and it has state                  training
    the same with a trainer's own optimizer   ─► no snapshot: its gradients lie in its own buffers
    no marks, and the last optimizer is first ─► no snapshot until a mark: the steps of the last
                                                 optimizer end no iteration

Three loops need these checks. A loop may replace its optimizer during the run: reft does not hold
the moments of the new one, and gets no call of its hooks. A loop may step a second optimizer beside
the passed one. A loop may mark each micro-batch: reft does not hold the accumulated gradients.
After a restart these loops would go on with wrong state. A foreign optimizer that is made anew in
each iteration (meta-learning), or steps inside of a passed one's step, needs no check.

A GradScaler that skips a step has found infinite gradients. A loop that trains on drops them before
its next backward pass, since infinite gradients stay infinite. So such a mark is complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

UNHELD = (
    "parameters were updated by a {} that was not passed to attach: its state is not held. Close the session, and attach with "
    "every optimizer that trains."
)
UNSTEPPED = (
    "gradients exist, and no optimizer that was passed to attach has stepped since the last mark. Snapshots hold no gradients, "
    "so a restart would go on without them. Mark only after the optimizer's step; if a GradScaler skips steps, pass the "
    "GradScaler in state=."
)
UNSEEN = (
    "no step of {} since the last mark, and reft can't see whether it has gradients. Snapshots hold no gradients, so a restart "
    "would go on without them. Mark only after the step: once for all micro-batches that it accumulates."
)
OUT_OF_TURN = (
    "no step is marked, and the last of the optimizers stepped before others: reft can't tell where an iteration ends. Mark "
    "steps with session.step_end() or session.steps(), or pass the optimizer that steps last as the last one."
)


class ForeignStepRecorder:
    """Records which foreign optimizers step, outside of the steps of passed ones.

    A foreign step is not outside if it happens in a passed optimizer's step, as in SAM, or if a
    passed one steps in it, as in a wrapper. A step that raises calls no post-hook, so each mark
    begins anew.
    """

    def __init__(self) -> None:
        self._depth = 0  # steps of passed optimizers under way
        self._under_way: set[int] = set()  # ids of foreign optimizers whose step has no passed one in it so far
        self._since_mark: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._before: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def begins(self, optimizer: torch.optim.Optimizer, is_own: bool) -> None:
        """Notes that an optimizer's step begins."""
        if is_own:
            self._depth += 1
            self._under_way.clear()
        elif not self._depth:
            self._under_way.add(id(optimizer))

    def ends(self, optimizer: torch.optim.Optimizer, is_own: bool) -> None:
        """Notes that an optimizer's step has ended."""
        if is_own:
            self._depth = max(0, self._depth - 1)
        elif id(optimizer) in self._under_way:
            self._under_way.discard(id(optimizer))
            self._since_mark.add(optimizer)

    def at_mark(self) -> str:
        """Returns the class of one with state that has stepped in an earlier iteration, too.

        Empty text if there is none. One that is made anew in each iteration has no such state.
        """
        again = [
            type(each).__name__
            for each in self._since_mark
            if each in self._before
            and any(value is not None for held in each.state.values() for value in held.values())
        ]
        self._before |= self._since_mark
        self._since_mark.clear()
        self._under_way.clear()
        self._depth = 0
        return min(again, default="")


class ForeignOptimizerGuard:
    """Watches the steps of optimizers that were not passed to attach.

    Args:
        optimizers: the passed optimizers. Foreign optimizers are watched only if all passed ones
            are torch.optim.Optimizers: any other may call further optimizers inside its own step.
        holds: decides whether the session holds a parameter, given the parameter's id.
        before: called before a foreign optimizer writes held parameters. The argument is the text
            of a warning for a loop without marks; empty if there is nothing to warn of.

    Attributes:
        remove: ends the watch.
    """

    def __init__(self, optimizers: Sequence[Any], holds: Callable[[int], bool], before: Callable[[str], None]) -> None:
        self._stepped: set[int] = set()  # indexes of the passed optimizers that stepped since the last mark
        self._passed = len(optimizers)
        self._last_steps_last = True  # whether the last optimizer made its first step after all others
        self._own = {id(each) for each in optimizers}  # the session keeps these objects alive
        self._holds = holds
        self._before = before
        self._has_dropped = False  # whether a GradScaler has skipped a step since the last mark
        self._foreign_steps = 0  # steps of foreign optimizers since the last step of a passed one
        self._foreign_name = ""  # class of the last foreign optimizer
        self._steps = ForeignStepRecorder()
        # A trainer's engine or optimizer keeps gradients in buffers of its own.
        self._trainers = [type(each).__name__ for each in optimizers if not isinstance(each, torch.optim.Optimizer)]
        self._follows = bool(optimizers) and not self._trainers
        self.remove: Callable[[], object] = _hook_all_optimizers(self) if self._follows else _nothing

    def called(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that any optimizer of this process is about to step."""
        is_own = id(optimizer) in self._own
        if not is_own and not self._writes_ours(optimizer):
            return
        self._steps.begins(optimizer, is_own)
        if is_own:
            return
        self._foreign_steps += 1
        self._foreign_name = type(optimizer).__name__
        # A single foreign step may be inside, or around, the step of a passed optimizer.
        is_alone = self._foreign_steps == 2
        self._before(UNHELD.format(self._foreign_name) if is_alone else "")

    def returned(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that any optimizer of this process has stepped."""
        self._steps.ends(optimizer, id(optimizer) in self._own)

    def _writes_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(self._holds(id(parameter)) for group in optimizer.param_groups for parameter in group["params"])

    def own_step(self, index: int) -> None:
        """Notes that a passed optimizer steps."""
        self._foreign_steps = 0
        self._stepped.add(index)

    def skipped_step(self) -> None:
        """Notes that a GradScaler skipped the step of a passed optimizer."""
        self._has_dropped = True

    def first_call(self) -> None:
        """Notes the first step of the last optimizer, in a loop without marks so far."""
        self._last_steps_last = len(self._stepped) == self._passed

    def mark(self, is_unmarked: bool, modules: Iterable[nn.Module]) -> str:
        """Returns why this mark must give no snapshot; empty if there is no known reason.

        Args:
            is_unmarked: whether the mark is a call of the last optimizer, in a loop without marks.
            modules: modules that may have gradients; checked if no passed optimizer has stepped.
        """
        stepped, self._stepped = self._stepped, set()
        has_dropped, self._has_dropped = self._has_dropped, False
        returning = self._steps.at_mark()
        if is_unmarked and not self._last_steps_last:
            return OUT_OF_TURN
        if stepped:
            return UNHELD.format(returning) if returning else ""
        if self._foreign_steps:
            return UNHELD.format(self._foreign_name)
        if has_dropped:
            return ""
        if self._trainers:
            return UNSEEN.format(self._trainers[0])
        has_gradients = self._follows and any(p.grad is not None for module in modules for p in module.parameters())
        return UNSTEPPED if has_gradients else ""


def _hook_all_optimizers(foreign_optimizers: ForeignOptimizerGuard) -> Callable[[], object]:
    """Hooks every optimizer of the process, and returns a function that removes the hooks.

    The hooks are also removed when the guard is garbage-collected.
    """
    reference = weakref.ref(foreign_optimizers)

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        guard = reference()
        if guard is not None:
            guard.called(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        guard = reference()
        if guard is not None:
            guard.returned(optimizer)

    handles = (
        register_optimizer_step_pre_hook(torch.compiler.disable(before)),
        register_optimizer_step_post_hook(torch.compiler.disable(after)),
    )
    return weakref.finalize(foreign_optimizers, _remove_all, handles)


def _remove_all(handles: Iterable[Any]) -> None:
    """Removes hooks of torch."""
    for each in handles:
        each.remove()


def _nothing() -> None:
    """Does nothing, because no hook was installed."""
