"""What a rehearsal reached, did not reach, or could not see; and the words for it."""

from __future__ import annotations

import pytest

from reft.core.rehearsal.reached import MomentKind, ReachedEvent, reached, reached_lines
from reft.core.rehearsal.records import ForwardKind
from tests.support.rehearsal_records import mark

TRAINING, EVAL, EVAL_WITH_GRADIENTS, WITHOUT_GRADIENTS = ForwardKind
VALIDATION, EPOCH_END, CHECKPOINT = MomentKind


def of_marks(**by_field):
    """Returns what was reached by one rank; each field has the values of marks 5, 6, …"""
    count = max(map(len, by_field.values()))
    marks = {
        5 + index: mark(5 + index, **{name: each[index] for name, each in by_field.items()}) for index in range(count)
    }
    return reached({0: marks})


@pytest.mark.parametrize(
    ("forwards", "event"),
    [
        ([[TRAINING], [TRAINING, EVAL], [EVAL]], ReachedEvent(5, "a forward in eval mode")),
        ([[TRAINING], [TRAINING, WITHOUT_GRADIENTS]], ReachedEvent(5, "a forward without gradients")),
        ([[EVAL_WITH_GRADIENTS], [TRAINING]], ReachedEvent(4, "a forward in eval mode")),
        ([[EVAL_WITH_GRADIENTS], [EVAL_WITH_GRADIENTS, EVAL]], ReachedEvent(5, "a forward in eval mode")),
        ([[TRAINING], [TRAINING]], None),
    ],
)
def test_validation_is_a_forward_that_does_not_train(forwards, event):
    assert of_marks(forwards=forwards)[VALIDATION] == event


@pytest.mark.parametrize("forwards", [[[], []], [[EVAL_WITH_GRADIENTS], [EVAL_WITH_GRADIENTS]]])
def test_without_a_forward_in_training_mode_nothing_is_said_of_validation(forwards):
    assert VALIDATION not in of_marks(forwards=forwards)


def test_a_blind_rank_may_have_validated():
    blind, sees = {5: mark(5)}, {5: mark(5, forwards=[TRAINING])}
    assert VALIDATION not in reached({0: blind, 1: sees})
    assert reached({0: sees, 1: sees})[VALIDATION] is None


@pytest.mark.parametrize(
    ("epoch_ends", "expected"),
    [
        ([None, [], ["a"], ["b"]], {EPOCH_END: ReachedEvent(6, "a")}),
        ([None, ["a"]], {EPOCH_END: ReachedEvent(5, "a")}),
        ([None, None, []], {EPOCH_END: None}),
        ([None, None], {}),
    ],
)
def test_an_epochs_end_is_the_first_one_that_a_loader_tells(epoch_ends, expected):
    assert of_marks(epoch_ends=epoch_ends) == expected


def test_ranks_without_data_do_not_hide_that_no_epoch_ended():
    assert reached({0: {5: mark(5)}, 1: {5: mark(5, epoch_ends=[])}}) == {EPOCH_END: None}


def test_a_checkpoint_counts_on_any_rank_and_is_not_reached_only_if_all_marks_say_so():
    none, some = mark(5, saves=[]), mark(5, saves=["torch.save at a.py:7"])
    assert reached({0: {5: none}, 1: {5: some}})[CHECKPOINT] == ReachedEvent(4, "torch.save at a.py:7")
    assert reached({0: {5: none}, 1: {5: none}})[CHECKPOINT] is None
    assert CHECKPOINT not in reached({0: {5: none}, 1: {5: mark(5)}})


def test_the_words_name_each_side_of_the_kill():
    before = {VALIDATION: ReachedEvent(4, "a forward in eval mode"), CHECKPOINT: None}
    after = {VALIDATION: None, EPOCH_END: ReachedEvent(8, "x"), CHECKPOINT: ReachedEvent(9, "torch.save at a.py:7")}
    no_end = "an epoch's end (no loader of reft or torch gave batches from mark to mark)"
    assert reached_lines(before, after) == {
        "reached": "before the kill: validation (a forward in eval mode, after step 4); after the kill: "
        "an epoch's end (x, after step 8), the script's own checkpoint (torch.save at a.py:7, after step 9)",
        "not reached": "before the kill: the script's own checkpoint (no torch.save of tensors); after the kill: "
        "validation (no forward of the model in eval mode or without gradients)",
        "not seen": f"before the kill: {no_end}",
    }
    assert [*reached_lines(after, after)] == ["reached", "not reached"]


def test_what_is_the_same_before_and_after_the_kill_is_said_once():
    first, second = {VALIDATION: None, CHECKPOINT: None}, {VALIDATION: ReachedEvent(4, "x"), CHECKPOINT: None}
    assert reached_lines(first, second) == {
        "reached": "after the kill: validation (x, after step 4)",
        "not reached": "before the kill: validation (no forward of the model in eval mode or without gradients); before "
        "and after the kill: the script's own checkpoint (no torch.save of tensors)",
        "not seen": "before and after the kill: an epoch's end (no loader of reft or torch gave batches from mark to mark)",
    }
