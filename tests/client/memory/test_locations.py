"""The loop in C and three calls for each tensor read the same facts.

Where reft was installed without a compiler, only the three calls are tested.
"""

from __future__ import annotations

import runpy
import sys
from array import array
from itertools import chain, permutations

import pytest
import torch
from torch import nn

from reft.client import memory as package
from reft.client.memory import locations

TENSORS = {
    "plain": lambda: torch.zeros(3, 4),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.zeros(0, 3),
    "parameter": lambda: nn.Parameter(torch.zeros(5)),
    "buffer": lambda: nn.Buffer(torch.zeros(2)),
    "result": lambda: torch.zeros(3, requires_grad=True) * 2,
    "view": lambda: torch.zeros(4, 4)[1:, 2:].t(),
    "bfloat16": lambda: torch.zeros(4, dtype=torch.bfloat16),
    "float8": lambda: torch.zeros(4, dtype=torch.float8_e4m3fn),
    "bool": lambda: torch.zeros(4, dtype=torch.bool),
    "no dtype of DLPack": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
}


@pytest.fixture(params=["extension", "calls"])
def read(request, monkeypatch):
    if request.param == "extension":
        return locations.read
    monkeypatch.delattr(package, "_locations", raising=False)
    monkeypatch.setitem(sys.modules, "reft.client.memory._locations", None)
    return runpy.run_path(locations.__file__)["read"]


class Located:
    """Tensors, and where they were."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = [*tensors]
        self.addresses = array("Q", [each.data_ptr() for each in tensors])
        self.extents = array("Q", chain.from_iterable(map(locations.extent_of, tensors)))
        self.counts = array("Q", [99] * len(tensors))

    def read(self, read) -> bool:
        return read(self.tensors, self.tensors, self.addresses, self.extents, self.counts)


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_tensor_that_stayed_is_where_it_was(read, make):
    located = Located(make())
    assert located.read(read)
    assert [*located.counts] == [each._version for each in located.tensors]


@pytest.mark.parametrize("at", range(3))
def test_each_write_is_counted(read, at):
    located = Located(*(torch.zeros(4) for _ in range(3)))
    located.tensors[at].add_(1).mul_(2)
    assert located.read(read)
    assert [*located.counts] == [2 if i == at else 0 for i in range(3)]


CHANGES = {
    "moved": lambda tensor: setattr(tensor, "data", torch.zeros(4)),
    "smaller": lambda tensor: setattr(tensor, "data", tensor.data[:3]),
    "resized": lambda tensor: tensor.resize_(2, 1),
    "begins later": lambda tensor: setattr(tensor, "data", tensor.data[1:]),
    "as many elements in another shape": lambda tensor: setattr(tensor, "data", tensor.data.view(2, 2)),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_elsewhere_or_of_another_size_is_noticed_and_all_are_counted(read, change, at):
    located = Located(*(torch.zeros(4) for _ in range(3)))
    for tensor in located.tensors:
        tensor.add_(1)
    old = located.tensors[at].data  # keeps the memory, so that no other tensor gets the address
    change(located.tensors[at])
    assert not located.read(read)
    assert [*located.counts] == [each._version for each in located.tensors]
    del old


@pytest.mark.parametrize("kind", ["plain", "no dtype of DLPack"])
def test_a_tensor_that_is_transposed_over_the_same_memory_is_noticed(read, kind):
    """Number of elements, address and shape stay: only the strides say which byte is which."""
    flat = TENSORS[kind]().flatten()[:4]
    located = Located(flat.view(2, 2), torch.zeros(4))
    assert located.read(read)
    located.tensors[0].data = located.tensors[0].data.t()
    assert located.tensors[0].data_ptr() == located.addresses[0] and not located.read(read)


TWO_BYTES = (torch.bfloat16, torch.float16, torch.int16, torch.uint16)
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool, torch.bits8)


def test_neighbours_of_all_dtypes_stay_where_they_were(read):
    dtypes = (*TWO_BYTES, *ONE_BYTE, torch.float32, torch.complex64, torch.float64, torch.int64, torch.complex128)
    pairs = [torch.empty(4, dtype=each) for pair in permutations(dtypes, 2) for each in pair]
    assert Located(*pairs).read(read)


@pytest.mark.parametrize(("old", "new"), [*permutations(TWO_BYTES, 2), *permutations(ONE_BYTE, 2)], ids=str)
def test_another_dtype_over_the_same_memory_is_noticed(read, old, new):
    """As after `model.float()` and `model.half()`: the allocator may give the first memory back."""
    located = Located(*(torch.empty(4, dtype=old) for _ in range(2)))
    assert located.read(read)
    last = located.tensors[-1]
    last.data = last.data.view(new)
    assert last.data_ptr() == located.addresses[-1] and last.dtype is new and not located.read(read)


@pytest.mark.parametrize("change", [lambda extents: extents.pop(), lambda extents: extents.append(0)])
def test_extents_of_other_tensors_are_no_match(read, change):
    located = Located(torch.zeros(4), torch.zeros(2, 2))
    change(located.extents)
    assert not located.read(read)


def test_a_moved_tensor_without_a_dtype_of_dlpack_is_noticed(read):
    located = Located(TENSORS["no dtype of DLPack"]())
    moved = TENSORS["no dtype of DLPack"]()
    located.tensors[0].data = moved
    assert not located.read(read)
    assert moved.data_ptr() == located.tensors[0].data_ptr()


def test_writes_are_counted_on_another_object_than_the_one_that_is_located(read):
    class Wrapper:
        _version = 7

    located = Located(torch.zeros(4))
    assert read(located.tensors, [Wrapper()], located.addresses, located.extents, located.counts)
    assert [*located.counts] == [7]


def test_an_object_without_a_write_count_is_an_error(read):
    located = Located(torch.zeros(4))
    with pytest.raises(AttributeError):
        read(located.tensors, [object()], located.addresses, located.extents, located.counts)


@pytest.mark.skipif(locations.read is locations._read, reason="no extension")
@pytest.mark.parametrize("short", [0, 1, 2, 4])
def test_lists_and_buffers_of_different_lengths_are_refused(short):
    located = Located(torch.zeros(4), torch.zeros(4))
    arguments = [located.tensors, located.tensors, located.addresses, located.extents, located.counts]
    arguments[short] = arguments[short][:1]
    with pytest.raises(ValueError, match="not all for"):
        locations.read(*arguments)


@pytest.mark.skipif(locations.read is locations._read, reason="no extension")
def test_what_is_no_exchange_api_is_refused():
    with pytest.raises(ValueError):
        package._locations.read_extents(None, "_version", [], [], *(array("Q") for _ in range(3)))
