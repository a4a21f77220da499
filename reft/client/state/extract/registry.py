"""The registry of extractors: finds the extractor for an object by the object's class.

    type(value).__mro__ ─► "module.Class" ─► registered by the user ─► built in
                                             ─► none: attach refuses the object by name

The nearest base class with an extractor decides. Classes are compared by name, so no trainer's
package is imported. Built-in extractors are imported at first use.
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
    """A hook that can be removed."""

    def remove(self) -> None:
        """Removes the hook."""


class Extractor(Protocol):
    """Finds and creates the state of one kind of object.

    One extractor serves all objects of its kind, and has no state of its own.

    `value` is the object that was passed to `reft.attach`: an nn.Module as (one of) `model`, any
    object as (one of) `optimizer`. `prefix` is the object's role: "model.0", "optimizer.1",
    "state.average". Every leaf that an extractor names begins with the prefix and a dot. The
    exception are parameters that only an optimizer has.

    If two ranks use the same leaf name, box and shape, the leaf must have the same bytes on both
    ranks at every mark. A leaf that may differ by rank needs a name with the leaf's place in a
    whole, or with the rank. Digests check this.

    Most extractors derive from `reft.client.state.extract.modules.ModuleExtractor` or
    `reft.client.state.extract.optimizers.OptimizerExtractor`, and override the differences.
    """

    # Of {"model", "optimizer"}: the arguments of attach that accept such an object.
    roles: frozenset[str]

    def check(self, prefix: str, value: Any) -> None:
        """Refuses an object whose state cannot be saved.

        Raises:
            reft.errors.UnsupportedState: names the unsupported feature and the remedy.
        """

    def parameters(self, prefix: str, value: Any, known: ParameterNames) -> Iterator[NamedParameter]:
        """Yields the object's parameters; the first object to yield a parameter names it.

        Models come before optimizers. Parameters whose memory moves in forward (FSDP) belong here,
        too: their `local` is the memory that stays in place between two optimizer steps.

        Args:
            prefix: the object's role.
            value: the object.
            known: parameters of earlier objects; a copy of such a parameter in another precision
                gets a name derived from the parameter's.
        """

    def bind(self, index: TensorIndex, prefix: str, value: Any, names: ParameterNames) -> None:
        """Adds every tensor of the object's current state to the index.

        Uses `index.add`, `index.track_entry` and `index.track_size`. Runs at attach, and whenever
        the index is no longer current. Must not communicate, copy or allocate. An optimizer need
        not add parameters that other objects name, only what it alone has.

        Args:
            index: the index to add to.
            prefix: the object's role.
            value: the object.
            names: the parameters of all models and optimizers, by id of the object.
        """

    def predict(self, prefix: str, value: Any, names: ParameterNames) -> Iterable[Leaf]:
        """Returns the leaves that the first optimizer step will create; none for a model."""

    def make(
        self, prefix: str, value: Any, leaves: Sequence[Leaf], names: ParameterNames, buffer: HugePageBuffer
    ) -> None:
        """Creates saved leaves that do not exist yet, before a restore writes into them.

        The bytes of new tensors are arbitrary. Leaves that cannot be created are left out; the
        restore then refuses with their names.

        Args:
            prefix: the object's role.
            value: the object.
            leaves: leaves of this prefix, in the order in which they were created.
            names: the parameters of all models and optimizers, by id of the object.
            buffer: `buffer.empty(leaf, dtype)` is host memory for one leaf.
        """

    def capture(self, prefix: str, value: Any, names: ParameterNames) -> dict[str, Any]:
        """Returns the small state at the mark that is not a leaf.

        Values are numbers, text, bytes and small tensors, in dicts, lists and tuples. They must be
        copies (`state.serialization.to_plain`), and this must not wait for a device. Runs at every
        mark, while the index is current and with the same `names`. Values that depend only on these
        are computed once, with `names.once`.
        """

    def restore(self, prefix: str, value: Any, names: ParameterNames, saved: Mapping[str, Any]) -> None:
        """Restores the result of `capture`, after all leaves were restored.

        Raises:
            reft.errors.LayoutChanged: the saved state is of another object.
        """

    def hook(self, value: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
        """Calls `before()` before each optimizer step and `after(value)` after the step.

        The step is that of the outermost object. When `after` runs, parameters are final, including
        gathered or broadcast ones. `before` runs before the state is written, and may wait. If a
        step raises, `after` is not called.
        """


_REGISTERED: dict[str, Extractor] = {}
_BUILT_IN = {
    "deepspeed.runtime.engine.DeepSpeedEngine": "reft.client.state.extract.deepspeed:DeepSpeedExtractor",
    "megatron.core.optimizer.optimizer.MegatronOptimizer": "reft.client.state.extract.megatron:MegatronExtractor",
    "megatron.core.transformer.module.MegatronModule": "reft.client.state.extract.megatron_modules:MegatronModuleExtractor",
    "reft.client.state.values.HeldValues": "reft.client.state.extract.values:ValuesExtractor",
    "torch.nn.modules.module.Module": "reft.client.state.extract.modules:ModuleExtractor",
    "torch.optim.optimizer.Optimizer": "reft.client.state.extract.optimizers:OptimizerExtractor",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": (
        "reft.client.state.extract.zero_redundancy:ZeroRedundancyExtractor"
    ),
}


def register_extractor(kind: str, extractor: Extractor) -> None:
    """Registers an extractor for a class; call it before `reft.attach`, on every rank.

    Args:
        kind: class of the objects as "module.Class", e.g. "my_trainer.optim.ShardedAdam". Derived
            classes use the same extractor unless they are registered themselves. Replaces a
            built-in extractor of the same class.
        extractor: see `Extractor`.
    """
    _REGISTERED[kind] = extractor


def extractor_of(value: Any) -> Extractor | None:
    """Returns the extractor for an object; None if the class and its bases are unknown."""
    for each in type(value).__mro__:
        kind = f"{each.__module__}.{each.__qualname__}"
        if kind in _REGISTERED:
            return _REGISTERED[kind]
        if kind in _BUILT_IN:
            module, _, name = _BUILT_IN[kind].partition(":")
            built: Extractor = getattr(import_module(module), name)()
            return built
    return None
