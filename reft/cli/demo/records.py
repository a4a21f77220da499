"""Reads and compares the records of trainers. Pure functions, except `read_result`.

rank-R.jsonl          ─► attempts of rank R: each start of its process, with the steps it trained
rank-R.digests.json   ─► name → SHA-256 of every tensor at the end
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TrainedStep:
    """One trained step: its number (steps completed), loss as float.hex, and monotonic time."""

    step: int
    loss: str
    time_s: float


@dataclass
class RankAttempt:
    """One process of one rank.

    Attributes:
        attached_s: when attach returned; None if the process ended before.
        base: the step from which the process began.
        load_s: how long attach took.
    """

    pid: int
    started_s: float
    attached_s: float | None = None
    restored_from: str | None = None
    base: int = 0
    load_s: float = 0.0
    steps: list[TrainedStep] = field(default_factory=list)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a whole training: attempts and final digests of every rank."""

    attempts: Mapping[int, Sequence[RankAttempt]]
    digests: Mapping[int, Mapping[str, str]]

    @property
    def completed(self) -> int:
        """Returns how many steps every rank has completed in its newest attempt."""
        return min((_last(attempts) for attempts in self.attempts.values()), default=0)

    def losses(self, last: int) -> list[float]:
        """Returns the mean loss over ranks for the newest `last` steps that all ranks completed."""
        end = self.completed
        by_step: dict[int, dict[int, float]] = {}
        for rank, attempts in self.attempts.items():
            for step in (s for a in attempts for s in a.steps if end - last < s.step <= end):
                by_step.setdefault(step.step, {})[rank] = float.fromhex(step.loss)
        return [sum(values.values()) / len(values) for _, values in sorted(by_step.items())]


def _last(attempts: Sequence[RankAttempt]) -> int:
    for attempt in reversed(attempts):
        if attempt.attached_s is not None:
            return attempt.steps[-1].step if attempt.steps else attempt.base
    return 0


def read_result(folder: Path, world: int) -> TrainingResult:
    """Returns the records that the ranks of a training have written so far."""
    attempts, digests = {}, {}
    for rank in range(world):
        records, ends = folder / f"rank-{rank}.jsonl", folder / f"rank-{rank}.digests.json"
        text = records.read_text() if records.exists() else ""
        attempts[rank] = parse(text.rpartition("\n")[0].splitlines())  # the last line may be unfinished
        # The file is complete if it exists: the writer renames it into place.
        digests[rank] = json.loads(ends.read_text()) if ends.exists() else {}
    return TrainingResult(attempts, digests)


def parse(lines: Iterable[str]) -> list[RankAttempt]:
    """Returns the attempts of one rank, oldest first.

    Raises:
        ValueError: a line is not what `reft.demo.train` writes.
    """
    attempts: list[RankAttempt] = []
    for line in lines:
        entry = json.loads(line)
        if entry["event"] == "started":
            attempts.append(RankAttempt(entry["pid"], entry["time_s"]))
        elif entry["event"] == "attached":
            attempts[-1].attached_s = entry["time_s"]
            attempts[-1].restored_from, attempts[-1].base = entry["restored_from"], entry["step"]
            attempts[-1].load_s = entry.get("load_s", 0.0)  # some trainers that write such records do not measure it
        elif entry["event"] == "step":
            attempts[-1].steps.append(TrainedStep(entry["step"], entry["loss"], entry["time_s"]))
        else:
            raise ValueError(f"unknown event {entry['event']!r}")
    return attempts


@dataclass(frozen=True)
class RecoveryTimes:
    """The times and the base of a recovery after a kill. Times are seconds after the kill.

    Attributes:
        up_s: until all ranks ran the script again.
        load_s: from the last rank's call of attach, which restores the state, to the last return.
        first_step_s: until all ranks had trained a step.
        base: the step that was restored.
        source: where the step was restored from; None if nothing was restored.
    """

    up_s: float
    load_s: float
    first_step_s: float
    base: int
    source: str | None


def recovery(result: TrainingResult, killed_s: float) -> RecoveryTimes | None:
    """Returns how the training recovered from a kill at `killed_s`; None if it has not."""
    following = []
    for attempts in result.attempts.values():
        later = [attempt for attempt in attempts if attempt.started_s > killed_s and attempt.steps]
        if not later:
            return None
        following.append(later[0])
    first = following[0]
    if any((attempt.base, attempt.restored_from) != (first.base, first.restored_from) for attempt in following):
        return None
    return RecoveryTimes(
        max(attempt.started_s for attempt in following) - killed_s,
        _load_s([(attempt.attached_s, attempt.load_s) for attempt in following if attempt.attached_s is not None]),
        max(attempt.steps[0].time_s for attempt in following) - killed_s,
        first.base,
        first.restored_from,
    )


def _load_s(attached: Sequence[tuple[float, float]]) -> float:
    """Returns the time from the last rank's call of attach to the last return.

    Ranks that called attach earlier waited for the others.

    Args:
        attached: for each rank: when attach returned, and how long it took.
    """
    return max(end for end, _ in attached) - max(end - took for end, took in attached)


@dataclass(frozen=True)
class BitComparison:
    """Two trainings, compared bit by bit; `differences` is empty if they are equal."""

    ranks: int
    losses: int
    trained_twice: int  # steps that were trained more than once; the largest number of any rank
    parameters: int
    optimizer_tensors: int
    differences: Sequence[str]


def compare(disturbed: TrainingResult, plain: TrainingResult, steps: int) -> BitComparison:
    """Compares every loss of every rank, and every final tensor.

    A step that was trained twice must have the same loss both times. A missing step is a
    difference.

    Args:
        disturbed: the training with faults.
        plain: the training without faults.
        steps: the steps of each training.
    """
    differences = []
    losses = twice = 0
    for rank in sorted(plain.attempts):
        expected = {step.step: step.loss for attempt in plain.attempts[rank] for step in attempt.steps}
        trained = [step for attempt in disturbed.attempts.get(rank, ()) for step in attempt.steps]
        for step in trained:
            if step.loss != expected.get(step.step):
                other = float.fromhex(expected[step.step]) if step.step in expected else None
                differences.append(f"rank {rank} step {step.step}: loss {float.fromhex(step.loss)!r}, not {other!r}")
        for name, numbers in (("disturbed", {step.step for step in trained}), ("undisturbed", set(expected))):
            if numbers != set(range(1, steps + 1)):
                missing = sorted(set(range(1, steps + 1)) ^ numbers)
                differences.append(f"rank {rank}: the {name} run lacks steps, or has too many: {missing[:8]}")
        losses += len(expected)
        twice = max(twice, len(trained) - len({step.step for step in trained}))
        differences += _differing(rank, disturbed.digests.get(rank, {}), plain.digests.get(rank, {}))
    names = plain.digests.get(0, {})
    return BitComparison(
        len(plain.attempts),
        losses,
        twice,
        sum(name.startswith("parameter ") for name in names),
        sum(name.startswith("optimizer ") for name in names),
        differences,
    )


def _differing(rank: int, one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    if not one or not other:
        return [f"rank {rank}: the digests of a run are missing"]
    return [f"rank {rank}: {name} differs" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
