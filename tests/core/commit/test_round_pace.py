"""How often to snapshot, agreed through the round: the greatest wish, one pace, and ranks that hear of it late."""

from reft.core.commit.round import Outcome, Round
from reft.core.commit.snapshot_interval import LEAD, SnapshotInterval, is_due
from tests.support.saying import SEALED, VOID, says, voids


def test_the_greatest_wish_of_the_tree_becomes_the_pace_once_a_step_is_whole():
    above, below = Round(0, 2, frozenset({0})), Round(1, 2, frozenset({1, 2}))
    above.hear_request(0, 3)
    below.hear_request(1, 7)
    assert below.requested_every == 0, "rank 2 has said nothing"
    for rank in (1, 2):
        below.hear_rank(rank, says({5: SEALED}))
    above.hear_rank(0, says({5: SEALED}))
    above.hear_node(1, below.report(), requested_every=below.requested_every)
    assert above.outcome == Outcome(5, 5), "whole, but one rank has no wish yet"
    below.hear_request(2, 4)
    assert below.requested_every == 7
    above.hear_rank(0, says({6: VOID}))
    assert above.outcome.interval == SnapshotInterval(), "a void step decides nothing"
    above.hear_rank(0, says({7: SEALED}))
    for rank in (1, 2):
        below.hear_rank(rank, says({7: SEALED}))
    above.hear_node(1, below.report(), requested_every=below.requested_every)
    assert above.outcome == Outcome(7, 7, interval=SnapshotInterval(7 + LEAD, 7))
    assert below.hear_outcome(above.outcome) and below.outcome.interval == SnapshotInterval(7 + LEAD, 7)


def test_an_older_pace_never_replaces_a_newer_one():
    node = Round(1, 2, frozenset({1}))
    assert node.hear_outcome(Outcome(5, 5, interval=SnapshotInterval(90, 4)))
    assert node.hear_outcome(Outcome(6, 6, interval=SnapshotInterval(70, 2)))
    assert node.outcome == Outcome(6, 6, interval=SnapshotInterval(90, 4))
    assert not node.hear_outcome(Outcome(6, 6))


def paced(ranks):
    """A node whose ranks have agreed on each 4th step from 100 on."""
    node = Round(0, 1, frozenset(range(ranks)))
    node.hear_outcome(Outcome(99, 99, interval=SnapshotInterval(100, 4)))
    return node


def test_a_rank_that_has_not_heard_of_the_pace_loses_snapshots_but_no_slot_for_good():
    node = paced(2)
    for step in range(100, 130):
        node.hear_rank(0, says({step: SEALED}))  # it still takes each step
        if is_due(step, 4):
            node.hear_rank(1, says({step: SEALED}))
            assert node.outcome.whole == step
            late = [old for old in range(100, step) if not node.outcome.decides(old)]
            assert not late, "an earlier step holds a slot of rank 0, and nobody else will ever answer it"


def test_a_step_between_that_all_ranks_take_becomes_whole():
    """`seal` waits for one that is not due; all ranks call it before any goes on."""
    node = paced(2)
    node.hear_rank(0, says({103: SEALED}))
    node.hear_rank(1, says({103: SEALED}))
    assert node.outcome.whole == 103
    node.hear_rank(0, says({105: SEALED}))  # here one gives up waiting, and goes on
    node.hear_rank(0, says({105: SEALED, 108: SEALED}))
    node.hear_rank(1, says({106: VOID}))
    assert node.outcome == Outcome(103, 108, frozenset({108}), interval=SnapshotInterval(100, 4))
    assert voids(node.outcome, range(100, 120)) == {104, 105, 106, 107}
