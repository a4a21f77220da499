"""Tests the shards read of each stripe, and their readers.

It also tests which lanes can't be decoded.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.coding.erasure import ErasureCode
from reft.core.coding.placement import Lane
from reft.core.recovery.gather import assign_readers, group_lanes, lost_shards, stripe_reads, undecodable


class Lanes(NamedTuple):
    """The parts of a placement that these tests need."""

    lanes: tuple[Lane, ...]


def lane(members, k, f):
    return Lane(0, 0, 1 << 20, tuple(members), ErasureCode("test", k, f, 1, (), ()), 1 << 12)


def test_without_a_loss_only_data_is_read():
    reads = stripe_reads(Lanes((lane(range(5), 3, 2),)), 0, range(5))
    assert reads == [(0, 1, 2)] * 5


def test_the_reads_of_the_module_drawing():
    reads = stripe_reads(Lanes((lane(range(5), 2, 1),)), 0, {0, 1, 2, 4})
    assert reads == [(0, 1), (0, 1), (0, 2), (1, 2), (0, 1)]


def test_the_lowest_parities_at_hand_are_read():
    placement = Lanes((lane(range(10, 16), 3, 3),))
    assert stripe_reads(placement, 0, {12, 14, 15})[0] == (2, 4, 5)
    assert stripe_reads(placement, 0, {10, 11, 13, 14, 15})[0] == (0, 1, 3)


def test_the_first_copy_at_hand_is_read():
    reads = stripe_reads(Lanes((lane(range(4), 1, 2),)), 0, {2, 3})
    assert reads == [(2,), (1,), (0,), (0,)]


def test_a_lost_stripe_raises_an_error_with_numbers():
    with pytest.raises(ValueError, match=r"lane 0, stripe 1: 1 of 3 shards are at hand; it takes 2"):
        stripe_reads(Lanes((lane(range(5), 2, 1),)), 0, {0, 1, 4})


@pytest.mark.parametrize(
    ("D", "k", "f"), [(D, k, f) for D in range(1, 7) for k in range(1, D + 1) for f in range(D - k + 1)]
)
def test_judging_all_lanes_at_once_equals_judging_each_lane(D, k, f):
    """Tries every pattern of losses, also of declustered lanes."""
    lanes = (lane(range(D), k, f), lane([D, *range(1, D)], k, f))
    for have in itertools.product([False, True], repeat=D + 1):
        failed = []
        for i in range(2):
            try:
                stripe_reads(Lanes(lanes), i, {rank for rank in range(D + 1) if have[rank]})
            except ValueError:
                failed.append(i)
        assert undecodable(group_lanes(lanes), np.array(have)) == tuple(failed)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12))
def test_lost_shards_are_counted_around_the_circle(lost, width):
    D, width = len(lost), min(width, len(lost))
    counts = lost_shards(np.array([lost, lost]), width)
    assert counts.tolist() == [[sum(lost[(t + c) % D] for c in range(width)) for t in range(D)]] * 2


def test_lanes_with_the_same_members_are_judged_once():
    lanes = [lane([0, 1], 1, 1), lane([2, 3], 1, 1), lane([0, 1], 1, 1), lane([0, 1, 2], 2, 1)]
    pair, three = group_lanes(lanes)
    assert (
        pair.members.tolist() == [[0, 1], [2, 3]]
        and pair.row.tolist() == [0, 1, 0]
        and pair.lanes.tolist() == [0, 1, 2]
    )
    assert three.members.tolist() == [[0, 1, 2]] and (three.D, three.width, three.f) == (3, 3, 1)
    assert undecodable([pair, three], np.array([False, False, True, True])) == (0, 2, 3)
    assert group_lanes([]) == [] and undecodable([], np.array([True])) == ()


def test_ranks_read_their_own_slots():
    assert assign_readers({0: "a", 1: "a", 2: "b"}, {"a": [0, 1], "b": [2]}) == {0: 0, 1: 1, 2: 2}


def test_slots_of_moved_ranks_are_read_on_their_own_node():
    assert assign_readers({0: "a", 1: "a", 2: "b", 3: "b"}, {"a": [2, 3], "b": [0, 1]}) == {0: 2, 1: 3, 2: 0, 3: 1}
    assert assign_readers({0: "a", 1: "b", 2: "a", 3: "a"}, {"a": [0, 1], "b": [2, 3]}) == {0: 0, 1: 2, 2: 1, 3: 0}


def test_slots_on_nodes_without_ranks_are_read_from_other_nodes():
    assert assign_readers({0: "spare", 1: "a", 2: "idle"}, {"a": [0, 1, 2], "idle": []}) == {0: 0, 1: 1, 2: 2}


def test_readers_exist_in_a_job_with_fewer_ranks():
    sources = {0: "a", 1: "a", 2: "b", 3: "gone", 4: "gone", 5: "gone"}
    assert assign_readers(sources, {"a": [0], "b": [1]}) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 1}
    assert assign_readers(sources, {"new": [0, 1]}) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}


@given(
    st.dictionaries(st.integers(0, 9), st.sampled_from("abcd")),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.randoms(use_true_random=False),
)  # fmt: skip
def test_readers_are_on_the_slots_node_and_evenly_loaded(sources, where, shuffle):
    nodes = {node: [rank for rank in range(len(where)) if where[rank] == node] for node in "abc"}
    readers = assign_readers(sources, nodes)
    assert readers.keys() == sources.keys()
    mixed = {node: shuffle.sample(ranks, len(ranks)) for node, ranks in shuffle.sample(list(nodes.items()), 3)}
    assert assign_readers(dict(shuffle.sample(list(sources.items()), len(sources))), mixed) == readers
    for old, new in readers.items():
        here = nodes.get(sources[old], [])
        assert new in (here or range(len(where)))
        assert new == old or old not in here
        if here and new != old:
            load = [sum(readers[o] == rank and sources[o] == sources[old] for o in readers) for rank in here]
            assert load[here.index(new)] <= min(load) + 1
    far = [new for old, new in readers.items() if not nodes.get(sources[old])]
    counts = [sum(each == rank for each in readers.values()) for rank in range(len(where))]
    assert all(counts[new] <= min(counts) + 1 for new in far), "slots of idle nodes go to the ranks with least to read"
