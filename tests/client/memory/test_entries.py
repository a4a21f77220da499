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
    """Returns a function of containers and of their entries: whether each still has its entries."""
    names = vars(entries)
    if request.param == "iterators":
        monkeypatch.delattr(package, "_entries", raising=False)
        monkeypatch.setitem(sys.modules, "reft.client.memory._entries", None)
        names = runpy.run_path(entries.__file__)
    source_of, are_same, end = names["source_of"], names["are_same"], names["END"]

    def compare(containers, *found):
        return are_same(
            [source_of(each) for each in containers], [entry for each in found for entry in (*each, end)], end
        )

    return compare


SAME = {
    "dict": lambda: ([{"a": A, "b": B, "c": C}], [A, B, C]),
    "several": lambda: ([{"a": A}, [B], (C,)], [A], [B], [C]),
    "empty": lambda: ([{}, {"a": A}, [], {}], [], [A], [], []),
    "defaultdict": lambda: ([defaultdict(dict, {1: A}), {2: B, 3: C}], [A], [B, C]),
    "other mappings": lambda: ([MappingProxyType({"a": A}), OrderedDict(b=B, c=C)], [A], [B, C]),
    "more than are fetched ahead": lambda: ([{"a": A}] * 20, *[[A]] * 20),
    "nothing": lambda: ([],),
}
OTHER = {
    "replaced": lambda: ([{"a": A, "b": B, "c": A}], [A, B, C]),
    "removed": lambda: ([{"a": A, "b": B}], [A, B, C]),
    "added": lambda: ([{"a": A, "b": B, "c": C}], [A, B]),
    "another order": lambda: ([{"b": B, "a": A}], [A, B]),
    "emptied": lambda: ([{"a": A}, {}], [A], [B]),
    "filled": lambda: ([{"a": A}, {"b": B}], [A], []),
    "a list has less": lambda: ([{"a": A}, [B]], [A], [B, C]),
    "a list has more": lambda: ([{"a": A}, [B, C]], [A], [B]),
    "another list": lambda: ([[A, A], (C,)], [A, B], [C]),
    "gone to the next": lambda: ([{"a": A}, {"b": B, "c": C}], [A, B], [C]),
    "come from the next": lambda: ([{"a": A, "b": B}, {}], [A], [B]),
    "another view": lambda: ([OrderedDict(a=A, b=C), [C]], [A, B], [C]),
    "one more container": lambda: ([{"a": A}, {}], [A]),
    "one container less": lambda: ([{"a": A}], [A], []),
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
    assert compare([container], [A, B, C])


def test_equal_objects_are_not_the_same(compare):
    class Equal:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("a tensor's == is a computation")

        __hash__ = None

    assert not compare([[A, B, Equal()]], [A, B, C])


def test_a_source_that_cannot_be_read_is_an_error():
    with pytest.raises(TypeError):
        entries.are_same([1], [A], entries.END)
