"""Says which random generator a restarted loop has moved before its first step.

A loop that marks its steps by itself gets no generator put back after attach. So what the script
draws between attach and the first forward changes the steps. Draws there may also belong to the
step: a loop draws its batch. Only the loop's own steps tell one from the other:

    mark ─────► first forward     the generators that move here in a usual step: learned once, after
                                  the first step of a run, and held in the capsule
    restore ──► first forward     a generator that moves here, and is not among those, is named

A forward pre-hook of the models sees the first forward that trains: gradients are on, and the model
is not in eval mode. So a validation that comes first is not taken for a step. The hook is there
from attach on, because a later one makes torch.compile compile again, and removes itself. A hook
inside a compiled graph is traced to nothing and stays: then nothing is learned or said.
torch.cuda.make_graphed_callables refuses modules with hooks, so a plain module on a device gets
none.

Only rank 0 speaks. An evaluation or a new epoch that begins at the restored step may draw as well,
and an uninterrupted run would have drawn too. reft's loader knows an epoch's end, and then nothing
is said; else the line says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from reft.client.schedule.snapshot_window import SnapshotWindow
from reft.client.state import random_state
from reft.client.state.host_state import HostState
from reft.client.state.restored_generators import RestoredGenerators
from reft.console import say

log = logging.getLogger("reft")
WRAPPERS = ("DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "OptimizedModule")
WORDS = {
    "python": "Python's global generator (random)",
    "numpy": "numpy's global generator",
    "cpu": "the global torch generator",
    "cuda": "a CUDA generator",
}


class GeneratorGuard:
    """Says which generators moved before the first forward after a restore.

    Args:
        host: has the generators of the newest mark; holds what was learned.
        window: counts the steps.
        generators: those of a restored mark, which shall stay so; None: nothing is checked.
    """

    def __init__(self, host: HostState, window: SnapshotWindow, generators: RestoredGenerators | None) -> None:
        self._host = host
        self._window = window
        self._generators = generators
        self._restored = random_state.take() if generators is not None and host.moves is not None else None
        self._hooks: list[Any] = []

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Hooks the modules whose first forward shall be seen."""
        try:
            for module in modules:
                self._hooks.append(module.register_forward_pre_hook(ForwardHook(self.at_forward)))
        except Exception as error:  # a module of another kind
            log.warning("the first forward can't be seen: %s", error)

    def at_forward(self) -> None:
        """Compares the generators if this forward is the one to check, or to learn from."""
        window, marked = self._window, self._host.marked
        try:
            if window.step == window.start and self._restored is not None and self._generators is not None:
                moved = random_state.differing(self._restored, random_state.take()) - set(self._host.moves or ())
                if moved and not self._generators.at_epoch_end:
                    say(notice(sorted(moved), self._generators.is_handed_out))
            elif window.step == window.start or marked is None or marked.step != window.step:
                return
            elif self._host.moves is None:
                self._host.moves = sorted(random_state.differing(marked.generators, random_state.take()))
        except Exception as error:  # a failure of reft never stops a training step
            log.warning("the generators can't be compared: %s", error)
        self._restored = None
        if self._host.moves is not None:
            self.remove()

    def remove(self) -> None:
        """Removes the hooks."""
        for each in self._hooks:
            each.remove()
        self._hooks = []


class ForwardHook:
    """Calls a function before a forward that trains, outside of a compiled graph.

    A copy of the module, or a pickled one, gets a hook that does nothing.

    Args:
        call: called without arguments.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, args: Sequence[Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if module.training and torch.is_grad_enabled():
            self._call()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ForwardHook, "nothing")

    @staticmethod
    def nothing(module: nn.Module, args: Sequence[Any]) -> None:
        """Does nothing."""


def watchable(modules: Mapping[str, Any]) -> list[nn.Module]:
    """Returns the models that may get a hook; see the module.

    Args:
        modules: prefix → module, of all tracked objects.
    """
    models = [each for prefix, each in modules.items() if prefix.startswith("model.") and isinstance(each, nn.Module)]
    return [each for each in models if is_wrapped(each) or all(part.device.type == "cpu" for part in each.parameters())]


def is_wrapped(module: nn.Module) -> bool:
    """Returns whether the module is of a kind that no CUDA graph is made of."""
    return any(kind.__name__ in WRAPPERS for kind in type(module).__mro__)


def notice(moved: Sequence[str], has_loader: bool = False) -> str:
    """Returns the line about generators that moved between attach and the first forward.

    Args:
        moved: the generators.
        has_loader: whether `state=` has reft's loader, or another object that puts generators back.
    """
    names = " and ".join(WORDS[each] for each in moved)
    remedies = "session.steps" if has_loader else "reft.ResumableLoader or session.steps"
    return (
        f"{names} moved between attach and the first forward, and does not before the forward of a usual step. If the next "
        "steps shall be those of an uninterrupted run: draw before attach, give iter(loader) a generator of its own, or use "
        f"{remedies}. A new epoch or an evaluation that begins here may draw as well; then all is well."
    )
