"""The form of a model's leaf: what an export must know, and the leaf's bytes do not say."""

from __future__ import annotations

import json
from dataclasses import dataclass

from reft.core.layout.layout import Leaf
from reft.errors import FormatError


@dataclass(frozen=True)
class ModelForm:
    """How the model's own state dict has a leaf.

    Attributes:
        shape: of the tensor, if the leaf is a run of the flattened tensor; None: the leaf's own.
        is_temporary: whether the state dict leaves the tensor out.
        name: the state dict's name of it, as a leaf's, if that is another; empty: the leaf's own.
    """

    shape: tuple[int, ...] | None = None
    is_temporary: bool = False
    name: str = ""

    def text(self) -> str:
        """Returns the text of `Leaf.form`; empty for the usual form."""
        if self == ModelForm():
            return ""
        name = [self.name] if self.name else []  # an earlier reft reads two entries
        return json.dumps([self.shape, self.is_temporary, *name], separators=(",", ":"))

    @classmethod
    def of(cls, leaf: Leaf) -> ModelForm:
        """Returns the form of a model's leaf.

        Raises:
            FormatError: the text is no form.
        """
        if not leaf.form:
            return cls()
        try:
            shape, is_temporary, *names = json.loads(leaf.form)
            sizes = None if shape is None else tuple(map(int, shape))
            (name,) = names or [""]
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"the form of leaf {leaf.name!r} can't be read: {error}.") from error
        return cls(sizes, is_temporary is True, str(name))
