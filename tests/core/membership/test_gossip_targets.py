from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reft.core.membership.gossip_targets import REACH, gossip_targets, neighbours, ring_of

NODES = st.integers(1, 70).map(lambda n: [f"node-{i}" for i in range(n)])


@given(NODES)
def test_watching_is_mutual_and_bounded(nodes):
    ring = ring_of(nodes)
    assert sorted(ring) == sorted(nodes)
    for own in ring:
        watched = neighbours(own, ring)
        assert len(watched) == min(2 * REACH, len(ring) - 1) == len(set(watched)) and own not in watched
        assert all(own in neighbours(other, ring) for other in watched)


@given(NODES)
def test_news_reach_all_nodes_within_log2_hops(nodes):
    ring = ring_of(nodes)
    reached, hops = {ring[0]}, 0
    while len(reached) < len(ring):
        reached |= {other for own in reached for other in gossip_targets(own, ring)}
        hops += 1
    assert hops <= max(len(ring) - 1, 1).bit_length()
    assert len(gossip_targets(ring[0], ring)) <= 2 * (REACH + len(ring).bit_length())


def test_nodes_of_one_rack_are_seldom_neighbours():
    """There are 16 racks of 8 nodes. In the order of names all neighbours would be of one rack."""
    ring = ring_of(f"rack-{i // 8:02}-{i % 8}" for i in range(128))
    together = [sum(other[:7] == own[:7] for other in neighbours(own, ring)) for own in ring]
    assert sum(together) / len(together) < 0.5 and max(together) <= REACH


def test_the_order_is_the_same_on_every_node():
    nodes = [f"n{i}" for i in range(20)]
    assert ring_of(nodes) == ring_of(reversed(nodes))
