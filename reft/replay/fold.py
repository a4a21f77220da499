"""Folds recorded gradients into the state of one parameter, by torch's own optimizer.

    state of the parameter, mapped ─┐
    gradient ─► scratch ────────────┼─► torch.optim's step ─► the same state, one update later
    parameter, or zeros ─► scratch ─┘

On the host the state is updated in place: its tensors map a slot. On another device a copy of the
state is updated, and `finish` brings it back. Gradient and parameter are copied first: a step
writes the parameter, and SGD's foreach step with nesterov writes the gradient too.

When the result has the owner's bits (torch 2.13 on CPU, tried by the tests and by hand):

* for-loop and foreach: float32 and float64 do not depend on the cut of a tensor, on its alignment
  or on the number of threads. So a parameter may be folded alone, by one thread.
* fused: float32 and float64 depend on the cut, but not on the number of threads. So whole tensors
  are folded.
* bfloat16 with SGD, and with Adam's L2 weight decay: the number of threads decides where a tensor
  is cut, and the ends of the cuts get other bits. The replayer has one thread, as ranks have that
  torchrun starts. With another number of threads the result differs, and is refused.
* Another kind of processor or another device computes other bits in general.

Nothing here proves a result. The caller compares the result with the owner's digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from reft.errors import ReftError

HOST: Final = torch.device("cpu")
CLASSES: Final = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


class CannotFold(ReftError):
    """The state can't be recomputed from what was recorded."""


def load_optimizers() -> None:
    """Loads what torch loads with the first optimizer: its compiler, a second of processor time."""
    scratch = torch.zeros(1)
    scratch.grad = torch.zeros(1)
    torch.optim.SGD([scratch]).step()


def reads_parameter(kind: str, scalars: Mapping[str, Any]) -> bool:
    """Whether an update of the state reads the parameter: its decay is added to the gradient."""
    is_decoupled = kind == "AdamW" or bool(scalars.get("decoupled_weight_decay"))
    return bool(scalars.get("weight_decay")) and not is_decoupled


class ParameterFold:
    """Updates the optimizer state of one parameter.

    Args:
        name: of the parameter, for messages.
        kind: name of the optimizer's class in torch.optim.
        state: key → tensor on the host, of the state before the update; see `finish`.
        device: where the optimizer computes.

    Raises:
        CannotFold: the class is not one of CLASSES.
    """

    def __init__(self, name: str, kind: str, state: Mapping[str, torch.Tensor], device: torch.device = HOST) -> None:
        if kind not in CLASSES:
            raise CannotFold(f"{name} is updated by {kind}; recomputed are {', '.join(CLASSES)}.")
        self._name = name
        self._kind = kind
        self._device = device
        self._given = dict(state)
        self._state = dict(state)  # what the optimizer updates
        self._optimizer: torch.optim.Optimizer | None = None

    def stride_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the strides of the parameter: those of its state with the same shape."""
        for tensor in self._given.values():
            if tuple(tensor.shape) == tuple(shape):
                return tensor.stride()
        raise CannotFold(f"{self._name} of shape {list(shape)} has no state of that shape.")

    def update(self, scalars: Mapping[str, Any], gradient: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
        """Does one update.

        Args:
            scalars: the values of the parameter's group, as the owner's optimizer used them.
            gradient: as the owner's optimizer used it.
            parameter: before the update; None if it was not recorded.

        Raises:
            CannotFold: something that the update needs is missing, or torch refuses the update.
        """
        if parameter is None and reads_parameter(self._kind, scalars):
            raise CannotFold(f"the update of {self._name} reads the parameter, which was not recorded.")
        try:
            optimizer, live = self._prepared(scalars, gradient)
            with torch.no_grad():
                live.copy_(parameter) if parameter is not None else live.zero_()
            live.grad.copy_(gradient)  # type: ignore[union-attr]
            optimizer.param_groups[0].update(scalars)
            optimizer.step()
        except (RuntimeError, ValueError, TypeError, KeyError, AssertionError) as error:
            raise CannotFold(f"torch refuses the update of {self._name}: {error}.") from error
        self._check(optimizer.state[live])

    def finish(self) -> None:
        """Writes the updated state into the given tensors, after the last update.

        Raises:
            CannotFold: the device gives an error.
        """
        try:
            for key, tensor in self._given.items():
                if self._state[key] is not tensor:
                    tensor.copy_(self._state[key])
        except RuntimeError as error:
            raise CannotFold(f"the state of {self._name} can't be read from {self._device}: {error}.") from error

    def _prepared(
        self, scalars: Mapping[str, Any], gradient: torch.Tensor
    ) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        """Returns the optimizer of one parameter, which is scratch, as is its gradient."""
        if self._optimizer is None:
            live = torch.empty_like(gradient, device=self._device).requires_grad_()
            live.grad = torch.empty_like(live, requires_grad=False)
            # torch's optimizers count steps on the host, unless one of these settings is on.
            counts_here = bool(scalars.get("capturable") or scalars.get("fused"))
            self._state = {
                key: tensor if key == "step" and not counts_here else tensor.to(self._device)
                for key, tensor in self._given.items()
            }
            self._optimizer = CLASSES[self._kind]([live])
            self._optimizer.state[live].update(self._state)
        return self._optimizer, self._optimizer.param_groups[0]["params"][0]

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises CannotFold unless the step wrote the given tensors, and made no other ones.

        SGD's first step makes its momentum from the gradient. The section has zeros there.
        """
        made = [key for key, value in state.items() if value is not None and self._state.get(key) is not value]
        if made:
            raise CannotFold(f"{self._name} had no {made[0]} before this update.")
