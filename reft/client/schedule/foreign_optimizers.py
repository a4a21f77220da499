"""Who steps between two marks: what is left where nobody, or another did, is not held, and no snapshot may claim that it is.

    another optimizer steps our parameters ─► the window ends, as before a step of our own; unmarked and twice: the log says so
    mark, no passed optimizer has stepped  ─► another one has, or gradients wait for the next step: that mark is not taken
    no marks, the last one steps first     ─► its steps end no iteration: nothing is taken until a mark

An optimizer that is made anew in mid-run calls no hook of the old one's, and its moments are not held; a loop that marks each
micro-batch would come back without the gradients that it had gathered. Both would train on, and differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

UNHELD = (
    "parameters were updated by a {}, another optimizer than was passed to attach: its state is not held. Close the session, "
    "and attach with the one that trains."
)
UNSTEPPED = (
    "gradients are there, and no optimizer that was passed to attach has stepped since the mark before (nor does one where a "
    "GradScaler skips it): gradients are not held, a restart would go on without them. Mark behind the optimizer's step only."
)
OUT_OF_TURN = (
    "no step is marked, and the last of the optimizers stepped ahead of others: where an iteration ends can't be told. Mark "
    "steps with session.step_end() or session.steps(), or pass the optimizer that steps last as the last one."
)


class ForeignOptimizerGuard:
    """Who else than the passed optimizers writes what a session holds.

    Args:
        optimizers: the passed ones. Nothing is followed unless all are torch's or derived from them: what others step
            inside of their own step is theirs to know.
        holds: whether a parameter, by its id, is one that the session holds.
        before: called before such a write; with what there is to say where nothing is marked, once; else "".
    """

    def __init__(self, optimizers: Sequence[Any], holds: Callable[[int], bool], before: Callable[[str], None]) -> None:
        self._stepped: set[int] = set()  # indexes of the passed ones that have, since the mark before
        self._passed = len(optimizers)
        self._in_turn = True  # in the first round, the last of them stepped behind all others
        self._own = {id(each) for each in optimizers}  # the session keeps them alive
        self._holds = holds
        self._before = before
        self._calls = 0  # of others, since an own one was called
        self._name = ""
        self._follows = bool(optimizers) and all(isinstance(each, torch.optim.Optimizer) for each in optimizers)
        self.remove: Callable[[], object] = _followed(self) if self._follows else _nothing

    def called(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of this process is about to step."""
        if id(optimizer) in self._own or not self._writes_ours(optimizer):
            return
        self._calls += 1
        self._name = type(optimizer).__name__
        is_alone = self._calls == 2  # a single one may be part of, or around, a step of our own
        self._before(UNHELD.format(self._name) if is_alone else "")

    def _writes_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(self._holds(id(parameter)) for group in optimizer.param_groups for parameter in group["params"])

    def own_step(self, index: int) -> None:
        """A passed optimizer steps."""
        self._calls = 0
        self._stepped.add(index)

    def first_call(self) -> None:
        """The last of the passed optimizers has stepped for the first time, and nothing was marked."""
        self._in_turn = len(self._stepped) == self._passed

    def mark(self, is_unmarked: bool, modules: Iterable[nn.Module]) -> str:
        """Why the state at this mark is not all that a restart needs; empty if it is, as far as can be told.

        Args:
            is_unmarked: it is no mark, but a call of the last optimizer.
            modules: whose gradients are looked at if nobody has stepped.
        """
        stepped, self._stepped = self._stepped, set()
        if is_unmarked and not self._in_turn:
            return OUT_OF_TURN
        if stepped:
            return ""
        if self._calls:
            return UNHELD.format(self._name)
        waits = self._follows and any(p.grad is not None for module in modules for p in module.parameters())
        return UNSTEPPED if waits else ""


def _followed(foreign_optimizers: ForeignOptimizerGuard) -> Callable[[], object]:
    """Hooks every optimizer of the process, until that is called which it returns, or the session is gone."""
    reference = weakref.ref(foreign_optimizers)

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        found = reference()
        if found is not None:
            found.called(optimizer)

    return weakref.finalize(foreign_optimizers, register_optimizer_step_pre_hook(torch.compiler.disable(before)).remove)


def _nothing() -> None:
    """Nothing is hooked."""
