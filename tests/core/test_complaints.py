"""What is said of a trouble that comes and goes."""

from __future__ import annotations

from reft.core.complaints import AGAIN_S, REMEMBERED_MAX, Complaints


def said(complaints: Complaints, *troubles: tuple[float, str]) -> list[str]:
    return [trouble for now_s, trouble in troubles if complaints.heard(trouble, now_s)]


def test_a_trouble_is_said_once_and_its_end_too():
    assert said(Complaints(), (0, ""), (1, "a"), (2, "a"), (3, "b"), (4, ""), (5, "")) == ["a", "b", ""]


def test_one_that_flickers_is_said_again_only_after_a_while():
    complaints = Complaints()
    flicker = [(float(i), "a" if i % 2 else "") for i in range(int(AGAIN_S))]
    assert said(complaints, *flicker) == ["a", ""]
    assert said(complaints, (AGAIN_S, "")) == []
    assert said(complaints, (AGAIN_S + 1, "a"), (AGAIN_S + 2, "")) == ["a", ""]


def test_another_trouble_between_is_not_hidden_and_its_end_is_said():
    complaints = Complaints()
    assert said(complaints, (0, "a"), (1, ""), (2, "a"), (3, "b"), (4, "a"), (5, "")) == ["a", "", "b", ""]


def test_it_remembers_a_bounded_number():
    complaints = Complaints()
    said(complaints, *((0.0, str(i)) for i in range(10 * REMEMBERED_MAX)))
    assert len(complaints._said_s) == REMEMBERED_MAX
