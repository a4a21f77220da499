"""Digests of models' inputs, and of generators at the first batch and forward.

Beside these, how the models were called.

A forward pre-hook of each outermost tracked module sees the arguments as the script passes them.
Trainers such as Lightning call parts of that module instead, so its children have the hook too, and
count outside of its forward. A module inside a compiled one calls no hook. So compiled modules
around a tracked one have the hook too, if they exist at attach. `module.compile()` leaves none:
then there are no inputs.

Not counted: the forward by which a stage of a pipeline learns shapes, before its first step. All
stages but the first one run it on memory that nothing has written.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import xxhash
from torch import nn

from reft.client.rehearsal.digests import generator_digests, tensor_digest
from reft.client.rehearsal.user_code import frames
from reft.client.state.inner_tensors import inner_tensors
from reft.core.rehearsal.records import ForwardKind

INPUTS_MAX: Final = 64  # digests of a mark; one more stands for the rest
DEPTH_MAX: Final = 16
UNREADABLE: Final = "unreadable"
# A stage of torch's pipelines computes a micro-batch in this method, and in no other one.
STAGE_MODULE, STAGE_FORWARD = "torch.distributed.pipelining.stage", "forward_one_chunk"
CHECKPOINTING: Final = "torch.utils.checkpoint"


class StepInputs(NamedTuple):
    """What was seen since the last mark.

    Attributes:
        digests: of the models' inputs.
        at_batch: the generators when a loader handed out the first batch; None if none was seen, or
            if a forward came first.
        at_forward: the generators at the first forward; None without one.
        forwards: how the models were called, each way once.
    """

    digests: list[str]
    at_batch: dict[str, str] | None
    at_forward: dict[str, str] | None
    forwards: set[ForwardKind]


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
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._digests: list[str] = []
        self._rest: xxhash.xxh3_64 | None = None
        self._at_batch: dict[str, str] | None = None
        self._at_forward: dict[str, str] | None = None
        self._forwards: set[ForwardKind] = set()
        self._running = 0  # forwards of outermost modules that have begun, and not ended
        models = outermost(modules)
        called = [*compiled_around(models), *models]
        self._parents = {child: each for each in models for child in each.children()}
        self._handles = [
            *(each.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True) for each in called),
            *(each.register_forward_hook(self._after_model) for each in called),
            *(
                child.register_forward_pre_hook(self._before_child, with_kwargs=True, prepend=True)
                for child in self._parents
            ),
        ]

    def take(self) -> StepInputs:
        """Returns what was seen since the last mark."""
        digests = [*self._digests, *([self._rest.hexdigest()] if self._rest else [])]
        taken = StepInputs(digests, self._at_batch, self._at_forward, self._forwards)
        self._digests, self._rest, self._at_batch, self._at_forward = [], None, None, None
        self._forwards = set()
        self._running = 0  # a forward that raised has not ended
        return taken

    def batch(self) -> None:
        """Digests the generators at the first batch after a mark, if no forward came before.

        A batch that comes after the forward is one of the next step. A thread that fetches batches
        sees generators at moments that differ from run to run.
        """
        is_first = self._at_batch is None and self._at_forward is None
        if is_first and os.getpid() == self._pid and threading.get_ident() == self._thread:
            try:
                self._at_batch = generator_digests()
            except Exception as error:
                self._on_error(error)

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling():
            if not self._running:
                self._record(model, args, kwargs)
            self._running += 1

    def _after_model(self, *_: object) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._running -= 1

    def _before_child(self, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling() and not self._running:
            self._record(self._parents[child], args, kwargs)

    def _record(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._pid or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return
        try:
            if learns_shapes():
                return
            self._forwards.add(kind_of_forward(model))
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


def compiled_around(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the outermost results of torch.compile that contain one of the models."""
    own = {id(model) for model in models}
    compiled = [each for each in gc.get_objects() if type(each).__name__ == "OptimizedModule"]
    inside = {id(each): {id(part) for part in each.modules() if part is not each} for each in compiled}
    around = [each for each in compiled if id(each) not in own and not own.isdisjoint(inside[id(each)])]
    return [each for each in around if all(id(each) not in inside[id(other)] for other in around)]


def learns_shapes() -> bool:
    """Returns whether a stage of torch's pipelines runs its module, and computes no micro-batch."""
    of_stage = [each.f_code.co_name for each in frames() if each.f_globals.get("__name__") == STAGE_MODULE]
    return bool(of_stage) and STAGE_FORWARD not in of_stage


def kind_of_forward(model: nn.Module) -> ForwardKind:
    """Returns how a model, or a part of the model, is being called."""
    if torch.is_grad_enabled():
        return ForwardKind.TRAINING if model.training else ForwardKind.EVAL_WITH_GRADIENTS
    if not model.training:
        return ForwardKind.EVAL
    # Activation checkpointing first runs without gradients, and again with them.
    is_checkpointed = any(each.f_globals.get("__name__") == CHECKPOINTING for each in frames())
    return ForwardKind.TRAINING if is_checkpointed else ForwardKind.WITHOUT_GRADIENTS


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
        # Of a quantized tensor torch would read wrong memory, and the process might end.
        local = local.int_repr() if local.is_quantized else local
        return "".join(tensor_digest(each.tensor) for each in inner_tensors("input", local))
    except Exception:  # sparse, quantized, fake, or of a transform: torch raises many kinds
        return f"{UNREADABLE} {type(tensor).__name__}"
