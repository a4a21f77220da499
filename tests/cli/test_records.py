"""Reads what trainers wrote, and compares two trainings. Pure."""

from __future__ import annotations

import json

import pytest

from reft.cli.demo.records import RankAttempt, TrainedStep, TrainingResult, compare, parse, read_result, recovery
from reft.cli.demo.run import scenario_of
from reft.cli.demo.scenario import CopyKill, OutsideKill, SeenFault
from reft.failpoints import Failpoints


def attempt(first: int, last: int, started_s: float = 0.0, **changes: object) -> RankAttempt:
    steps = [TrainedStep(n, (1 / n).hex(), started_s + n) for n in range(first, last + 1)]
    restored = "memory" if first > 1 else None
    return RankAttempt(**{"pid": 1, "started_s": started_s, "attached_s": started_s, "restored_from": restored,
                      "base": first - 1, "load_s": 0.5, "steps": steps, **changes})  # fmt: skip


def result(*attempts: RankAttempt, digest: str = "aa") -> TrainingResult:
    digests = {"parameter w": digest, "optimizer w.exp_avg": "bb", "random generator": "cc"}
    return TrainingResult({0: list(attempts), 1: list(attempts)}, {0: digests, 1: digests})


PLAIN = result(attempt(1, 6))
DISTURBED = result(attempt(1, 4), attempt(4, 6, started_s=10.0))


def test_lines_become_attempts():
    lines = [
        {"event": "started", "pid": 5, "time_s": 1.0},
        {"event": "started", "pid": 6, "time_s": 2.0},
        {"event": "attached", "restored_from": "memory", "step": 3, "load_s": 0.5, "time_s": 3.0},
        {"event": "step", "step": 4, "loss": "0x1.0p+0", "time_s": 4.0},
    ]
    died, lived = parse(map(json.dumps, lines))
    assert died == RankAttempt(5, 1.0)
    assert lived == RankAttempt(6, 2.0, 3.0, "memory", 3, 0.5, [TrainedStep(4, "0x1.0p+0", 4.0)])


def test_an_unfinished_line_is_not_read(tmp_path):
    (tmp_path / "rank-0.jsonl").write_text('{"event": "started", "pid": 5, "time_s": 1.0}\n{"event": "st')
    assert read_result(tmp_path, 2).attempts == {0: [RankAttempt(5, 1.0)], 1: []}


def test_equal_trainings():
    comparison = compare(DISTURBED, PLAIN, 6)
    assert comparison.differences == []
    assert (
        comparison.ranks,
        comparison.losses,
        comparison.trained_twice,
        comparison.parameters,
        comparison.optimizer_tensors,
    ) == (
        2,
        12,
        1,
        1,
        1,
    )


@pytest.mark.parametrize(
    ("disturbed", "plain", "what"),
    [
        (result(attempt(1, 4), attempt(4, 6), digest="other"), PLAIN, "parameter w differs"),
        (result(attempt(1, 4), attempt(4, 5)), PLAIN, "disturbed run lacks"),
        (result(attempt(1, 3), attempt(5, 6)), PLAIN, "disturbed run lacks"),
        (DISTURBED, result(attempt(1, 5)), "undisturbed run lacks"),
        (TrainingResult(DISTURBED.attempts, {0: {}, 1: {}}), PLAIN, "digests of a run are missing"),
        (TrainingResult({0: DISTURBED.attempts[0]}, DISTURBED.digests), PLAIN, "rank 1: the disturbed run lacks"),
    ],
)
def test_every_kind_of_difference_is_found(disturbed, plain, what):
    assert any(what in line for line in compare(disturbed, plain, 6).differences)


@pytest.mark.parametrize("step", [3, 4, 5])
def test_an_altered_loss_is_found_also_in_a_step_trained_twice(step):
    first = attempt(1, 4)
    second = attempt(4, 6)
    for steps in (first.steps, second.steps):
        for i, trained in enumerate(steps):
            if trained.step == step:
                steps[i] = TrainedStep(step, (float.fromhex(trained.loss) + 2**-50).hex(), trained.time_s)
                altered = TrainingResult({0: [first, second], 1: DISTURBED.attempts[1]}, DISTURBED.digests)
                (line,) = compare(altered, PLAIN, 6).differences
                assert line.startswith(f"rank 0 step {step}: loss")
                return
    raise AssertionError("no step was altered")


def test_recovery_is_measured_from_the_kill():
    back = recovery(DISTURBED, killed_s=5.0)
    assert (back.up_s, back.load_s, back.first_step_s, back.base, back.source) == (5.0, 0.5, 9.0, 3, "memory")
    assert recovery(PLAIN, killed_s=5.0) is None
    early, late = attempt(4, 6, 10.0, attached_s=14.0, load_s=4.0), attempt(4, 6, 10.0, attached_s=13.5, load_s=1.5)
    apart = recovery(TrainingResult({0: [early], 1: [late]}, {}), killed_s=5.0)
    assert apart.load_s == 2.0, "the first rank waited for the second"
    half = TrainingResult({0: DISTURBED.attempts[0], 1: [attempt(1, 4)]}, {})
    assert recovery(half, killed_s=5.0) is None


def test_a_fault_is_overcome_only_by_the_expected_restore():
    back = recovery(DISTURBED, 5.0)
    assert SeenFault(CopyKill(1, 4), 5.0, {}, back).is_overcome
    assert not SeenFault(CopyKill(1, 3), 5.0, {}, back).is_overcome, "the torn snapshot was restored"
    assert SeenFault(OutsideKill((0,), 3), 5.0, {}, back).is_overcome
    assert not SeenFault(OutsideKill((0,), 7), 5.0, {}, back).is_overcome, "a much older step was restored"
    assert not SeenFault(OutsideKill((0,), 3), 5.0, {}).is_overcome


def test_progress():
    assert DISTURBED.completed == 6
    assert result(attempt(1, 4), RankAttempt(2, 9.0)).completed == 4
    assert TrainingResult({0: [], 1: []}, {}).completed == 0
    assert PLAIN.losses(2) == [1 / 5, 1 / 6]


def test_the_failpoint_of_the_demo_is_valid():
    fault = scenario_of(60, 4).faults[0]
    points = Failpoints(fault.failpoint)
    assert not points.hit("snapshot.chunk", rank=1, step=20, epoch=2, chunk=1)
    assert "snapshot.chunk" in points._entries
