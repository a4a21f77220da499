"""What the user passed to attach, as one: each object's extractor (`reft.client.state.extract`) does what is asked of all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.extract.registry import Extractor, extractor_of
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.tensors import TensorIndex, clean, device_of
from reft.core.layout.layout import Leaf
from reft.core.layout.stage_naming import StageNaming

STAGE = re.compile(r"model\.stage(\d+)\.(.*)", re.DOTALL)


def stage_prefix(index: int) -> str:
    """The prefix of a pipeline stage's module; names lose it where the naming says so."""
    return f"model.stage{index}"


def extractor(value: Any) -> Extractor:
    """The extractor of an object that `reft.client.attach.arguments` has let pass."""
    found = extractor_of(value)
    assert found is not None, f"{type(value).__name__} was let pass and has no extractor"
    return found


@dataclass(frozen=True)
class ExtraState:
    """A module's extra state, as an object of the user."""

    module: nn.Module

    def state_dict(self) -> dict[str, Any]:
        return {"extra_state": self.module.get_extra_state()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.module.set_extra_state(saved["extra_state"])


@dataclass(frozen=True)
class TrackedObjects:
    """What the user passed to attach: models, optimizers, and modules among `state`, by prefix."""

    modules: Mapping[str, Any]
    optimizers: Sequence[Any]
    scalers: Mapping[str, torch.amp.GradScaler]
    naming: StageNaming | None = None  # of pipeline stages, once all ranks have agreed on it

    def stages(self) -> list[int]:
        """The pipeline stages among the modules."""
        return [int(found[1]) for found in map(STAGE.match, (f"{prefix}." for prefix in self.modules)) if found]

    def identity(self, name: str) -> str:
        """What a leaf is called in the whole job: without its stage, where the naming says so."""
        found = STAGE.match(name)
        if found is None or self.naming is None or self.naming.has_stage(found[2]):
            return name
        return f"model.0.{found[2]}"

    def items(self) -> Sequence[tuple[str, Any, Extractor]]:
        """(prefix, object, its extractor) of models, then of optimizers."""
        return self._items

    @cached_property
    def _items(self) -> Sequence[tuple[str, Any, Extractor]]:
        models = [(prefix, module, extractor(module)) for prefix, module in self.modules.items()]
        return [*models, *((f"optimizer.{i}", each, extractor(each)) for i, each in enumerate(self.optimizers))]

    def names(self) -> ParameterNames:
        """What each parameter is, by its id: as the first that has it says."""
        found = ParameterNames()
        for prefix, value, its in self.items():
            for named in its.parameters(prefix, value, found):
                found.setdefault(id(named.tensor), named._replace(name=self.identity(named.name)))
        return found

    def parameters(self) -> Iterator[NamedParameter]:
        """All parameters, each once."""
        yield from self.names().values()

    @property
    def makes_on_host(self) -> bool:
        """Whether `make` makes every large tensor in the room that it is given: none on a device, or of a flat parameter."""
        return all(named.local.device.type == "cpu" and not named.runs for named in self.parameters())

    def extra_states(self) -> dict[str, ExtraState]:
        """What modules keep as `get_extra_state` (fp8 scales, …), by the module's name; small, so the capsule has it."""
        return {
            f"{prefix}.{clean(path)}.extra_state": ExtraState(part)
            for prefix, module in self.modules.items()
            for path, part in module.named_modules()
            if _keeps_extra_state(type(part))
        }

    def bind(self) -> TensorIndex:
        """Finds all leaves as they are now.

        Raises:
            UnsupportedState: one can't be held; its name is in the message. Or they lie on several devices.
        """
        names = self.names()
        found = TensorIndex(rename=self.identity, names=names)
        for prefix, value, its in self.items():
            its.bind(found, prefix, value, names)
        for name, scaler in self.scalers.items():
            for key in ("_scale", "_growth_tracker"):
                value = vars(scaler).get(key)
                if value is None:
                    found.track_entry(vars(scaler), key, value)
                else:
                    found.add(f"state.{name}.{key}", vars(scaler), key, value, staged=True)
        device_of(found.tensors.values())
        return found

    def predict(self) -> list[Leaf]:
        """Leaves that do not exist yet and will after the first step, as far as that can be told."""
        names = self.names()
        return [leaf for prefix, value, its in self.items() for leaf in its.predict(prefix, value, names)]

    def make(self, leaves: Sequence[Leaf], room: HugePageBuffer) -> None:
        """Makes held leaves that do not exist yet, where that can be done.

        Args:
            leaves: in the order in which they were made.
            room: for all of them.
        """
        names = self.names()
        for prefix, value, its in self.items():
            own = [leaf for leaf in leaves if leaf.name.startswith(f"{prefix}.")]
            if own:
                its.make(prefix, value, own, names, room)

    def capture(self, names: ParameterNames) -> dict[str, dict[str, Any]]:
        """Small state that is no leaf, by prefix.

        Args:
            names: of all parameters, as `bind` or `names` found them.
        """
        return {prefix: its.capture(prefix, value, names) for prefix, value, its in self.items()}

    def restore(self, saved: Mapping[str, Mapping[str, Any]], names: ParameterNames) -> None:
        """The reverse of `capture`.

        Raises:
            LayoutChanged: what was held is of other objects.
        """
        for prefix, value, its in self.items():
            its.restore(prefix, value, names, saved.get(prefix, {}))


def _keeps_extra_state(kind: type[nn.Module]) -> bool:
    """Not if its `get_extra_state` is torch's, or is declared to return None, as that of Megatron's own layers is."""
    method = kind.get_extra_state
    returned = getattr(method, "__annotations__", {}).get("return", "anything")
    return method is not nn.Module.get_extra_state and returned not in (None, "None")
