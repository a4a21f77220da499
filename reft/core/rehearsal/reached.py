"""What of the script a rehearsal reached, on each side of the kill.

    marks of all ranks ─► validation, epoch's end, checkpoint: each reached, not reached or not seen

Reached: a rank recorded the event. Not reached: the ranks would have recorded the event. In all
other cases the event was not seen, and nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from reft.core.rehearsal.compare import RankMarks
from reft.core.rehearsal.records import ForwardKind, MarkRecord


class MomentKind(Enum):
    """What scripts do now and then, beside their steps."""

    VALIDATION = "validation"
    EPOCH_END = "an epoch's end"
    CHECKPOINT = "the script's own checkpoint"


NOT_REACHED: Mapping[MomentKind, str] = {
    MomentKind.VALIDATION: "no forward of the model in eval mode or without gradients",
    MomentKind.EPOCH_END: "no pass over a loader of reft or torch ended",
    MomentKind.CHECKPOINT: "no torch.save of tensors",
}
NOT_SEEN: Mapping[MomentKind, str] = {
    MomentKind.VALIDATION: "a rank has no forward of the model in training mode",
    MomentKind.EPOCH_END: "no loader of reft or torch gave batches from mark to mark",
    MomentKind.CHECKPOINT: "calls of torch.save were not recorded",
}


@dataclass(frozen=True)
class ReachedEvent:
    """The first event of its kind on one side of the kill.

    Attributes:
        after_step: the event came after the mark of this step, and before the next mark.
        how: what was seen.
    """

    after_step: int
    how: str


Reached = Mapping[MomentKind, ReachedEvent | None]  # None: not reached. Not seen: no entry.


def reached(ranks: RankMarks) -> Reached:
    """Returns what was reached up to the last of these marks."""
    marks = [mark for each in ranks.values() for mark in each.values()]
    trains = any(map(_trains, ranks.values()))
    events = {
        MomentKind.VALIDATION: [(mark, how) for mark in marks for how in _validations(mark, trains)],
        MomentKind.EPOCH_END: [(mark, how) for mark in marks for how in mark.epoch_ends or ()],
        MomentKind.CHECKPOINT: [(mark, how) for mark in marks for how in mark.saves or ()],
    }
    is_seen = {
        MomentKind.VALIDATION: all(map(_trains, ranks.values())),
        # Some ranks may read no data.
        MomentKind.EPOCH_END: any(mark.epoch_ends is not None for mark in marks),
        MomentKind.CHECKPOINT: all(mark.saves is not None for mark in marks),
    }
    return {kind: _first(events[kind]) for kind in MomentKind if events[kind] or is_seen[kind]}


def _trains(marks: Mapping[int, MarkRecord]) -> bool:
    """Returns whether a rank has called the model in training mode."""
    return any(ForwardKind.TRAINING in mark.forwards for mark in marks.values())


def _validations(mark: MarkRecord, trains: bool) -> Iterator[str]:
    """Yields what shows a validation. Some scripts train in eval mode, with gradients."""
    if ForwardKind.EVAL in mark.forwards or (trains and ForwardKind.EVAL_WITH_GRADIENTS in mark.forwards):
        yield "a forward in eval mode"
    elif ForwardKind.WITHOUT_GRADIENTS in mark.forwards:
        yield "a forward without gradients"


def _first(events: Iterable[tuple[MarkRecord, str]]) -> ReachedEvent | None:
    first = min(events, key=lambda event: event[0].step, default=None)
    return ReachedEvent(first[0].step - 1, first[1]) if first else None


def reached_lines(before: Reached, after: Reached) -> dict[str, str]:
    """Returns what a person reads: "reached", "not reached" and "not seen" → a text.

    Args:
        before, after: the kill.
    """
    lines: dict[str, str] = {}
    for label in ("reached", "not reached", "not seen"):
        first, second = _words(before, label), _words(after, label)
        both = [each for each in first if each in second]  # what is the same is said once
        sides = (
            ("before the kill", [each for each in first if each not in both]),
            ("after the kill", [each for each in second if each not in both]),
            ("before and after the kill", both),
        )
        if texts := [f"{side}: {', '.join(words)}" for side, words in sides if words]:
            lines[label] = "; ".join(texts)
    return lines


def _words(moments: Reached, label: str) -> list[str]:
    """Returns what a label has of one side of the kill."""
    labelled = [(kind, *_label(moments, kind)) for kind in MomentKind]
    return [f"{kind.value} ({how})" for kind, its_label, how in labelled if its_label == label]


def _label(moments: Reached, kind: MomentKind) -> tuple[str, str]:
    if kind not in moments:
        return "not seen", NOT_SEEN[kind]
    event = moments[kind]
    return ("reached", f"{event.how}, after step {event.after_step}") if event else ("not reached", NOT_REACHED[kind])
