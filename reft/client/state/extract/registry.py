"""Which extractor finds the state of an object: the one that is registered for its class, or for the nearest base class.

    type(value).__mro__ ─► "module.Class" ─► registered by somebody ─► built in ─► none: attach refuses the object by name

Kinds are names, so that no trainer is imported to recognise its objects; built-in extractors are imported when first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from reft.client.state.parameters import NamedParameter, ParameterNames

if TYPE_CHECKING:
    from reft.client.memory.huge_pages import HugePageBuffer
    from reft.client.state.tensors import TensorIndex
    from reft.core.layout.layout import Leaf


class Removable(Protocol):
    """A hook that can be taken off."""

    def remove(self) -> None:
        """Takes it off."""


class Extractor(Protocol):
    """How reft finds and makes the state of one kind of object. One extractor serves all objects of its kind; it keeps nothing.

    `value` is the object that was passed to `reft.attach`: an nn.Module as (one of) `model`, anything as (one of)
    `optimizer`. `prefix` says as what: "model.0", "optimizer.1", "state.average". Every leaf that an extractor names begins
    with its prefix and a dot, but for parameters that only an optimizer has.

    Two ranks that name a leaf alike and give it the same box and shape claim that it has the same bytes on both, at every
    mark. A leaf that may differ by rank must be named by what it is a piece of, or by the rank. Claims are checked by digests.

    Most extractors derive from `reft.client.state.extract.modules.ModuleExtractor` or
    `reft.client.state.extract.optimizers.OptimizerExtractor`, and change what is different.
    """

    roles: frozenset[str]  # of {"model", "optimizer"}: what such an object may be passed as

    def check(self, prefix: str, value: Any) -> None:
        """Refuses what can't be held.

        Raises:
            reft.errors.UnsupportedState: with the name of what it is, and the remedy.
        """

    def parameters(self, prefix: str, value: Any, known: ParameterNames) -> Iterator[NamedParameter]:
        """The parameters that the object names. Each is named by the first object that yields it; models come first.

        Also those whose memory moves in forward (FSDP): `local` is what lies still between two optimizer steps.

        Args:
            known: those that objects before this one have named; a copy of one in another precision is named after it.
        """

    def bind(self, found: TensorIndex, prefix: str, value: Any, names: ParameterNames) -> None:
        """Notes every tensor of the object's state as it is now, by `found.add`, `found.expect` and `found.count`.

        Runs at attach and whenever the bindings no longer hold. Nothing may communicate, copy or allocate in it.
        Parameters that other objects name need not be noted again; optimizers note what belongs to them alone.

        Args:
            names: the parameters of all models and optimizers, by id of the object.
        """

    def predict(self, prefix: str, value: Any, names: ParameterNames) -> Iterable[Leaf]:
        """The leaves that do not exist yet and will after the first optimizer step; none for a model."""

    def make(
        self, prefix: str, value: Any, leaves: Sequence[Leaf], names: ParameterNames, room: HugePageBuffer
    ) -> None:
        """Makes the tensors of held leaves that do not exist yet, before they are written in place.

        The bytes are anything. What can't be made is left out: the restore is refused then, with its name.

        Args:
            leaves: those of this prefix, in the order in which they were made.
            room: `room.empty(leaf, dtype)` is host memory for one leaf.
        """

    def capture(self, prefix: str, value: Any, names: ParameterNames) -> dict[str, Any]:
        """Small state that is no leaf, at the mark: numbers, text, bytes, small tensors, in dicts, lists and tuples.

        What it returns holds copies (`state.serialization.to_plain`), and must not wait for a device. Runs at every mark, when
        all is where `bind` found it with the same `names`: what follows from that alone is remembered by `names.once`.
        """

    def restore(self, prefix: str, value: Any, names: ParameterNames, saved: Mapping[str, Any]) -> None:
        """Brings back what `capture` returned, after all leaves.

        Raises:
            reft.errors.LayoutChanged: it is of another object.
        """

    def hook(self, value: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
        """Calls `before()` before each step of the optimizer and `after(value)` when it has ended.

        The step of the outermost object: when `after` runs, parameters are final, gathered or broadcast ones included.
        `before` runs before anything writes the state; it may wait. A step that raises calls no `after`.
        """


_REGISTERED: dict[str, Extractor] = {}
_BUILT_IN = {
    "deepspeed.runtime.engine.DeepSpeedEngine": "reft.client.state.extract.deepspeed:DeepSpeedExtractor",
    "megatron.core.optimizer.optimizer.MegatronOptimizer": "reft.client.state.extract.megatron:MegatronExtractor",
    "megatron.core.transformer.module.MegatronModule": "reft.client.state.extract.megatron_modules:MegatronModuleExtractor",
    "torch.nn.modules.module.Module": "reft.client.state.extract.modules:ModuleExtractor",
    "torch.optim.optimizer.Optimizer": "reft.client.state.extract.optimizers:OptimizerExtractor",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": (
        "reft.client.state.extract.zero_redundancy:ZeroRedundancyExtractor"
    ),
}


def register_extractor(kind: str, extractor: Extractor) -> None:
    """Lets reft find the state of objects that it does not know. Call it before `reft.attach`, on every rank.

    Args:
        kind: class of the objects as "module.Class", e.g. "my_trainer.optim.ShardedAdam"; derived classes are of this kind
            too, unless they are registered themselves. It takes the place of a built-in extractor of the same class.
        extractor: see `Extractor`.
    """
    _REGISTERED[kind] = extractor


def extractor_of(value: Any) -> Extractor | None:
    """The extractor for an object; None if its class and their bases are unknown."""
    for each in type(value).__mro__:
        kind = f"{each.__module__}.{each.__qualname__}"
        if kind in _REGISTERED:
            return _REGISTERED[kind]
        if kind in _BUILT_IN:
            module, _, name = _BUILT_IN[kind].partition(":")
            built: Extractor = getattr(import_module(module), name)()
            return built
    return None
