"""The round: each rule alone, and trees of nodes.

Messages are lost, repeated and reordered; daemons restart and are silent for long.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.commit import round as round_module
from reft.core.commit.pins import Pins
from reft.core.commit.round import UNDECIDED_MAX, Outcome, Round, StepReport, children_of, parent_of
from reft.core.commit.slots import Slot, SlotState, choose_slot
from reft.core.commit.version import Epoch, Version
from tests.support.saying import SEALED, VOID, report_of, voids


def coordinator(ranks: int = 2, nodes: int = 1) -> Round:
    return Round(0, nodes, frozenset(range(ranks)))


# One node


def test_a_step_is_whole_when_every_rank_sealed_it():
    one = coordinator()
    assert one.hear_rank(0, report_of({1: SEALED}))
    assert one.outcome == Outcome(Pins(), 1, frozenset({1}))
    assert one.hear_rank(1, report_of({1: SEALED}))
    assert one.outcome == Outcome(Pins(whole=1), 1)


def test_a_later_seal_does_not_stand_for_an_earlier_one():
    one = coordinator()
    one.hear_rank(0, report_of({1: SEALED}))
    one.hear_rank(1, report_of({2: SEALED}))
    assert one.outcome == Outcome(Pins(), 2, frozenset({2})) and voids(one.outcome) == {0, 1}


def test_a_void_is_announced_at_once_and_for_good():
    one = coordinator()
    one.hear_rank(0, report_of({1: VOID}))
    assert one.outcome == Outcome(Pins(), 1)
    one.hear_rank(0, report_of({1: SEALED}))
    one.hear_rank(1, report_of({1: SEALED}))
    assert one.outcome == Outcome(Pins(), 1)


def test_the_first_answer_counts():
    one = coordinator()
    one.hear_rank(0, report_of({1: SEALED}))
    assert not one.hear_rank(0, report_of({1: VOID}))
    one.hear_rank(1, report_of({1: SEALED}))
    assert one.outcome == Outcome(Pins(whole=1), 1)


def test_repeated_and_late_answers_change_nothing():
    one = coordinator()
    for rank in (0, 1):
        one.hear_rank(rank, report_of({3: SEALED}))
    before = (one.outcome, one.report())
    assert not one.hear_rank(0, report_of({3: SEALED}))
    assert not one.hear_rank(1, report_of({1: VOID, 2: SEALED}))
    assert not one.hear_rank(1, StepReport())
    assert (one.outcome, one.report()) == before


def test_a_newer_whole_step_settles_all_older_ones():
    one = coordinator()
    one.hear_rank(0, report_of({1: VOID, 2: SEALED, 3: VOID}))
    assert one.outcome == Outcome(Pins(), 3, frozenset({2}))
    one.hear_rank(1, report_of({2: SEALED}))
    assert one.outcome == Outcome(Pins(whole=2), 3)
    assert all(one.outcome.decides(step) for step in (1, 2, 3)) and not one.outcome.decides(4)
    assert voids(one.outcome) == {3}


def test_a_step_that_is_pending_is_not_void():
    one = coordinator()
    one.hear_rank(0, StepReport(-1, 9, frozenset(), frozenset({4, 8})))
    one.hear_rank(1, report_of({4: SEALED, 9: VOID}))
    assert one.outcome == Outcome(Pins(), 9, frozenset({4}))
    assert one.hear_rank(0, report_of({4: SEALED, 9: VOID}))
    assert one.outcome == Outcome(Pins(whole=4), 9)


def test_a_report_does_not_cover_steps_up_to_the_whole_one():
    report = StepReport(3, 6, frozenset({5}), frozenset({4}))
    assert [report.answer(step) for step in range(2, 8)] == [None, None, None, SEALED, VOID, None]


def test_a_coordinator_accepts_a_whole_step_from_a_rank():
    """A restarted coordinator learns of a whole step only from ranks that its predecessor told."""
    one = coordinator()
    one.hear_rank(1, report_of({8: SEALED}))
    assert one.hear_rank(0, report_of({9: SEALED}, since=8))
    assert one.outcome == Outcome(Pins(whole=8), 9, frozenset({9}))


def test_a_whole_step_alone_is_news():
    """The ranks of a restarted coordinator have not heard of the whole step yet."""
    coordinator = Round(0, 2, frozenset({0}))
    coordinator.hear_node(1, report_of({5: SEALED, 7: VOID}))
    assert coordinator.hear_node(1, report_of({7: VOID}, since=5)) and coordinator.outcome.whole == 5


def test_a_restarted_node_passes_a_whole_step_up_and_does_not_act_on_it():
    leaf = Round(1, 2, frozenset({2, 3}))
    leaf.hear_rank(2, report_of({7: SEALED, 9: SEALED}))
    leaf.hear_rank(3, report_of({10: VOID}, since=9))
    assert leaf.outcome == Outcome(), "the pins of step 9 are not known here"
    assert leaf.report() == StepReport(9, 10), "older steps are decided"


def test_reports_of_foreign_ranks_and_nodes_are_refused():
    one = Round(0, 3, frozenset({0}))
    with pytest.raises(ValueError, match="rank 1 is not one of this node's ranks"):
        one.hear_rank(1, report_of({1: SEALED}))
    for child in (0, 3, -1):
        with pytest.raises(ValueError, match="does not report"):
            one.hear_node(child, report_of({1: SEALED}))


def test_a_node_reports_for_its_whole_subtree():
    leaf = Round(1, 2, frozenset({2, 3}))
    leaf.hear_rank(2, report_of({1: SEALED, 2: SEALED, 5: SEALED, 6: VOID}))
    assert leaf.report() == StepReport(-1, 6, frozenset(), frozenset({1, 2, 5}))
    leaf.hear_rank(3, report_of({2: SEALED, 3: VOID}))
    assert leaf.report() == StepReport(-1, 6, frozenset({2}), frozenset({5}))
    assert leaf.outcome == Outcome()  # only the coordinator decides
    assert leaf.has_news and leaf.is_open
    assert leaf.hear_outcome(Outcome(Pins(whole=2), 6))
    assert leaf.report() == StepReport(2, 6)
    assert not leaf.has_news and not leaf.is_open


def test_a_void_of_a_step_that_is_open_above_is_news():
    """The coordinator knows a newer step from its own ranks; this one was reported pending."""
    leaf = Round(1, 2, frozenset({2, 3}))
    leaf.hear_rank(2, report_of({10: SEALED, 15: VOID}))
    leaf.hear_outcome(Outcome(Pins(whole=1), 15, frozenset({10})))
    leaf.hear_rank(3, report_of({15: VOID}, since=1))
    assert leaf.report() == StepReport(1, 15) and leaf.has_news
    leaf.hear_outcome(Outcome(Pins(whole=1), 15))
    assert not leaf.has_news


def test_sealed_slots_of_a_restarted_daemon_do_not_void_other_steps():
    leaf = Round(1, 2, frozenset({1, 2}))
    leaf.hear_rank(1, StepReport(sealed=frozenset({7, 9})))
    assert leaf.report() == StepReport() and not leaf.has_news
    leaf.hear_rank(2, StepReport(sealed=frozenset({7, 8})))
    assert leaf.report() == StepReport(sealed=frozenset({7})) and leaf.has_news


def test_outcomes_are_merged_and_never_go_back():
    leaf = Round(1, 2, frozenset({1}))
    assert leaf.hear_outcome(Outcome(Pins(whole=5), 9, frozenset({7, 8})))
    assert not leaf.hear_outcome(Outcome(Pins(whole=3), 4))
    assert not leaf.hear_outcome(Outcome(Pins(whole=5), 8, frozenset({7, 8})))
    assert leaf.hear_outcome(Outcome(Pins(whole=4), 8, frozenset({7})))
    assert leaf.outcome == Outcome(Pins(whole=5), 9, frozenset({7}))
    assert leaf.hear_outcome(Outcome(Pins(whole=4), 12, frozenset({11})))
    assert leaf.outcome == Outcome(Pins(whole=5), 12, frozenset({11}))


STEPS = st.integers(0, 12)
OUTCOMES = st.builds(
    lambda whole, until, steps: Outcome(
        Pins(whole=whole), max(whole, until), frozenset(s for s in steps if whole < s <= until)
    ),
    st.integers(-1, 12),
    st.integers(-1, 12),
    st.frozensets(STEPS),
)


@given(OUTCOMES, OUTCOMES)
def test_a_merged_outcome_decides_the_steps_of_both(one, other):
    merged = one.merge(other)
    assert merged == other.merge(one) and merged.merge(one) == merged
    for step in range(14):
        assert merged.decides(step) == (one.decides(step) or other.decides(step) or step <= merged.whole)


SAID = st.builds(
    lambda until, sealed, waiting: StepReport(-1, until, sealed, frozenset(s for s in waiting - sealed if s <= until)),
    st.integers(-1, 12),
    st.frozensets(STEPS),
    st.frozensets(STEPS),
)


@given(SAID, SAID)
def test_the_first_answer_stays_and_open_steps_get_the_second(first, second):
    merged = first.merge(second)
    for step in range(14):
        answers = first.answer(step), second.answer(step)
        assert merged.answer(step) == (answers[1] if answers[0] is None else answers[0])


def test_undecided_steps_are_bounded():
    one = coordinator()
    one.hear_rank(0, report_of(dict.fromkeys(range(10_000), SEALED)))
    assert one.report().pending == set(range(10_000 - UNDECIDED_MAX, 10_000)) == one.outcome.open
    one.hear_rank(
        0, StepReport(-1, 10_000 + UNDECIDED_MAX, frozenset(), frozenset(range(10_000, 10_000 + UNDECIDED_MAX)))
    )
    assert len(one.report().pending) <= 2 * UNDECIDED_MAX


def test_ranks_that_sealed_other_steps_during_a_long_silence_get_their_slots_back():
    """Otherwise the ranks skip forever, because no step that they can still seal becomes whole."""
    one = coordinator()
    one.hear_rank(0, report_of({470: SEALED, 523: SEALED, 1000: VOID}))
    one.hear_rank(1, report_of({464: SEALED, 540: SEALED, 999: VOID}))
    assert one.outcome == Outcome(Pins(), 1000)


# The tree


@given(st.integers(1, 600))
def test_the_tree_has_every_node_once_below_the_coordinator(nodes):
    below = [child for index in range(nodes) for child in children_of(index, nodes)]
    assert sorted(below) == list(range(1, nodes))
    assert all(index in children_of(parent_of(index), nodes) for index in range(1, nodes))
    assert parent_of(0) is None


EPOCH = Epoch(1, b"e" * 16)


class Rank:
    """One rank with real slots and the reuse rule. A copy takes no time."""

    def __init__(self, slots: int) -> None:
        self.slots: list[int | None] = [None] * slots
        self.said, self.outcome = StepReport(), Outcome()
        self.sealed: set[int] = set()  # ever

    def take(self, step: int, fails: bool) -> None:
        known = Version(EPOCH, self.outcome.whole) if self.outcome.whole >= 0 else None
        views = [
            Slot(i, SlotState.EMPTY, None) if held is None else Slot(i, SlotState.SEALED, Version(EPOCH, held))
            for i, held in enumerate(self.slots)
        ]
        void = [view.version for view in views if view.version and self.outcome.voids(view.version.step)]
        chosen = None if fails else choose_slot(views, known, void)
        sealed = self.said.sealed
        if chosen is not None:
            self.slots[chosen.index] = step
            self.sealed.add(step)
            sealed = sealed | {step}
        self.said = StepReport(self.outcome.whole, step, sealed).without_decided(self.outcome)

    def hear(self, outcome: Outcome) -> None:
        self.outcome = self.outcome.merge(outcome)
        self.said = self.said.without_decided(self.outcome)


class Job:
    """A tree of nodes whose daemons restart, ranks, and a network.

    The network loses, repeats and reorders messages.
    """

    def __init__(self, nodes: int, ranks_a_node: int, slots: int, chance: random.Random, trouble: float) -> None:
        self.chance, self.trouble = chance, trouble
        self.homes = {rank: rank // ranks_a_node for rank in range(nodes * ranks_a_node)}
        self.ranks = [Rank(slots) for _ in self.homes]
        self.rounds: list[Round] = []
        for node in range(nodes):
            self.rounds.append(self._fresh(node, nodes))
        self.mail: list[tuple] = []
        self.silent: set[int] = set()  # nodes that neither send nor receive
        self.announced = -1

    def _fresh(self, node: int, nodes: int) -> Round:
        return Round(node, nodes, frozenset(rank for rank, home in self.homes.items() if home == node))

    def restart(self, node: int) -> None:
        """Restarts the daemon of a node: its memory is lost, and it reads its slots."""
        self.rounds[node] = self._fresh(node, len(self.rounds))
        for rank in self.rounds[node].ranks:
            held = frozenset(step for step in self.ranks[rank].slots if step is not None)
            self.rounds[node].hear_rank(rank, StepReport(sealed=held))

    def send(self, *message: object) -> None:
        if self.chance.random() < self.trouble:
            return
        self.mail += [message] * (2 if self.chance.random() < self.trouble else 1)

    def tick(self) -> None:
        """Sends all undecided answers again, then delivers half of the mail in any order."""
        for rank, each in enumerate(self.ranks):
            self.send("rank", rank, each.said)
            self.send("news", rank, self.rounds[self.homes[rank]].outcome)
        for each in self.rounds[1:]:
            if each.has_news:
                self.send("up", each.index, each.report())
        for each in self.rounds:
            for child in children_of(each.index, len(self.rounds)):
                self.send("down", child, each.outcome)
        self.chance.shuffle(self.mail)
        half = len(self.mail) if not self.trouble else len(self.mail) // 2
        due, self.mail = self.mail[:half], self.mail[half:]
        for kind, who, what in due:
            self._deliver(kind, who, what)
        self.check()

    def _deliver(self, kind: str, who: int, what: object) -> None:
        node = self.homes[who] if kind in ("rank", "news") else who
        if node in self.silent:
            return
        if kind == "rank":
            self.rounds[node].hear_rank(who, what)
        elif kind == "news":
            self.ranks[who].hear(what)
        elif kind == "up":
            self.rounds[parent_of(who)].hear_node(who, what)
        else:
            self.rounds[who].hear_outcome(what)

    def check(self) -> None:
        """Checks that each outcome is true, and that each announced version can be restored."""
        for outcome in [*(each.outcome for each in self.rounds), *(rank.outcome for rank in self.ranks)]:
            assert outcome.whole < 0 or all(outcome.whole in rank.sealed for rank in self.ranks)
            for step in voids(outcome, range(outcome.until + 1)):
                assert any(step not in rank.sealed and rank.said.until >= step for rank in self.ranks)
            self.announced = max(self.announced, outcome.whole)
        held = set.intersection(*(set(rank.slots) for rank in self.ranks)) - {None}
        assert max(held, default=-1) >= self.announced
        for each in self.rounds:
            assert len(each.report().sealed | each.report().pending) <= len(self.ranks[0].slots) * len(self.ranks)

    def heal(self) -> None:
        """Ends all trouble: each message arrives from now on."""
        self.trouble, self.silent, self.mail = 0.0, set(), []
        for _ in range(2 * len(self.rounds) + 5):
            self.tick()


@pytest.mark.parametrize("fan_out", [1, 2, 16])
@given(
    seed=st.integers(0, 1 << 32), nodes=st.integers(1, 6), ranks_a_node=st.integers(1, 2), slots=st.integers(2, 4),
    restarts=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_tree_announces_only_true_outcomes_and_heals(fan_out, seed, nodes, ranks_a_node, slots, restarts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_module, "FAN_OUT", fan_out)
        chance = random.Random(seed)
        job = Job(nodes, ranks_a_node, slots, chance, trouble=0.4)
        at = [0] * len(job.ranks)
        for _ in range(60):
            rank = chance.choice(
                [r for r, step in enumerate(at) if step <= min(at) + 3]
            )  # ranks may be some steps apart
            at[rank] += 1
            job.ranks[rank].take(at[rank], fails=chance.random() < 0.1)
            if chance.random() < 0.4:
                job.tick()
            if chance.random() < 0.1:
                job.silent = {node for node in range(nodes) if chance.random() < 0.3}
            if restarts and chance.random() < 0.1:
                job.restart(chance.randrange(nodes))
        newest = max(at)
        for rank in job.ranks:
            rank.take(newest + 1, fails=True)  # all ranks are at the same mark again
        job.heal()
        outcomes = [each.outcome for each in job.rounds] + [rank.outcome for rank in job.ranks]
        assert all(outcome.decides(newest) for outcome in outcomes), "every node and rank knows the outcome now"
        for rank in job.ranks:
            rank.take(newest + 2, fails=False)
        job.heal()
        assert {rank.outcome.whole for rank in job.ranks} == {newest + 2}, "every rank had a free slot"


@pytest.mark.parametrize("seed", range(20))
def test_snapshots_continue_after_a_long_absence_of_daemons(seed):
    """For hundreds of steps some nodes hear nothing; others hear little and late."""
    chance = random.Random(seed)
    job = Job(nodes=3, ranks_a_node=1, slots=chance.choice([2, 3]), chance=chance, trouble=0.3)
    for step in range(1, 600):
        if step % 40 == 1:
            job.silent = {node for node in range(3) if chance.random() < 0.7}
        for rank in job.ranks:
            rank.take(step, fails=False)
        if chance.random() < 0.2:
            job.tick()
    job.heal()
    for step in (600, 601):
        for rank in job.ranks:
            rank.take(step, fails=False)
        job.heal()
        assert {rank.outcome.whole for rank in job.ranks} == {step}


def test_many_nodes_of_the_real_fan_out():
    job = Job(40, 2, 3, random.Random(7), trouble=0.0)
    for rank, each in enumerate(job.ranks):
        each.take(1, fails=False)
        each.take(2, fails=rank == 79)
    job.heal()
    assert {each.outcome for each in job.rounds} == {Outcome(Pins(whole=1), 2)}


def test_a_silent_node_only_delays_the_announcement():
    job = Job(3, 1, 3, random.Random(1), trouble=0.0)
    for rank in job.ranks:
        rank.take(1, fails=False)
    job.silent = {2}
    for _ in range(5):
        job.tick()
    assert all(each.outcome.whole == -1 and not voids(each.outcome, range(1, 9)) for each in job.rounds)
    job.heal()
    assert {each.outcome for each in job.rounds} == {Outcome(Pins(whole=1), 1)}


def test_a_restarted_coordinator_is_told_again():
    job = Job(3, 1, 3, random.Random(1), trouble=0.0)
    for rank in job.ranks:
        rank.take(4, fails=False)
    job.tick()
    job.rounds[0] = job._fresh(0, 3)
    job.heal()
    assert {each.outcome for each in job.rounds} == {Outcome(Pins(whole=4), 4)}


def test_with_two_slots_no_rank_stays_blocked_after_a_coordinator_restart():
    """Rank 0 heard that step 2 is whole and goes on. Rank 1 did not, and would skip forever."""
    job = Job(2, 1, 2, random.Random(1), trouble=0.0)
    for step in (1, 2):
        for rank in job.ranks:
            rank.take(step, fails=False)
    job.rounds[0].hear_rank(0, job.ranks[0].said)
    job.rounds[1].hear_rank(1, job.ranks[1].said)
    job.rounds[0].hear_node(1, job.rounds[1].report())
    job.ranks[0].hear(job.rounds[0].outcome)
    assert (job.ranks[0].outcome.whole, job.ranks[1].outcome.whole) == (2, -1)
    for rank in job.ranks:
        rank.take(3, fails=False)
    job.rounds[0] = job._fresh(0, 2)
    job.heal()
    for rank in job.ranks:
        rank.take(4, fails=False)
    job.heal()
    assert {rank.outcome.whole for rank in job.ranks} == {4}


# Replicas that differ


def both_sealed(first: dict[int, int], second: dict[int, int]) -> Round:
    node = Round(0, 1, frozenset({0, 1}))
    node.hear_rank(0, report_of({1: SEALED}), {1: first})
    node.hear_rank(1, report_of({1: SEALED}), {1: second})
    return node


def test_equal_replicas_make_a_whole_step():
    node = both_sealed({3: 7}, {3: 7})
    assert node.outcome == Outcome(Pins(whole=1), 1)
    assert not node._digests, "digests of decided steps are dropped: training takes millions of steps"


def test_replicas_that_differ_make_the_step_void_and_name_the_cell():
    assert both_sealed({3: 7, 4: 1}, {3: 8, 4: 1}).outcome == Outcome(Pins(), 1, mismatched=frozenset({3}))


def test_after_a_difference_no_later_step_becomes_whole():
    """The window of the next step lies elsewhere and matches. The difference is still there."""
    node = both_sealed({3: 7}, {3: 8})
    for rank in (0, 1):
        node.hear_rank(rank, report_of({2: SEALED}), {2: {3: 1}})
    assert node.outcome == Outcome(Pins(), 2, mismatched=frozenset({3}))


def test_ranks_of_other_cells_are_not_compared():
    assert both_sealed({3: 7}, {4: 8}).outcome.whole == 1


def test_replicas_on_two_nodes_are_compared_by_the_coordinator():
    above, below = Round(0, 2, frozenset({0})), Round(1, 2, frozenset({1}))
    below.hear_rank(1, report_of({1: SEALED}), {1: {0: 5}})
    above.hear_rank(0, report_of({1: SEALED}), {1: {0: 6}})
    assert above.hear_node(1, below.report(), below.digests(), below.outcome.mismatched)
    assert above.outcome.voids(1) and above.outcome.mismatched == {0}
    assert below.hear_outcome(above.outcome) and below.outcome.mismatched == {0}


def test_a_difference_in_a_subtree_reaches_the_coordinator():
    above, below = Round(0, 2, frozenset({0})), Round(1, 2, frozenset({1, 2}))
    for rank in (1, 2):
        below.hear_rank(rank, report_of({1: SEALED}), {1: {9: rank}})
    assert below.report() == report_of({1: VOID}) and below.digests() == {}
    assert above.hear_node(1, below.report(), below.digests(), below.outcome.mismatched)
    assert above.outcome == Outcome(Pins(), 1, mismatched=frozenset({9}))


def test_a_difference_alone_is_news():
    middle = Round(1, 18, frozenset({1}))
    assert middle.hear_node(17, StepReport(), mismatched={9}) and middle.outcome.mismatched == {9}
    assert not middle.hear_node(17, StepReport(), mismatched={9})


def test_a_repeated_answer_is_not_compared_with_itself():
    node = Round(0, 1, frozenset({0, 1}))
    node.hear_rank(0, report_of({1: SEALED}), {1: {0: 1}})
    node.hear_rank(0, report_of({1: SEALED}), {1: {0: 2}})
    node.hear_rank(1, report_of({1: SEALED}), {1: {0: 1}})
    assert node.outcome == Outcome(Pins(whole=1), 1)
