"""The judgement of a rehearsal, and the cause of each difference by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.core.rehearsal.causes import find_inputs
from reft.core.rehearsal.compare import DifferenceKind
from reft.core.rehearsal.judge import RehearsalOutcome, RehearsalResult, judge
from reft.core.rehearsal.reached import MomentKind
from reft.core.rehearsal.records import AliveObject, MoveRecord, RehearsedAttempt
from tests.support.rehearsal_records import STEP_S, attempt, mark

BASE, LAST = 10, 20
LOADER = AliveObject("loader", "DataLoader", "loader")
SCHEDULER = AliveObject("scheduler", "StepLR", "schedule")
EMA = AliveObject("ema", "AveragedModel", "ema")
SCALER = AliveObject("scaler", "GradScaler", "scaler")
CRITIC = AliveObject("module", "Linear", "critic")
COUNTER = AliveObject("object", "Counter", "counter")


def undisturbed(**changes: object) -> RehearsedAttempt:
    return attempt(0, LAST + 5, **changes)


def judged(
    restarted: RehearsedAttempt,
    *,
    first: RehearsedAttempt | None = None,
    plain: RehearsedAttempt | None = None,
    last: int = LAST,
) -> RehearsalResult:
    """Judges one rank; the first attempt is like the undisturbed run, unless it is given."""
    plain = plain or undisturbed()
    first = first or replace(plain, marks={step: plain.marks[step] for step in range(1, BASE + 2)})
    return judge({0: [plain]}, {0: [first, restarted]}, killed_s=100.0 + BASE * STEP_S, last_step=last)


def kinds(result: RehearsalResult) -> list[str]:
    return [each.kind for each in result.causes]


def with_inputs(offset: int, of_tensors: int = 0) -> RehearsedAttempt:
    """Returns a restarted attempt whose inputs lie `offset` steps, or tensors, off."""
    flat = [digest for step in range(1, LAST + 6) for digest in mark(step).inputs]
    marks = {}
    for step in range(BASE + 1, LAST + 1):
        place = 2 * (step - 1 + offset) + of_tensors
        marks[step] = mark(step, inputs=flat[place : place + 2], leaves={"w": "x"})
    return replace(attempt(BASE, BASE), marks=marks)


def test_an_equal_run():
    result = judged(attempt(BASE, LAST + 3))
    assert (result.outcome, result.base, result.source, result.through) == (
        RehearsalOutcome.EQUAL,
        BASE,
        "memory",
        LAST,
    )
    assert (result.compared, result.recovery_s, result.ranks) == (LAST - BASE, STEP_S, 1)
    assert (result.difference, kinds(result)) == (None, [])


def test_the_slowest_rank_sets_the_recovery_time():
    late = {step: replace(each, time_s=each.time_s + 2) for step, each in attempt(BASE, LAST).marks.items()}
    runs = {rank: [attempt(0, BASE), attempt(BASE, LAST)] for rank in (0, 1)}
    runs[1][1].marks.update(late)
    result = judge({rank: [undisturbed()] for rank in (0, 1)}, runs, killed_s=105.0, last_step=LAST)
    assert (result.recovery_s, result.ranks) == (STEP_S + 2, 2)


def test_nothing_restored():
    result = judged(attempt(0, LAST))
    assert (result.outcome, kinds(result)) == (RehearsalOutcome.DIFFERENT, ["nothing-restored"])


def test_a_difference_before_the_kill_is_not_blamed_on_recovery():
    first = attempt(0, BASE + 1, leaves={3: {"w": "x", "b": "b3"}})
    result = judged(with_inputs(1), first=first)
    assert (result.outcome, result.difference.step) == (RehearsalOutcome.NOT_DETERMINISTIC, 3)
    assert kinds(result) == ["other-arithmetic"]


@pytest.mark.parametrize(
    ("offset", "tensors", "kind"),
    [
        (1, 0, "prefetched-batch"),
        (0, 1, "prefetched-batch"),
        (2, 0, "skipped-batches"),
        (4, 1, "skipped-batches"),
        (-1, 0, "repeated-batches"),
        (-BASE, 0, "loader-began-again"),
    ],
)
def test_inputs_of_another_step(offset, tensors, kind):
    result = judged(with_inputs(offset, tensors))
    assert (result.outcome, result.difference.kind) == (RehearsalOutcome.DIFFERENT, DifferenceKind.INPUTS)
    assert (result.difference.step, kinds(result)) == (BASE + 1, [kind])


def test_inputs_of_later_steps_where_the_expected_step_had_none():
    plain = undisturbed(inputs={BASE + 1: []})
    result = judged(with_inputs(4), plain=plain)
    assert kinds(result) == ["skipped-batches"] and "input tensors later" in result.causes[0].text


def test_the_words_of_skipped_batches():
    assert "from 4 steps later" in judged(with_inputs(4)).causes[0].text


def in_epochs(length: int, begin: int) -> tuple[RehearsedAttempt, RehearsedAttempt]:
    """Returns both runs over epochs in the same order; the restarted one begins at a batch."""
    plain = undisturbed(inputs={step: [f"i{step % length}"] for step in range(1, LAST + 6)})
    again = {step: [f"i{(step - BASE - 1 + begin) % length}"] for step in range(BASE + 1, LAST + 1)}
    return plain, attempt(BASE, LAST, inputs=again)


def test_a_loader_that_begins_again_in_a_later_epoch():
    plain, restarted = in_epochs(4, 1)
    assert kinds(judged(restarted, plain=plain)) == ["loader-began-again"]


def test_the_nearest_of_equal_matches_counts():
    """The next batch is also the first one of an epoch; a loader without position decides."""
    plain, restarted = in_epochs(11, 12)
    assert kinds(judged(restarted, plain=plain)) == ["prefetched-batch"]
    restarted.alive.append(LOADER)
    assert kinds(judged(restarted, plain=plain)) == ["loader-began-again", "loader-without-position"]


def test_one_equal_input_at_its_place_is_no_other_place():
    one_equal = attempt(BASE, LAST, inputs={step: [f"x{step}"] for step in range(BASE + 2, LAST + 1)})
    assert find_inputs({0: undisturbed().marks}, 0, one_equal) is None


def test_inputs_that_the_other_run_never_had():
    restarted = attempt(BASE, LAST, inputs={step: ["x"] for step in range(BASE, LAST + 1)})
    assert kinds(judged(restarted)) == ["new-inputs"]
    restarted.alive.append(LOADER)
    assert kinds(judged(restarted)) == ["loader-without-position"]


def test_a_loader_without_position_explains_no_equal_inputs():
    restarted = attempt(BASE, LAST, leaves={BASE + 1: {}})
    restarted.alive.append(LOADER)
    assert kinds(judged(restarted)) == []


MOVED, STILL = {"torch": "x", "python": "p"}, {"torch": f"g{BASE}", "python": "p"}
FROM_ATTACH, FROM_BATCH = "attach and the first batch", "the first batch and the first forward"


def moved(*names: str, at_batch: object = STILL) -> RehearsedAttempt:
    """Returns an attempt in which the torch generator moved, with lines that moved generators."""
    restarted = attempt(BASE, LAST, at_batch={BASE + 1: at_batch}, at_forward={BASE + 1: MOVED})
    restarted.moves.extend(MoveRecord(name, "train.py", 40 + i, "  for x in loader:\n") for i, name in enumerate(names))
    return restarted


def test_a_moved_generator():
    result = judged(moved("python", "torch"))
    assert (kinds(result), result.difference.kind) == (["moved-generator"], DifferenceKind.FORWARD_GENERATORS)
    assert f"the global torch generator moved between {FROM_BATCH}: " in result.causes[0].text
    assert "`for x in loader:` at train.py:41." in result.causes[0].text


@pytest.mark.parametrize(
    ("at_batch", "in_plain", "between", "kind"),
    [
        (MOVED, STILL, FROM_ATTACH, DifferenceKind.BATCH_GENERATORS),
        (STILL, STILL, FROM_BATCH, DifferenceKind.FORWARD_GENERATORS),
        # The undisturbed run has no first batch here, so the restarted one alone tells.
        (MOVED, None, FROM_ATTACH, DifferenceKind.FORWARD_GENERATORS),
        (STILL, None, FROM_BATCH, DifferenceKind.FORWARD_GENERATORS),
        (None, STILL, "attach and the first step", DifferenceKind.FORWARD_GENERATORS),
    ],
)
def test_a_cause_says_between_which_moments_the_generator_moved(at_batch, in_plain, between, kind):
    result = judged(moved("torch", at_batch=at_batch), plain=undisturbed(at_batch={BASE + 1: in_plain}))
    assert (kinds(result), result.difference.kind) == (["moved-generator"], kind)
    assert f"the global torch generator moved between {between}: `for x in loader:`" in result.causes[0].text
    batch = "the first batch: no loader of torch or reft handed one out between attach and the first forward"
    assert result.unseen == ([batch] if at_batch is None else [])


def test_a_generator_that_moves_in_each_step_has_no_moment_without_the_other_batch():
    drawn = {"torch": "drawn", "python": "p"}
    plain = undisturbed(at_batch={BASE + 1: None}, at_forward={BASE + 1: drawn})
    assert "between attach and the first step:" in judged(moved("torch"), plain=plain).causes[0].text
    plain = undisturbed(at_batch={BASE + 1: drawn}, at_forward={BASE + 1: drawn})
    assert f"between {FROM_ATTACH}:" in judged(moved("torch", at_batch=MOVED), plain=plain).causes[0].text


def test_a_generator_that_attach_brought_back_wrongly_moved_at_no_moment():
    restarted = moved("torch", at_batch=MOVED)
    wrong = replace(restarted, attach=replace(restarted.attach, generators=MOVED))
    result = judged(wrong)
    assert result.difference.kind is DifferenceKind.ATTACH_GENERATORS
    assert "between attach and the first step:" in result.causes[0].text


def test_many_places_are_counted():
    assert "train.py:42 and 2 more lines." in judged(moved(*["torch"] * 5)).causes[0].text


def test_a_generator_that_moved_and_was_put_back_is_no_cause():
    restarted = attempt(BASE, LAST, leaves={BASE + 1: {}})
    restarted.moves.append(MoveRecord("torch", "train.py", 4, "iter(loader)"))
    assert kinds(judged(restarted)) == []


def test_a_generator_that_moved_before_other_inputs_is_a_cause():
    restarted = attempt(BASE, LAST, inputs={step: ["x"] for step in range(BASE, LAST + 1)})
    restarted.moves.append(MoveRecord("torch", "train.py", 4, "iter(loader)"))
    assert kinds(judged(restarted)) == ["moved-generator"]


def test_a_line_that_moved_a_generator_explains_no_later_step():
    restarted = attempt(BASE, LAST, at_forward={BASE + 2: {"torch": "x", "python": "p"}})
    restarted.moves.append(MoveRecord("torch", "train.py", 4, "iter(loader)"))
    assert kinds(judged(restarted)) == []


def test_lines_that_move_a_generator_in_each_step_are_named_last():
    restarted = moved("torch", "torch")
    plain = undisturbed()
    plain.moves += [restarted.moves[1], replace(restarted.moves[0], is_usual=True)]
    assert "first forward: `for x in loader:` at train.py:41." in judged(restarted, plain=plain).causes[0].text
    plain.moves.append(replace(restarted.moves[1], is_usual=True))
    assert "at train.py:40, " in judged(restarted, plain=plain).causes[0].text


def test_what_was_not_seen_is_said_where_it_matters():
    restarted = moved()
    restarted.untraced = "a debugger"
    assert judged(restarted).unseen == ["lines of the script that move a generator: a debugger"]
    equal = attempt(BASE, LAST)
    equal.untraced = "a debugger"
    assert judged(equal).unseen == []
    unseen = {step: [] for step in range(1, LAST + 6)}
    blind = judged(attempt(BASE, LAST, inputs=unseen), plain=undisturbed(inputs=unseen))
    assert blind.outcome is RehearsalOutcome.EQUAL
    assert blind.unseen == ["inputs of the model, on 1 rank: no call of its forward was seen there"]


def with_rate(step: int) -> RehearsedAttempt:
    return attempt(BASE, LAST, groups={step: {"optimizer.0.0": {"lr": 0.2}}})


def test_a_forgotten_scheduler_by_name():
    restarted = with_rate(BASE + 4)
    restarted.alive.append(SCHEDULER)
    result = judged(restarted)
    assert (kinds(result), result.difference.names) == (["forgotten-scheduler"], ["optimizer.0.0.lr"])
    assert "schedule (StepLR)" in result.causes[0].text and '{"lr": schedule}' in result.causes[0].remedy


def test_a_learning_rate_without_scheduler():
    assert kinds(judged(with_rate(BASE + 1))) == ["other-settings"]


def test_a_setting_that_no_scheduler_writes_has_no_cause():
    assert kinds(judged(attempt(BASE, LAST, groups={BASE + 1: {"optimizer.0.0": {"lr": 0.1, "eps": 1}}}))) == []


def test_regrouped_sums():
    restarted = attempt(BASE, LAST, leaves={BASE + 1: {"w": "x", "b": "b11"}})
    regrouped = replace(restarted, attach=replace(restarted.attach, regroups=True))
    assert kinds(judged(regrouped)) == ["regrouped-sums"]
    assert kinds(judged(restarted)) == []
    late = attempt(BASE, LAST, leaves={BASE + 2: {"w": "x", "b": "b12"}})
    assert kinds(judged(replace(late, attach=replace(late.attach, regroups=True)))) == []
    regrouped.marks[BASE + 1] = replace(regrouped.marks[BASE + 1], inputs=["x"])
    assert "regrouped-sums" not in kinds(judged(regrouped))


@pytest.mark.parametrize(
    ("each", "kind"),
    [(SCHEDULER, "forgotten-scheduler"), (EMA, "forgotten-ema"), (SCALER, "forgotten-scaler"),
     (CRITIC, "forgotten-module"), (AliveObject("optimizer", "SGD", "other"), "forgotten-optimizer")],
)  # fmt: skip
def test_state_that_is_alive_and_forgotten_fails_an_equal_run(each, kind):
    restarted = attempt(BASE, LAST)
    restarted.alive += [each, each]
    result = judged(restarted)
    assert (result.outcome, kinds(result)) == (RehearsalOutcome.FORGOTTEN, [kind])
    assert "more" not in result.causes[0].text  # both runs name the same object
    assert result.suspects == []


@pytest.mark.parametrize("each", [LOADER, COUNTER])
def test_state_that_may_not_matter_is_only_mentioned(each):
    restarted = attempt(BASE, LAST)
    restarted.alive.append(each)
    result = judged(restarted)
    assert (result.outcome, kinds(result), result.suspects) == (RehearsalOutcome.EQUAL, [], [each])


def test_objects_that_are_alive_are_causes_of_a_difference():
    restarted = attempt(BASE, LAST, leaves={BASE + 1: {}})
    restarted.alive += [COUNTER, EMA, AliveObject("unheard-of", "X", "x")]
    result = judged(restarted)
    assert kinds(result) == ["forgotten-object", "forgotten-ema"]
    assert "counter (Counter)" in result.causes[0].text


# Before the kill


def judged_before(first: RehearsedAttempt) -> RehearsalResult:
    result = judged(attempt(BASE, LAST), first=first)
    assert result.outcome is RehearsalOutcome.NOT_DETERMINISTIC
    return result


def test_an_unseeded_worker_and_hash_order():
    first = attempt(0, BASE, inputs={1: ["x", "j1"]}, leaves={1: {}})
    assert kinds(judged_before(first)) == ["unseeded-data"]
    result = judged_before(replace(first, attach=replace(first.attach, hash_sample=2)))
    assert kinds(result) == ["unseeded-data", "hash-order"]
    assert "PYTHONHASHSEED=0" in result.causes[1].remedy


def test_an_unseeded_generator_that_training_uses_is_the_first_cause():
    first = attempt(0, BASE, generators={"torch": "other", "python": "p"}, inputs={1: ["x"]})
    result = judged_before(first)
    assert (kinds(result), result.causes[0].text.split(":")[0]) == (["unseeded-generator"], "torch")


def test_an_unseeded_generator_that_training_does_not_use_is_the_last_cause():
    first = attempt(0, BASE, generators={"torch": "g0", "python": "other"}, inputs={1: ["x"]})
    result = judged_before(first)
    assert (kinds(result), result.causes[1].text.split(":")[0]) == (["unseeded-data", "unseeded-generator"], "python")


def test_a_generator_that_only_differs_is_no_difference():
    first = attempt(0, BASE, generators={"torch": "g0", "python": "other"})
    result = judged(attempt(BASE, LAST), first=first)
    assert (result.outcome, result.unseeded) == (RehearsalOutcome.EQUAL, ["python"])


def test_each_side_of_the_kill_has_what_was_reached_there_up_to_the_last_step():
    saves = {3: ["torch.save at a.py:1"], 15: ["torch.save at a.py:1"], LAST + 1: ["torch.save at a.py:2"]}
    saves = {step: saves.get(step, []) for step in range(1, LAST + 6)}
    result = judged(attempt(BASE, LAST + 2, saves=saves), plain=undisturbed(saves=saves))
    sides = [side[MomentKind.CHECKPOINT].after_step for side in (result.reached_before, result.reached_after)]
    assert (result.outcome, sides) == (RehearsalOutcome.EQUAL, [2, 14])
    saves[3] = saves[15] = []
    result = judged(attempt(BASE, LAST + 2, saves=saves), plain=undisturbed(saves=saves))
    assert result.reached_before == result.reached_after == {MomentKind.CHECKPOINT: None}
