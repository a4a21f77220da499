"""Tests what protect="auto" keeps of state that one rank holds."""

import pytest

from reft.core.coding.copy_choice import COPIES, CopyReport, choose_copies

NODES = {"a": [0, 1], "b": [2]}
FITS = [CopyReport("", 100), CopyReport("", 50), CopyReport("", 70)]


def test_copies_are_chosen_where_they_can_be_recomputed_and_fit():
    choice = choose_copies(FITS, NODES, {"a": 150, "b": 70}, "")
    assert choice.is_copies and choice.reason == COPIES


@pytest.mark.parametrize(
    ("room", "node"), [({"a": 149, "b": 70}, "150 B on node a"), ({"a": 150, "b": 69}, "70 B on node b")]
)
def test_parity_is_chosen_where_copies_do_not_fit(room, node):
    choice = choose_copies(FITS, NODES, room, "")
    assert not choice.is_copies and node in choice.reason and choice.reason.startswith("parity: ")


def test_parity_is_chosen_if_any_rank_has_other_state():
    reports = [*FITS[:2], CopyReport("only this rank holds buffer.", 70)]
    choice = choose_copies(reports, NODES, {"a": 150, "b": 70}, "")
    assert not choice.is_copies and choice.reason == "parity: only this rank holds buffer."


def test_parity_is_chosen_if_copies_were_given_up():
    choice = choose_copies(FITS, NODES, {"a": 150, "b": 70}, "a step takes 1 s, and to recompute one takes 2 s.")
    assert not choice.is_copies and "a step takes 1 s" in choice.reason
