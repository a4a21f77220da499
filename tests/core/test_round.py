"""The round: trees of nodes under lost, repeated and reordered messages; each rule alone; and a dumb twin."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core import round as round_module
from reft.core.round import UNDECIDED_MAX, VOIDS_MAX, Answer, Outcome, Round, children_of, crowded_out, parent_of

SEALED, VOID = Answer.SEALED, Answer.VOID


def coordinator(ranks: int = 2, nodes: int = 1) -> Round:
    return Round(0, nodes, frozenset(range(ranks)))


# One node


def test_a_step_is_whole_when_every_rank_sealed_it():
    one = coordinator()
    assert one.hear_rank(0, {1: SEALED})
    assert one.outcome == Outcome()
    assert one.hear_rank(1, {1: SEALED})
    assert one.outcome == Outcome(1)


def test_a_later_seal_does_not_stand_for_an_earlier_one():
    one = coordinator()
    one.hear_rank(0, {1: SEALED})
    one.hear_rank(1, {2: SEALED})
    assert one.outcome == Outcome()


def test_a_void_is_announced_at_once_and_for_good():
    one = coordinator()
    one.hear_rank(0, {1: VOID})
    assert one.outcome == Outcome(-1, frozenset({1}))
    one.hear_rank(0, {1: SEALED})
    one.hear_rank(1, {1: SEALED})
    assert one.outcome == Outcome(-1, frozenset({1}))


def test_the_first_answer_counts():
    one = coordinator()
    one.hear_rank(0, {1: SEALED})
    assert not one.hear_rank(0, {1: VOID})
    one.hear_rank(1, {1: SEALED})
    assert one.outcome == Outcome(1)


def test_repeated_and_late_answers_change_nothing():
    one = coordinator()
    for rank in (0, 1):
        one.hear_rank(rank, {3: SEALED})
    before = (one.outcome, one.undecided())
    assert not one.hear_rank(0, {3: SEALED})
    assert not one.hear_rank(1, {1: VOID, 2: SEALED, -1: SEALED})
    assert (one.outcome, one.undecided()) == before


def test_a_newer_whole_step_settles_all_older_ones():
    one = coordinator()
    one.hear_rank(0, {1: VOID, 2: SEALED, 3: VOID})
    assert one.outcome == Outcome(-1, frozenset({1, 3}))
    one.hear_rank(1, {2: SEALED})
    assert one.outcome == Outcome(2, frozenset({3}))
    assert all(one.outcome.decides(step) for step in (1, 2, 3)) and not one.outcome.decides(4)


def test_strangers_are_refused():
    one = Round(0, 3, frozenset({0}))
    with pytest.raises(ValueError, match="rank 1 is not one of this node's ranks"):
        one.hear_rank(1, {1: SEALED})
    for child in (0, 3, -1):
        with pytest.raises(ValueError, match="does not report"):
            one.hear_node(child, {1: SEALED})


def test_a_node_sends_only_what_is_undecided_and_known_of_its_whole_subtree():
    leaf = Round(1, 2, frozenset({2, 3}))
    leaf.hear_rank(2, {1: SEALED, 2: SEALED, 3: VOID})
    leaf.hear_rank(3, {2: SEALED})
    assert leaf.undecided() == {2: SEALED, 3: VOID}
    assert leaf.outcome == Outcome()  # only the coordinator decides
    assert leaf.hear_outcome(Outcome(2))
    assert leaf.undecided() == {3: VOID}


def test_outcomes_are_merged_and_never_go_back():
    leaf = Round(1, 2, frozenset({1}))
    assert leaf.hear_outcome(Outcome(5, frozenset({6})))
    assert not leaf.hear_outcome(Outcome(3, frozenset({4})))
    assert not leaf.hear_outcome(Outcome(5, frozenset({6})))
    assert leaf.hear_outcome(Outcome(4, frozenset({7})))
    assert leaf.outcome == Outcome(5, frozenset({6, 7}))


def test_undecided_steps_are_bounded():
    one = coordinator()
    for step in range(1, UNDECIDED_MAX + 10):
        one.hear_rank(0, {step: SEALED})
        assert len(one._answers) <= UNDECIDED_MAX
    newest = UNDECIDED_MAX + 9
    one.hear_rank(1, {1: SEALED, newest: SEALED})
    assert one.outcome == Outcome(newest)


def test_one_message_with_very_many_steps_is_bounded_too():
    one = coordinator()
    one.hear_rank(0, dict.fromkeys(range(10_000), SEALED))
    assert len(one._answers) == UNDECIDED_MAX


def test_voids_are_bounded_and_those_in_the_middle_go_first():
    half = VOIDS_MAX // 2
    one = coordinator()
    for step in range(VOIDS_MAX + 10):
        one.hear_rank(0, {step: VOID})
    assert one.outcome.voids == frozenset(range(half)) | frozenset(range(half + 10, VOIDS_MAX + 10))
    leaf = Round(1, 2, frozenset({1}))
    leaf.hear_outcome(Outcome(-1, frozenset(range(1000))))
    assert leaf.outcome.voids == frozenset(range(half)) | frozenset(range(1000 - half, 1000))


def said_while_nobody_listened(first: dict[int, Answer]) -> dict[int, Answer]:
    """What a rank says after its daemon was away for a thousand steps: it filled its slots, and then skipped."""
    answers: dict[int, Answer] = {}
    for step in range(1, 1000):
        answers[step] = first.get(step, VOID)
        for old in crowded_out(answers):
            del answers[old]
    return answers


def test_what_was_sealed_before_a_long_silence_is_decided_after_it():
    one = coordinator()
    for rank in (0, 1):
        one.hear_rank(rank, said_while_nobody_listened({1: SEALED, 2: SEALED}))
    assert one.outcome.whole == 2 and len(one.outcome.voids) <= VOIDS_MAX


def test_ranks_that_sealed_other_steps_before_a_long_silence_get_their_slots_back():
    """Else they would skip for ever, since nothing that they can still seal would ever become whole."""
    one = coordinator()
    for rank in (0, 1):
        one.hear_rank(rank, said_while_nobody_listened({1 + rank: SEALED, 3 + rank: SEALED}))
    assert one.outcome.whole == -1 and one.outcome.voids >= {1, 2, 3, 4}


def test_a_node_passes_on_what_was_sealed_before_a_long_silence():
    leaf = Round(1, 2, frozenset({1}))
    for step in range(1, 1000):
        leaf.hear_rank(1, {step: SEALED if step < 3 else VOID})
        assert len(leaf.undecided()) <= 2 * UNDECIDED_MAX
    assert {step for step, answer in leaf.undecided().items() if answer is SEALED} == {1, 2}
    assert leaf.undecided()[3] is leaf.undecided()[999] is VOID


# The tree


@given(st.integers(1, 600))
def test_the_tree_has_every_node_once_below_the_coordinator(nodes):
    below = [child for index in range(nodes) for child in children_of(index, nodes)]
    assert sorted(below) == list(range(1, nodes))
    assert all(index in children_of(parent_of(index), nodes) for index in range(1, nodes))
    assert parent_of(0) is None


class Job:
    """Nodes of a tree, ranks that answer, and a network that loses, repeats and reorders."""

    def __init__(self, nodes: int, ranks_a_node: int, chance: random.Random, trouble: float) -> None:
        self.chance, self.trouble = chance, trouble
        self.ranks = {rank: rank // ranks_a_node for rank in range(nodes * ranks_a_node)}
        self.rounds = [
            Round(node, nodes, frozenset(rank for rank, home in self.ranks.items() if home == node))
            for node in range(nodes)
        ]
        self.said: dict[int, dict[int, Answer]] = {rank: {} for rank in self.ranks}
        self.mail: list[tuple] = []
        self.voids_seen: set[int] = set()

    def send(self, *message: object) -> None:
        if self.chance.random() < self.trouble:
            return
        self.mail += [message] * (2 if self.chance.random() < self.trouble else 1)

    def tick(self) -> None:
        """Everybody says again what is not decided for him, and half of the mail arrives, in any order."""
        for rank, home in self.ranks.items():
            outcome = self.rounds[home].outcome
            left = {step: answer for step, answer in self.said[rank].items() if not outcome.decides(step)}
            if left:
                self.send("rank", rank, left)
        for each in self.rounds[1:]:
            if each.undecided():
                self.send("up", each.index, each.undecided())
        for each in self.rounds:
            for child in children_of(each.index, len(self.rounds)):
                self.send("down", child, each.outcome)
        self.chance.shuffle(self.mail)
        half = len(self.mail) if not self.trouble else len(self.mail) // 2
        due, self.mail = self.mail[:half], self.mail[half:]
        for kind, who, what in due:
            if kind == "rank":
                self.rounds[self.ranks[who]].hear_rank(who, what)
            elif kind == "up":
                self.rounds[parent_of(who)].hear_node(who, what)
            else:
                self.rounds[who].hear_outcome(what)
        self.check()

    def check(self) -> None:
        for each in self.rounds:
            whole = each.outcome.whole
            assert whole < 0 or all(self.said[rank].get(whole) is SEALED for rank in self.ranks)
            for step in each.outcome.voids:
                assert any(self.said[rank].get(step) is VOID for rank in self.ranks)
            self.voids_seen |= each.outcome.voids
            assert whole not in self.voids_seen
            assert len(each._answers) <= UNDECIDED_MAX

    def expected(self) -> int:
        """The dumb twin: the newest step that is in everybody's list of sealed steps."""
        lists = [{step for step, answer in said.items() if answer is SEALED} for said in self.said.values()]
        return max(set.intersection(*lists), default=-1)


@pytest.mark.parametrize("fan_out", [1, 2, 16])
@given(seed=st.integers(0, 1 << 32), nodes=st.integers(1, 7), ranks_a_node=st.integers(1, 3), steps=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_any_tree_under_any_trouble_says_only_what_is_true_and_heals(fan_out, seed, nodes, ranks_a_node, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_module, "FAN_OUT", fan_out)
        chance = random.Random(seed)
        job = Job(nodes, ranks_a_node, chance, trouble=0.4)
        todo = [(rank, step) for rank in job.ranks for step in range(1, steps + 1)]
        todo.sort(key=lambda each: each[1] + 3 * chance.random())  # ranks run ahead of each other
        for rank, step in todo:
            job.said[rank][step] = VOID if chance.random() < 0.1 else SEALED
            if chance.random() < 0.3:
                job.tick()
        job.trouble = 0.0
        for _ in range(2 * nodes + 3):
            job.tick()
        newest = job.expected()
        after = {
            step for said in job.said.values() for step, answer in said.items() if answer is VOID and step > newest
        }
        assert [each.outcome for each in job.rounds] == [Outcome(newest, frozenset(after))] * nodes


def test_many_nodes_of_the_real_fan_out():
    job = Job(40, 2, random.Random(7), trouble=0.0)
    for rank in job.ranks:
        job.said[rank] = {1: SEALED, 2: VOID if rank == 79 else SEALED}
    for _ in range(8):
        job.tick()
    assert {each.outcome for each in job.rounds} == {Outcome(1, frozenset({2}))}


def test_a_silent_node_stops_the_announcement_and_nothing_else():
    job = Job(3, 1, random.Random(1), trouble=0.0)
    for rank in (0, 1):
        job.said[rank] = {1: SEALED}
    for _ in range(5):
        job.tick()
    assert all(each.outcome == Outcome() for each in job.rounds)
    job.said[2] = {1: SEALED}
    for _ in range(5):
        job.tick()
    assert all(each.outcome == Outcome(1) for each in job.rounds)


def test_a_restarted_coordinator_is_told_again():
    job = Job(3, 1, random.Random(1), trouble=0.0)
    for rank in job.ranks:
        job.said[rank] = {4: SEALED}
    job.rounds[1].hear_rank(1, {4: SEALED})
    job.rounds[0] = Round(0, 3, frozenset({0}))
    for _ in range(5):
        job.tick()
    assert {each.outcome for each in job.rounds} == {Outcome(4)}


# Replicas that differ


def both_sealed(first: dict[int, int], second: dict[int, int]) -> Round:
    node = Round(0, 1, frozenset({0, 1}))
    node.hear_rank(0, {1: Answer.SEALED}, {1: first})
    node.hear_rank(1, {1: Answer.SEALED}, {1: second})
    return node


def test_equal_replicas_make_a_whole_step():
    assert both_sealed({3: 7}, {3: 7}).outcome == Outcome(1)


def test_replicas_that_differ_make_the_step_void_and_name_the_cell():
    assert both_sealed({3: 7, 4: 1}, {3: 8, 4: 1}).outcome == Outcome(-1, frozenset({1}), frozenset({3}))


def test_ranks_of_other_cells_are_not_compared():
    assert both_sealed({3: 7}, {4: 8}).outcome.whole == 1


def test_replicas_on_two_nodes_are_compared_by_the_coordinator():
    above, below = Round(0, 2, frozenset({0})), Round(1, 2, frozenset({1}))
    below.hear_rank(1, {1: Answer.SEALED}, {1: {0: 5}})
    above.hear_rank(0, {1: Answer.SEALED}, {1: {0: 6}})
    assert above.hear_node(1, below.undecided(), below.digests(), below.outcome.unlike)
    assert above.outcome.voids == {1} and above.outcome.unlike == {0}
    assert below.hear_outcome(above.outcome) and below.outcome.unlike == {0}


def test_a_difference_found_below_is_told_above():
    above, below = Round(0, 2, frozenset({0})), Round(1, 2, frozenset({1, 2}))
    for rank in (1, 2):
        below.hear_rank(rank, {1: Answer.SEALED}, {1: {9: rank}})
    assert below.undecided() == {1: Answer.VOID} and below.digests() == {}
    assert above.hear_node(1, below.undecided(), below.digests(), below.outcome.unlike)
    assert above.outcome == Outcome(-1, frozenset({1}), frozenset({9}))


def test_a_repeated_answer_is_not_compared_with_itself():
    node = Round(0, 1, frozenset({0, 1}))
    node.hear_rank(0, {1: Answer.SEALED}, {1: {0: 1}})
    node.hear_rank(0, {1: Answer.SEALED}, {1: {0: 2}})
    node.hear_rank(1, {1: Answer.SEALED}, {1: {0: 1}})
    assert node.outcome == Outcome(1)
