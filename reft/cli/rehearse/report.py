"""What a person and a script are told about a rehearsal."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from typing import Any, Final

from reft.cli.rehearse.run import RehearsalReport, RehearsalRequest
from reft.core.rehearsal.causes import LikelyCause
from reft.core.rehearsal.compare import MarkDifference
from reft.core.rehearsal.judge import RehearsalOutcome
from reft.core.rehearsal.reached import MomentKind, Reached, reached_lines
from reft.core.text import counted, every, more

SCHEMA_VERSION: Final = 1
EXIT_CODES: Final = {
    RehearsalOutcome.EQUAL: 0,
    RehearsalOutcome.DIFFERENT: 1,
    RehearsalOutcome.FORGOTTEN: 1,
    RehearsalOutcome.NOT_DETERMINISTIC: 2,
}
NAMES_SHOWN = 3
COLUMNS = 100


def first_lines(request: RehearsalRequest) -> Iterator[str]:
    """Yields what is said before the runs."""
    yield f"reft rehearse: {shlex.join(request.arguments)}"
    if request.folder is None:
        yield "The script runs twice, and writes its outputs twice, here. --cwd DIR runs it in fresh folders."


def report_lines(report: RehearsalReport) -> Iterator[str]:
    """Yields the judgement for a person."""
    result = report.result
    came_back = f"step {result.base} came back from {result.source}" if result.source else "nothing came back"
    yield f"Killed after step {report.killed_after}; {came_back}."
    if result.outcome is RehearsalOutcome.NOT_DETERMINISTIC:
        yield "NOT DETERMINISTIC BY ITSELF: the runs differ before the kill. Recovery has no part in it."
    elif result.outcome is RehearsalOutcome.DIFFERENT:
        yield "DIFFERENT: the run does not go on as if nothing had happened."
    elif result.outcome is RehearsalOutcome.FORGOTTEN:
        yield f"FORGOTTEN: bit-equal through step {result.through}, but a restart loses state of the script."
    else:
        yield f"bit-equal through step {result.through}; {result.recovery_s:.1f} s from the kill to the next step"
    if result.difference:
        yield from _field("first", difference_words(result.difference))
    remedies: set[str] = set()
    for cause in result.causes:
        yield from _field("state" if result.outcome is RehearsalOutcome.FORGOTTEN else "cause", cause.text)
        if cause.remedy not in remedies:
            yield from _field("remedy", cause.remedy)
        remedies.add(cause.remedy)
    if result.difference and not result.causes:
        yield from _field("cause", "not known: nothing that was recorded explains it")
    yield from _notes(report)
    if report.logs:
        yield f"Logs and records are in {report.logs}."


def difference_words(difference: MarkDifference) -> str:
    """Returns where two runs differ first."""
    names = ", ".join(difference.names[:NAMES_SHOWN]) + more(len(difference.names[NAMES_SHOWN:]), "name")
    return f"step {difference.step}, rank {difference.rank}: {difference.kind.value} ({names})"


def _field(label: str, text: str) -> Iterator[str]:
    """Yields a labelled text, in lines that fit a terminal."""
    yield from textwrap.wrap(
        text, COLUMNS, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14, break_on_hyphens=False
    )


def _notes(report: RehearsalReport) -> Iterator[str]:
    """Yields what was not compared, and what was not reached."""
    result = report.result
    compared = counted(result.compared, "step")
    yield from _field("compared", f"{compared} after the kill, on {every(result.ranks, 'rank')}")
    if result.unseeded and result.outcome is not RehearsalOutcome.NOT_DETERMINISTIC:
        yield from _field("set aside", f"{', '.join(result.unseeded)}: other in each run, so not compared")
    if result.outcome in (RehearsalOutcome.EQUAL, RehearsalOutcome.FORGOTTEN):
        for each in result.suspects:
            yield from _field("look", f"the {each.kind} {each} is not in state=: restarts make it anew")
    for text in result.unseen:
        yield from _field("not seen", text)
    for label, text in reached_lines(result.reached_before, result.reached_after).items():
        more_steps = ". Raise --steps to reach more." if label == "not reached" and not report.is_short else ""
        yield from _field(label, text + more_steps)
    beyond = f"what comes after step {result.through}"
    if report.is_short:
        beyond = f"what the script does only in runs of more than {counted(report.steps, 'step')}"
    yield from _field("not tried", beyond)


def document(report: RehearsalReport) -> dict[str, Any]:
    """Returns the document of `rehearse --json`."""
    result, difference = report.result, report.result.difference
    return {
        "schema_version": SCHEMA_VERSION,
        "outcome": result.outcome.value,
        "command": list(report.request.arguments),
        "kill": report.request.kill,
        "ranks": result.ranks,
        "steps": report.steps,
        "killed_after": report.killed_after,
        "restored_step": result.base,
        "restored_from": result.source,
        "compared_through": result.through,
        "recovery_s": round(result.recovery_s, 2),
        "difference": difference
        and {
            "step": difference.step,
            "rank": difference.rank,
            "what": difference.kind.name.lower(),
            "names": list(difference.names),
        },
        "causes": [_cause_document(each) for each in result.causes],
        "unseeded": list(result.unseeded),
        "not_seen": list(result.unseen),
        "reached": {
            "before_kill": _reached_document(result.reached_before),
            "after_kill": _reached_document(result.reached_after),
        },
        "not_in_state": [{"kind": each.kind, "type": each.type, "name": each.name} for each in result.suspects],
        "logs": str(report.logs) if report.logs else None,
    }


def _reached_document(moments: Reached) -> dict[str, dict[str, Any]]:
    return {kind.name.lower(): _moment_document(moments, kind) for kind in MomentKind}


def _moment_document(moments: Reached, kind: MomentKind) -> dict[str, Any]:
    if event := moments.get(kind):
        return {"state": "reached", "after_step": event.after_step, "how": event.how}
    return {"state": "not reached" if kind in moments else "not seen", "after_step": None, "how": None}


def _cause_document(cause: LikelyCause) -> dict[str, str]:
    return {"kind": cause.kind, "cause": cause.text, "remedy": cause.remedy}
