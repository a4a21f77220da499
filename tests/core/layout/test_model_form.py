"""The form of a model's leaf survives its text, and other text is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.core.layout.layout import Leaf
from reft.core.layout.model_form import ModelForm
from reft.errors import FormatError

LEAF = Leaf("model.0.w", "float32", (6,), (1,), 24, False, (6,), (0,))


@pytest.mark.parametrize("form", [ModelForm(), ModelForm((2, 3)), ModelForm((), True), ModelForm(name="model.0.b")])
def test_text_has_all_of_a_form(form: ModelForm) -> None:
    assert ModelForm.of(replace(LEAF, form=form.text())) == form


def test_usual_form_takes_no_bytes() -> None:
    assert ModelForm().text() == ""


@pytest.mark.parametrize("text", ["{", "[1]", '["a", false]', "3", '[null, false, "a", "b"]'])
def test_other_text_is_refused_with_the_name(text: str) -> None:
    with pytest.raises(FormatError, match=r"model\.0\.w"):
        ModelForm.of(replace(LEAF, form=text))
