"""The index notices each way in which a tensor can move, and takes made tensors back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reft.client.state.tensors import TensorIndex, TensorLocations, TensorPlaces, check_supported
from reft.errors import UnsupportedState

A, B = torch.zeros(2), torch.ones(3)


def all_of(container) -> TensorPlaces:
    places = TensorPlaces()
    places.track_entries(container)
    return places


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.update(b=A),
        lambda entries: entries.pop("b"),
        lambda entries: entries.update(c=A),
        lambda entries: entries.clear(),
    ],
)
def test_a_changed_entry_of_a_container_is_noticed(change):
    entries = {"a": A, "b": B}
    places = all_of(entries)
    assert places.is_current()
    change(entries)
    assert not places.is_current()


def test_an_entry_of_an_empty_container_is_noticed():
    entries: dict[str, torch.Tensor] = {}
    places = all_of(entries)
    assert places.is_current()
    entries["a"] = A
    assert not places.is_current()


def test_entries_that_two_containers_exchange_are_noticed():
    first, second = {"a": A}, {"b": B}
    places = TensorPlaces()
    for container in (first, second):
        places.track_entries(container)
    first.update(c=second.pop("b"))  # all entries, one after the other, are the same: A, B
    assert not places.is_current()


def test_a_single_entry_and_a_size_are_noticed():
    entries = {"a": A, "b": B}
    places = TensorPlaces()
    places.track_entry(entries, "a", A)
    places.track_size(entries)
    entries["b"] = A
    assert places.is_current(), "only the entry a and the number of entries are tracked"
    entries["a"] = B
    assert not places.is_current()
    entries["a"] = A
    entries["c"] = A
    assert not places.is_current()


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.update(n=A),
        lambda entries: entries.update(n=[1, A]),
        lambda entries: entries.update(later=B),
        lambda entries: entries["list"].append(A),
        lambda entries: entries["list"][0].update(x=A),
        lambda entries: (entries.pop("n"), entries.update(m=A)),  # as many entries as before
        lambda entries: entries.update(a=1),
        lambda entries: (entries.pop("a"), entries.update(b=A)),
    ],
)
def test_a_tensor_that_comes_to_a_number_of_a_container_is_noticed(change):
    entries = {"n": 1, "a": A, "list": [{"x": 1}]}
    places = TensorPlaces()
    places.track_entry(entries, "a", A)
    places.track_others(entries)
    assert places.is_current()
    entries.update(n=2.5, list=[{"x": None}], text="numbers and lists of numbers may change")
    assert places.is_current()
    change(entries)
    assert not places.is_current()


def test_a_number_that_a_restore_made_a_tensor_is_put_back():
    group = {"lr": 0.1, "a": A}
    before, after = TensorIndex(), TensorIndex()
    before.add("a", group, "a", A)
    before.track_others(group)
    group.update(lr=B, more=torch.ones(4))
    for key in ("a", "lr", "more"):
        after.add(key, group, key, group[key])
    after.rollback_to(before)
    assert group == {"lr": 0.1, "a": A}


def test_moved_and_resized_memory_is_noticed():
    fixed, staged = torch.zeros(4), torch.zeros(2, 2)
    locations = TensorLocations()
    locations.track("fixed", fixed, fixed, fixed, staged=False)
    locations.track("staged", staged, staged, staged, staged=True)
    assert locations.current_versions() == locations.versions()
    staged.resize_(4)  # as many elements at the same address
    assert locations.current_versions() is None
    staged.resize_(2, 2)
    assert locations.current_versions() == locations.versions()
    staged.data = staged.data.t()
    assert locations.current_versions() is None
    staged.data = staged.data.t()
    assert locations.current_versions() == locations.versions()
    for tensor in (staged, fixed):
        tensor.data = tensor.data.view(torch.int32)
        assert locations.current_versions() is None
        tensor.data = tensor.data.view(torch.float32)
        assert locations.current_versions() == locations.versions()
    fixed.resize_(3)
    assert locations.current_versions() is None
    fixed.resize_(4)
    fixed.data = torch.zeros(4)
    assert locations.current_versions() is None


def test_tensors_made_since_then_are_removed_and_replaced_ones_put_back():
    state: dict[str, dict[str, torch.Tensor]] = {}
    entries = {"a": A}
    before, after = TensorIndex(), TensorIndex()
    before.track_entries(state)
    before.add("a", entries, "a", A)
    entries["a"], state["p"] = B, {"m": torch.zeros(1)}
    after.track_entries(state)
    after.add("a", entries, "a", B)
    after.add("m", state["p"], "m", state["p"]["m"])
    after.rollback_to(before)
    assert entries["a"] is A and state == {}


def test_names_follow_the_write_counts_and_every_tensor_is_looked_at():
    names = [f"{kind}model.0.{i}" for i in range(3) for kind in ("", "optimizer.0.step.", "optimizer.0.exp_avg.")]
    tensors = {name: torch.zeros(4) for name in names}
    locations = TensorLocations()
    for name, tensor in tensors.items():
        locations.track(name, tensor, tensor, tensor, staged=False)
    before = locations.current_versions()
    assert before == locations.versions() and locations.names() == names
    for name, tensor in tensors.items():
        tensor.add_(1)
        after = locations.current_versions()
        assert [each for each, a, b in zip(locations.names(), before, after, strict=True) if a != b] == [name]
        before = after
    for tensor in tensors.values():
        memory, tensor.data = tensor.data, torch.zeros(4)
        assert locations.current_versions() is None
        tensor.data = memory[:3]  # fewer elements at the same address
        assert locations.current_versions() is None
        tensor.data = memory
        assert locations.current_versions() == before


@pytest.mark.parametrize(
    ("tensor", "text", "remedy"),
    [
        (torch.zeros(2, device="meta"), "lies on device meta", "model.to_empty(device=...)"),
        (nn.UninitializedParameter(), "of a lazy module has no shape yet", "run a forward pass before attach"),
    ],
    ids=["meta", "lazy"],
)
def test_a_tensor_without_memory_is_refused_with_its_own_remedy(tensor, text, remedy):
    with pytest.raises(UnsupportedState, match=text) as refused:
        check_supported("model.0.weight", tensor)
    assert remedy in refused.value.hint
