"""The record of a private name: who has it, under which versions it was tried, and the refusal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from reft.private_names import PrivateName, has_name, refusal, short_version, versions


class Annotated:
    _promised: int


class Derived(Annotated):
    def __init__(self) -> None:
        self._set = 1


@pytest.mark.parametrize(
    ("holder", "name", "has"),
    [
        (SimpleNamespace(_a=None), "_a", True),
        (SimpleNamespace(_a=None), "_b", False),
        (Derived(), "_set", True),
        (Derived, "_set", False),
        (Derived, "_promised", True),
        (Derived(), "_promised", True),
        (torch, "_C", True),
        (torch, "_no_such_name", False),
    ],
)
def test_an_object_has_a_name_or_its_class_annotates_the_name(holder, name, has):
    assert has_name(holder, name) is has


def test_a_name_that_raises_when_it_is_read_is_there():
    with torch.inference_mode():
        tensor = torch.zeros(1)
    assert has_name(tensor, "_version")


def test_only_versions_count_under_which_each_name_was_tried():
    a, b = PrivateName("A", "_a", "x", ("2.9", "2.13")), PrivateName("B", "_b", "x", ("2.13", "2.9", "2.14"))
    assert versions([a, b]) == ["2.9", "2.13"]
    assert short_version("2.13.0+cpu") == "2.13"


def test_a_refusal_says_name_use_version_and_remedy():
    message, remedy = refusal(PrivateName("FSDPState", "_groups", "FSDP2", ("2.13",)), "2.15.0+cu130")
    assert message == (
        "torch 2.15.0+cu130 has no FSDPState._groups, which reft needs for FSDP2. Tried with torch 2.13."
    )
    assert remedy == "install torch 2.13, or a reft that was tried with torch 2.15"
