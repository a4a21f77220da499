"""The loop in C and Python's iterators compare the entries of containers alike.

Where reft was installed without a compiler, only the iterators are tested.
"""

from __future__ import annotations

import runpy
import sys
from collections import OrderedDict, defaultdict
from types import MappingProxyType

import pytest

from reft.client import memory as package
from reft.client.memory import entries

A, B, C = object(), object(), object()


@pytest.fixture(params=["extension", "iterators"])
def compare(request, monkeypatch):
    """Returns a function of containers: whether their entries are still A, B, C."""
    names = vars(entries)
    if request.param == "iterators":
        monkeypatch.delattr(package, "_entries", raising=False)
        monkeypatch.setitem(sys.modules, "reft.client.memory._entries", None)
        names = runpy.run_path(entries.__file__)
    source_of, are_same = names["source_of"], names["are_same"]
    return lambda *containers: are_same([source_of(each) for each in containers], [A, B, C])


SAME = {
    "dict": lambda: ({"a": A, "b": B, "c": C},),
    "several": lambda: ({"a": A}, [B], (C,)),
    "defaultdict": lambda: (defaultdict(dict, {1: A}), {2: B, 3: C}),
    "other mappings": lambda: (MappingProxyType({"a": A}), OrderedDict(b=B, c=C)),
}
OTHER = {
    "replaced": lambda: ({"a": A, "b": B, "c": A},),
    "removed": lambda: ({"a": A, "b": B},),
    "added": lambda: ({"a": A, "b": B, "c": C, "d": C},),
    "another order": lambda: ({"b": B, "a": A}, [C]),
    "a list has less": lambda: ({"a": A}, [B]),
    "a list has more": lambda: ({"a": A}, [B, C, C]),
    "another list": lambda: ([A, A], (C,)),
    "nothing": lambda: (),
    "another view": lambda: (OrderedDict(a=A, b=C), [C]),
}


@pytest.mark.parametrize("containers", SAME.values(), ids=SAME)
def test_the_very_objects_in_order_are_the_same(compare, containers):
    assert compare(*containers())


@pytest.mark.parametrize("containers", OTHER.values(), ids=OTHER)
def test_any_other_entries_are_not(compare, containers):
    assert not compare(*containers())


def test_an_ordered_dict_counts_in_its_own_order(compare):
    container = OrderedDict(b=B, a=A, c=C)
    container.move_to_end("b")
    container.move_to_end("c")
    assert compare(container)


def test_equal_objects_are_not_the_same(compare):
    class Equal:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("a tensor's == is a computation")

        __hash__ = None

    assert not compare([A, B, Equal()])


def test_a_source_that_cannot_be_read_is_an_error():
    with pytest.raises(TypeError):
        entries.are_same([1], [A])
