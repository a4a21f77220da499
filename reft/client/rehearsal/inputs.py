"""Digests of the models' inputs, and of the generators at the first forward.

A forward pre-hook of each outermost tracked module sees the arguments as the script passes them.
Trainers such as Lightning call parts of that module instead, so its children have the hook too, and
count outside of its forward. A module that is called inside a compiled one calls no hook: then
there are no inputs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import xxhash
from torch import nn

from reft.client.rehearsal.digests import generator_digests, tensor_digest
from reft.client.state.inner_tensors import inner_tensors

INPUTS_MAX: Final = 64  # digests of a mark; one more stands for the rest
DEPTH_MAX: Final = 16
UNREADABLE: Final = "unreadable"


class ForwardInputs:
    """The inputs of all forwards since the last mark; see the module.

    Args:
        modules: prefix → tracked module.
        before_first: called at the first forward after each mark.
        on_error: called with an error, which never reaches training.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], before_first: Callable[[], None], on_error: Callable[[Exception], None]
    ) -> None:
        self._before_first = before_first
        self._on_error = on_error
        self._pid = os.getpid()
        self._digests: list[str] = []
        self._rest: xxhash.xxh3_64 | None = None
        self._at_forward: dict[str, str] | None = None
        self._running = 0  # forwards of outermost modules that have begun, and not ended
        models = outermost(modules)
        self._handles = [
            *(each.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True) for each in models),
            *(each.register_forward_hook(self._after_model) for each in models),
            *(
                child.register_forward_pre_hook(self._before_child, with_kwargs=True, prepend=True)
                for each in models
                for child in each.children()
            ),
        ]

    def take(self) -> tuple[list[str], dict[str, str] | None]:
        """Returns the digests since the last mark, and the generators at the first forward."""
        digests = [*self._digests, *([self._rest.hexdigest()] if self._rest else [])]
        at_forward, self._digests, self._rest, self._at_forward = self._at_forward, [], None, None
        self._running = 0  # a forward that raised has not ended
        return digests, at_forward

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._running += 1
            self._record(args, kwargs)

    def _after_model(self, *_: object) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._running -= 1

    def _before_child(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling() and not self._running:
            self._record(args, kwargs)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._pid or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return
        try:
            if self._at_forward is None:
                self._before_first()
                self._at_forward = generator_digests()
            for tensor in tensors_in([*args, kwargs]):
                self._add(input_digest(tensor))
        except Exception as error:
            self._on_error(error)

    def _add(self, digest: str) -> None:
        if len(self._digests) < INPUTS_MAX:
            self._digests.append(digest)
            return
        self._rest = self._rest or xxhash.xxh3_64()
        self._rest.update(digest.encode())


def outermost(modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Returns the tracked models that lie in no other one; none of state=."""
    models = [module for prefix, module in modules.items() if prefix.startswith("model.")]
    inner = {id(part) for module in models for part in module.modules() if part is not module}
    return [module for module in models if id(module) not in inner]


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists, mappings and dataclasses, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > DEPTH_MAX:
        return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, depth + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from tensors_in(getattr(value, each.name, None), depth + 1)


def input_digest(tensor: torch.Tensor) -> str:
    """Returns the digest of an input, or a text if its bytes can't be read."""
    try:
        local = tensor.detach().resolve_conj().resolve_neg()
        local = local.to_local() if hasattr(local, "to_local") else local
        return "".join(tensor_digest(each.tensor) for each in inner_tensors("input", local))
    except Exception:  # sparse, quantized, fake, or of a transform: torch raises many kinds
        return f"{UNREADABLE} {type(tensor).__name__}"
