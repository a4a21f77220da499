"""The round agrees on an interval: the largest request counts, and ranks may hear of it late."""

from reft.core.commit.pins import Pins
from reft.core.commit.round import Outcome, Round
from reft.core.commit.snapshot_interval import LEAD, SnapshotInterval, is_due
from tests.support.saying import SEALED, VOID, report_of, voids


def test_the_largest_request_becomes_the_interval_once_a_step_is_whole():
    above, below = Round(0, 2, frozenset({0})), Round(1, 2, frozenset({1, 2}))
    above.hear_request(0, 3)
    below.hear_request(1, 7)
    assert below.requested_every == 0, "rank 2 has not requested anything"
    for rank in (1, 2):
        below.hear_rank(rank, report_of({5: SEALED}))
    above.hear_rank(0, report_of({5: SEALED}))
    above.hear_node(1, below.report(), requested_every=below.requested_every)
    assert above.outcome == Outcome(Pins(whole=5), 5), "whole, but one rank has no request yet"
    below.hear_request(2, 4)
    assert below.requested_every == 7
    above.hear_rank(0, report_of({6: VOID}))
    assert above.outcome.interval == SnapshotInterval(), "a void step decides nothing"
    above.hear_rank(0, report_of({7: SEALED}))
    for rank in (1, 2):
        below.hear_rank(rank, report_of({7: SEALED}))
    above.hear_node(1, below.report(), requested_every=below.requested_every)
    assert above.outcome == Outcome(Pins(whole=7), 7, interval=SnapshotInterval(7 + LEAD, 7))
    assert below.hear_outcome(above.outcome) and below.outcome.interval == SnapshotInterval(7 + LEAD, 7)


def test_an_older_interval_never_replaces_a_newer_one():
    node = Round(1, 2, frozenset({1}))
    assert node.hear_outcome(Outcome(Pins(whole=5), 5, interval=SnapshotInterval(90, 4)))
    assert node.hear_outcome(Outcome(Pins(whole=6), 6, interval=SnapshotInterval(70, 2)))
    assert node.outcome == Outcome(Pins(whole=6), 6, interval=SnapshotInterval(90, 4))
    assert not node.hear_outcome(Outcome(Pins(whole=6), 6))


def node_with_interval_4(ranks):
    """A node whose ranks have agreed on each 4th step from 100 on."""
    node = Round(0, 1, frozenset(range(ranks)))
    node.hear_outcome(Outcome(Pins(whole=99), 99, interval=SnapshotInterval(100, 4)))
    return node


def test_a_rank_that_missed_the_interval_loses_snapshots_but_no_slots():
    node = node_with_interval_4(2)
    for step in range(100, 130):
        node.hear_rank(0, report_of({step: SEALED}))  # it still takes each step
        if is_due(step, 4):
            node.hear_rank(1, report_of({step: SEALED}))
            assert node.outcome.whole == step
            late = [old for old in range(100, step) if not node.outcome.decides(old)]
            assert not late, "an undecided step would block a slot of rank 0 for good"


def test_a_step_that_is_not_due_becomes_whole_if_all_ranks_take_it():
    """`seal` takes a step that is not due. All ranks call it before any rank continues."""
    node = node_with_interval_4(2)
    node.hear_rank(0, report_of({103: SEALED}))
    node.hear_rank(1, report_of({103: SEALED}))
    assert node.outcome.whole == 103
    node.hear_rank(0, report_of({105: SEALED}))  # this rank stops waiting, and continues
    node.hear_rank(0, report_of({105: SEALED, 108: SEALED}))
    node.hear_rank(1, report_of({106: VOID}))
    assert node.outcome == Outcome(Pins(whole=103), 108, frozenset({108}), interval=SnapshotInterval(100, 4))
    assert voids(node.outcome, range(100, 120)) == {104, 105, 106, 107}
