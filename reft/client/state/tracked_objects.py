"""The objects passed to attach.

Each object's extractor finds its state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.extra_state import EXTRA_STATE, ExtraState, extra_state_of
from reft.client.state.extract.registry import Extractor, extractor_of
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.tensors import TensorIndex, device_of, without_wrappers
from reft.client.state.values import HeldValues
from reft.client.torch_internals import SCALER_TENSORS
from reft.core.layout.layout import Leaf
from reft.core.layout.stage_naming import StageNaming

STAGE = re.compile(r"model\.stage(\d+)\.(.*)", re.DOTALL)


def stage_prefix(index: int) -> str:
    """Returns the prefix of a pipeline stage's module.

    Names lose this prefix if the stage naming says so (`TrackedObjects.identity`).
    """
    return f"model.stage{index}"


def required_extractor(value: Any) -> Extractor:
    """Returns the extractor of an object that attach has accepted."""
    match = extractor_of(value)
    assert match is not None, f"{type(value).__name__} passed the checks of attach and has no extractor"
    return match


@dataclass(frozen=True)
class TrackedObjects:
    """The objects passed to attach: models, optimizers, and modules in `state`, by prefix."""

    modules: Mapping[str, Any]
    optimizers: Sequence[Any]
    scalers: Mapping[str, torch.amp.GradScaler]
    # Names of pipeline stages; None until all ranks have agreed.
    naming: StageNaming | None = None

    def stages(self) -> list[int]:
        """Returns the indices of the pipeline stages among the modules."""
        return [int(match[1]) for match in map(STAGE.match, (f"{prefix}." for prefix in self.modules)) if match]

    def identity(self, name: str) -> str:
        """Returns a leaf's name in the whole job, without the stage where possible."""
        match = STAGE.match(name)
        if match is None or self.naming is None or self.naming.has_stage(match[2]):
            return name
        return f"model.0.{match[2]}"

    def items(self) -> Sequence[tuple[str, Any, Extractor]]:
        """Returns (prefix, object, its extractor) of models, then of optimizers."""
        return self._items

    @cached_property
    def _items(self) -> Sequence[tuple[str, Any, Extractor]]:
        models = [(prefix, module, required_extractor(module)) for prefix, module in self.modules.items()]
        return [
            *models,
            *((f"optimizer.{i}", each, required_extractor(each)) for i, each in enumerate(self.optimizers)),
        ]

    def names(self) -> ParameterNames:
        """Returns the name and place of each parameter, by its id.

        If several objects name a parameter, the first one decides.
        """
        names = ParameterNames()
        for prefix, value, extractor in self.items():
            for named in extractor.parameters(prefix, value, names):
                names.setdefault(id(named.tensor), named._replace(name=self.identity(named.name)))
        return names

    def parameters(self) -> Iterator[NamedParameter]:
        """Yields all parameters, each once."""
        yield from self.names().values()

    def extra_states(self, allows_pickles: bool = False) -> dict[str, ExtraState]:
        """Returns the modules' extra state (`get_extra_state`: fp8 scales, …), by name.

        Extra state is small, so it is stored in the capsule.
        """
        parts = (
            (f"{prefix}.{without_wrappers(path)}", part)
            for prefix, module in self.modules.items()
            for path, part in module.named_modules()
        )
        states = (extra_state_of(name, part, allows_pickles) for name, part in parts)
        return {state.name + EXTRA_STATE: state for state in states if state is not None}

    def held_values(self) -> dict[str, HeldValues]:
        """Returns what is held of the loop's values (`reft.Values`), by prefix."""
        return {prefix: module for prefix, module in self.modules.items() if isinstance(module, HeldValues)}

    def bind(self) -> TensorIndex:
        """Finds all leaves as they are now and returns their index.

        Raises:
            UnsupportedState: a tensor cannot be saved (named in the message), or tensors lie on
                several devices.
        """
        names = self.names()
        index = TensorIndex(rename=self.identity, names=names)
        for prefix, value, extractor in self.items():
            extractor.bind(index, prefix, value, names)
        for name, scaler in self.scalers.items():
            for key in SCALER_TENSORS:
                value = vars(scaler).get(key)
                if value is None:
                    index.track_entry(vars(scaler), key, value)
                else:
                    index.add(f"state.{name}.{key}", vars(scaler), key, value, staged=True)
        device_of(index.tensors.values())
        return index

    def predict(self, names: ParameterNames) -> list[Leaf]:
        """Returns the leaves that the first step will probably create.

        Args:
            names: of all parameters, as `bind` or `names` returned them.
        """
        return [leaf for prefix, value, extractor in self.items() for leaf in extractor.predict(prefix, value, names)]

    def make(self, leaves: Sequence[Leaf], buffer: HugePageBuffer) -> None:
        """Creates saved leaves that do not exist yet, where possible.

        Args:
            leaves: in the order in which they were created.
            buffer: the host buffer for all of them.
        """
        names = self.names()
        for prefix, value, extractor in self.items():
            own_leaves = [leaf for leaf in leaves if leaf.name.startswith(f"{prefix}.")]
            if own_leaves:
                extractor.make(prefix, value, own_leaves, names, buffer)

    def capture(self, names: ParameterNames) -> dict[str, dict[str, Any]]:
        """Returns the small state that is not a leaf, by prefix.

        Args:
            names: of all parameters, as `bind` or `names` returned them.
        """
        return {prefix: extractor.capture(prefix, value, names) for prefix, value, extractor in self.items()}

    def restore(self, saved: Mapping[str, Mapping[str, Any]], names: ParameterNames) -> None:
        """Reverses `capture`.

        Raises:
            LayoutChanged: the saved state is of other objects.
        """
        for prefix, value, extractor in self.items():
            extractor.restore(prefix, value, names, saved.get(prefix, {}))
