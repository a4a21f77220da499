"""Makes records of a rehearsal by hand: step n has inputs i<n> and j<n>, tensors w<n> and b<n>."""

from __future__ import annotations

from collections.abc import Mapping

from reft.core.rehearsal.records import AttachRecord, MarkRecord, RehearsedAttempt

STEP_S = 0.5


def attach(step: int, **changes: object) -> AttachRecord:
    """Returns the record of an attach that restored `step`; 0: a fresh start."""
    fields: dict[str, object] = {
        "rank": 0, "world": 1, "pid": 1, "step": step, "restored_from": "memory" if step else None, "time_s": 100.0,
        "generators": {"torch": f"g{step}", "python": "p"},
    }  # fmt: skip
    return AttachRecord(**{**fields, **changes})  # type: ignore[arg-type]


def mark(step: int, **changes: object) -> MarkRecord:
    """Returns the record of a mark."""
    fields: dict[str, object] = {
        "step": step,
        "time_s": 100.0 + step * STEP_S,
        "inputs": [f"i{step}", f"j{step}"],
        "at_batch": {"torch": f"g{step - 1}", "python": "p"},
        "at_forward": {"torch": f"g{step - 1}", "python": "p"},
        "generators": {"torch": f"g{step}", "python": "p"},
        "groups": {"optimizer.0.0": {"lr": 0.1}},
        "state": {"data": f"d{step}"},
        "leaves": {"w": f"w{step}", "b": f"b{step}"},
    }
    return MarkRecord(**{**fields, **changes})  # type: ignore[arg-type]


def marks(first: int, last: int) -> dict[int, MarkRecord]:
    """Returns the marks of these steps, both included."""
    return {step: mark(step) for step in range(first, last + 1)}


def attempt(base: int, last: int, generators: Mapping[str, str] | None = None, **changes: object) -> RehearsedAttempt:
    """Returns an attempt that restored `base` and marked up to `last`.

    Args:
        base: the restored step.
        last: the last marked step.
        generators: after attach.
        changes: field of a mark → step → another value.
    """
    begun = attach(base, **({} if generators is None else {"generators": generators}))
    found = {}
    for step in range(base + 1, last + 1):
        found[step] = mark(step, **{name: values[step] for name, values in changes.items() if step in values})  # type: ignore[index, operator, attr-defined]
    return RehearsedAttempt(begun, marks=found)
