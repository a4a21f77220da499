from hypothesis import given
from hypothesis import strategies as st

from reft.core.membership.sticky_ranks import Participant, PreviousRank, assign

A, B, C, D = (Participant(f"agent-{name}", f"node-{name}") for name in "abcd")
NEW = Participant("agent-0", "node-0")  # sorts first


def places(*members):
    return [PreviousRank(rank, member) for rank, member in enumerate(members)]


def test_a_first_round_assigns_ranks_in_order():
    assert assign([A, B, C], []) == {A: 0, B: 1, C: 2}


def test_members_keep_their_ranks_and_a_newcomer_takes_the_hole():
    assert assign([NEW, B, C], places(A, B, C)) == {NEW: 0, B: 1, C: 2}
    assert assign([NEW, A, C], places(A, B, C)) == {A: 0, NEW: 1, C: 2}


def test_a_node_keeps_its_rank_under_a_new_agent():
    again = Participant("another agent", C.home)
    assert assign([again, A, B, NEW], places(A, B, C, D)) == {A: 0, B: 1, again: 2, NEW: 3}


def test_the_same_agent_comes_before_another_agent_of_its_node():
    twin = Participant("agent-0", B.home)
    assert assign([twin, B], places(A, B)) == {B: 1, twin: 0}


def test_two_agents_of_one_node_take_its_two_places():
    first, second, third = (Participant(f"new-{i}", "node-a") for i in range(3))
    before = [
        PreviousRank(0, Participant("x", "node-a")),
        PreviousRank(1, B),
        PreviousRank(2, Participant("y", "node-a")),
    ]
    assert assign([first, second, B], before) == {first: 0, B: 1, second: 2}
    assert assign([first, second, third, B], before) == {first: 0, B: 1, second: 2, third: 3}


def test_when_the_job_shrinks_members_with_too_high_ranks_fill_holes_first():
    assert assign([NEW, A, D], places(A, B, C, D)) == {A: 0, D: 1, NEW: 2}


def test_a_member_of_an_unknown_node_takes_over_no_rank():
    nameless = Participant("agent-0")
    assert assign([nameless, B], [PreviousRank(0, B), PreviousRank(1, Participant("gone"))]) == {B: 0, nameless: 1}


MEMBERS = st.lists(
    st.builds(Participant, st.sampled_from("pqrstuvw"), st.sampled_from(["", "n1", "n2", "n3"])),
    unique_by=lambda member: member.agent, max_size=8,
)  # fmt: skip


@given(MEMBERS, MEMBERS.flatmap(st.permutations))
def test_ranks_are_a_bijection_and_fitting_agents_do_not_move(members, before):
    ranks = assign(members, places(*before))
    assert sorted(ranks.values()) == list(range(len(members)))
    for rank, member in enumerate(before):
        same = [each for each in members if each.agent == member.agent]
        if same and rank < len(members):
            assert ranks[same[0]] == rank
