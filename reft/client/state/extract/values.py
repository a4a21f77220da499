"""`reft.Values`: copies of large tensors are leaves (`reft.client.state.values`)."""

from __future__ import annotations

from collections.abc import Iterator

from reft.client.state.extract.modules import ModuleExtractor, note_form
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.tensors import TensorIndex
from reft.client.state.values import HeldValues
from reft.core.layout.model_form import ModelForm


class ValuesExtractor(ModuleExtractor):
    """Extracts the copies in `reft.Values`: staged leaves, because ranks differ in them."""

    roles = frozenset[str]()

    def parameters(self, prefix: str, value: HeldValues, known: ParameterNames) -> Iterator[NamedParameter]:
        """Returns no parameter."""
        return iter(())

    def bind(self, index: TensorIndex, prefix: str, value: HeldValues, names: ParameterNames) -> None:
        """Adds the copies of large tensors."""
        index.track_entries(value.tensors)
        for key, tensor in value.tensors.items():
            added = index.add(f"{prefix}.{key}", value.tensors, key, tensor, staged=True)
            note_form(index, added, ModelForm(is_temporary=True))
