"""What is fetched ahead of a mark: the right lines, and never a fault, whatever has become of what lay there."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch

from reft.client.memory import prefetching as module
from reft.client.memory.prefetching import LINE, ahead

here = pytest.mark.skipif(platform.machine() != "x86_64", reason="the loop is one of x86-64")


@pytest.fixture
def asked(monkeypatch):
    """The addresses of which `_lines` was asked for lines, with how many bytes, and what it said."""
    said = []
    lines = module._lines

    def heard(addresses, nbytes):
        addresses = list(addresses)
        found = lines(addresses, nbytes)
        said.append((addresses, nbytes, {each // LINE for each in found.tolist()}))
        return found

    monkeypatch.setattr(module, "_lines", heard)
    return said


@here
def test_every_byte_of_what_will_be_asked_is_fetched(asked):
    tensors = [torch.zeros(8), torch.ones(2, 2)]
    objects = [{"a": 1}, [], *tensors]
    ahead(objects, tensors)()
    places = [each for addresses, _, _ in asked for each in addresses]
    assert {*map(id, objects)} | {each._cdata for each in tensors} <= {*places}
    assert {each.untyped_storage()._cdata for each in tensors} <= {*places}
    for addresses, nbytes, lines in asked:
        assert lines == {at // LINE for each in addresses for at in range(each, each + nbytes)}


@here
def test_what_is_gone_is_no_fault(monkeypatch):
    wild = np.array([0, 1 << 12, (1 << 47) - LINE, (1 << 64) - LINE], np.uint64)
    monkeypatch.setattr(module, "_lines", lambda addresses, nbytes: wild)
    ahead([object()], [])()
    monkeypatch.undo()
    tensors = [torch.zeros(1 << 20) for _ in range(20)]
    fetch = ahead(tensors, tensors)
    tensors.clear()
    fetch()


@here
def test_a_torch_that_does_not_say_where_its_objects_lie_is_no_failure(asked, monkeypatch):
    monkeypatch.setattr(module, "_behind", lambda value, found=module._behind: found(object()))
    tensors = [torch.zeros(8)]
    ahead(tensors, tensors)()
    assert [addresses for addresses, *_ in asked][1:3] == [[0], [0]]


def test_of_nothing_nothing_is_fetched():
    ahead([], [])()


def refuse(code):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("how", ["no code may be mapped", "another processor"])
def test_elsewhere_the_objects_are_touched_and_the_log_says_so(monkeypatch, caplog, how):
    caplog.set_level("INFO", "reft")
    if how == "another processor":
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    else:
        monkeypatch.setattr(module, "mapped", refuse)
    objects = [{}, torch.zeros(1)]
    assert all(a is b for a, b in zip(ahead(objects, objects[1:])(), objects, strict=True))
    assert "nothing is fetched ahead" in caplog.text
