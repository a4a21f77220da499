"""Results of benchmarks as JSON; one file holds one run.

Programs write these files, and bench/report.py reads them.

    {
      "title":   "Attach with 2,000 leaves"   heading of a table; runs of one title share one table
      "run":     "before"                     heading of this run's column; null: "measured"
      "program": "bench/attach.py"            the program that measured
      "command": "python bench/attach.py"     as typed, without --json and without folders
      "date":    "2026-11-24"                 ISO 8601, a time of day may follow
      "machine": {"cpu": "AMD EPYC", "cores": 2, "memory_gib": 8.0, "kernel": "6.1.0",
                  "python": "3.11.2", "torch": "2.13.0"}
      "commit":  "7f3928b"                    "-dirty" follows where files were changed
      "source":  null                         for figures copied from a text: text and commit
      "rows":    [{"name": "fresh", "unit": "s", "goal": "<= 2", "value": 1.22}]
      "notes":   ["Nothing else ran."]        sentences for the reader of the table
      "details": {}                           optional: all measurements; not in the report
    }

An unknown fact is null: run, command, date, commit, source, each fact of the machine, goal and
value may be. A row may also have p50, p99, min, max (numbers) and each (a list: single
measurements). A goal is "<=", "<" or ">=" with a number. Numbers are printed with the digits that
the file has.
"""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXT, NUMBER, LIST, OBJECT = "a text", "a number", "a list", "an object"
RESULT = {
    "title": TEXT, "run": TEXT, "program": TEXT, "command": TEXT, "date": TEXT, "machine": OBJECT, "commit": TEXT,
    "source": TEXT, "rows": LIST, "notes": LIST,
}  # fmt: skip
MACHINE = {"cpu": TEXT, "cores": NUMBER, "memory_gib": NUMBER, "kernel": TEXT, "python": TEXT, "torch": TEXT}
ROW = {"name": TEXT, "unit": TEXT, "goal": TEXT, "value": NUMBER}
MAY_FOLLOW = {"p50": NUMBER, "p99": NUMBER, "min": NUMBER, "max": NUMBER, "each": LIST}
NEVER_NULL = {"title", "program", "machine", "rows", "notes", "name", "unit", *MAY_FOLLOW}
TYPES = {TEXT: str, NUMBER: (int, Decimal), LIST: list, OBJECT: dict}
GOAL = re.compile(r"(<=|<|>=) (-?\d+(?:\.\d+)?)")
Number = int | float | Decimal


class ResultError(ValueError):
    """A file that is no result.

    The message names the value, what is allowed, and what to change.
    """


@dataclass(frozen=True)
class Row:
    """One figure, its goal and its spread."""

    name: str
    unit: str
    goal: str | None
    value: Number | None
    p50: Number | None = None
    p99: Number | None = None
    min: Number | None = None
    max: Number | None = None
    each: tuple[Number, ...] = ()

    @property
    def is_missed(self) -> bool:
        """Whether a figure is outside the goal.

        Checks the value, or else the single measurements, or else minimum and maximum.
        """
        if self.goal is None:
            return False
        sign, limit = self.goal.split(" ")
        ends = [end for end in (self.min, self.max) if end is not None]
        figures: Sequence[Number] = [self.value] if self.value is not None else self.each or ends
        met = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}[sign]
        return not all(met(float(each), float(limit)) for each in figures)


@dataclass(frozen=True)
class Result:
    """One run, as its file describes it."""

    file: str
    title: str
    run: str | None
    program: str
    command: str | None
    date: str | None
    machine: dict[str, Any]
    commit: str | None
    source: str | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


# Write


def write(
    path: Path, program: str, title: str, rows: Sequence[Row], notes: Sequence[str] = (), details: Any = None
) -> None:
    """Writes the results of this process to a file, with date, command, machine and commit.

    Args:
        program: `__file__` of the program.
        details: all other measurements, for other programs.
    """
    document = {
        "title": title,
        "run": None,
        "program": f"bench/{Path(program).name}",
        "command": command_line(program, sys.argv[1:]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": this_machine(),
        "commit": commit(),
        "source": None,
        "rows": [row_to_json(row) for row in rows],
        "notes": list(notes),
    }
    path.write_text(json.dumps(document if details is None else {**document, "details": details}, indent=1) + "\n")


def row_to_json(row: Row) -> dict[str, Any]:
    """Returns a row without its missing fields, and with three digits of each number."""
    document: dict[str, Any] = {"name": row.name, "unit": row.unit, "goal": row.goal, "value": rounded(row.value)}
    document |= {
        key: rounded(getattr(row, key)) for key in ("p50", "p99", "min", "max") if getattr(row, key) is not None
    }
    return document | ({"each": [rounded(each) for each in row.each]} if row.each else {})


def rounded(value: Number | None) -> int | float | None:
    """Returns three digits of a number: more digits are noise.

    NaN means that nothing was measured; it becomes null in JSON.
    """
    if value is None or math.isnan(value):
        return None
    return round(value) if abs(float(value)) >= 100 else float(f"{value:.3g}")


def command_line(program: str, arguments: Sequence[str]) -> str:
    """Returns the typed command, without --json.

    Only the file name of a path stays, so that no folder is published.
    """
    kept, is_file = [], False
    for each in arguments:
        if not is_file and not each.startswith("--json="):
            kept.append(each)
        is_file = each == "--json"
    kept = [Path(each).name if os.sep in each else each for each in kept if each != "--json"]
    openmp = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("OMP_")]
    return shlex.join([*openmp, "python", f"bench/{Path(program).name}", *kept])


def this_machine() -> dict[str, Any]:
    """Returns facts that decide how fast this machine is; no name and no path."""
    models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": models[0] if models else None,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def commit() -> str | None:
    """Returns the commit of this checkout, or None without a checkout or git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# Read


def read(path: Path) -> Result:
    """Reads a result from a file.

    Raises:
        ResultError: The file holds no result.
    """
    try:
        document = json.loads(path.read_text(), parse_float=Decimal, parse_constant=_no_constant)
    except ValueError as error:
        raise ResultError(
            f"{path.name} is no JSON: {error}. Write it with --json FILE of a program in bench, or correct it there."
        ) from error
    _check(path.name, document, RESULT, {"details": OBJECT})
    _check(f"{path.name}, machine", document["machine"], MACHINE)
    for i, row in enumerate(document["rows"]):
        where = f"{path.name}, rows[{i}]"
        _check(where, row, ROW, MAY_FOLLOW)
        _check_figures(where, row)
    for i, note in enumerate(document["notes"]):
        _check_type(f"{path.name}, notes[{i}]", note, TEXT)
    _check_date(path.name, document["date"])
    rows = tuple(Row(**{**row, "each": tuple(row.get("each", ()))}) for row in document["rows"])
    facts = {key: document[key] for key in RESULT}
    return Result(file=path.name, **{**facts, "rows": rows, "notes": tuple(document["notes"])})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON has; write null")


def _check(where: str, value: Any, fields: dict[str, str], may_follow: dict[str, str] | None = None) -> None:
    """Refuses anything but an object with exactly these fields."""
    _check_type(where, value, OBJECT)
    for name, kind in fields.items():
        if name not in value:
            null = "" if name in NEVER_NULL else " or null"
            raise ResultError(f"{where} has no {name!r}. It needs {', '.join(fields)}. Add {name!r}: {kind}{null}.")
    known = fields | (may_follow or {})
    for name, each in value.items():
        if name not in known:
            raise ResultError(
                f"{where} has {name!r}. It may have {', '.join(known)} only. Remove it, or correct its name."
            )
        if each is not None or name in NEVER_NULL:
            _check_type(f"{where}, {name!r}", each, known[name])


def _check_type(where: str, value: Any, kind: str) -> None:
    if not isinstance(value, TYPES[kind]) or isinstance(value, bool):  # type: ignore[arg-type]
        raise ResultError(f"{where} is {json.dumps(value, default=str)}. Only {kind} may stand there. Write {kind}.")


def _check_figures(where: str, row: dict[str, Any]) -> None:
    if row["goal"] is not None and not GOAL.fullmatch(row["goal"]):
        raise ResultError(
            f'{where}, goal is {row["goal"]!r}. It may be "<=", "<" or ">=" and a number. Write "<= 1.25".'
        )
    for each in row.get("each", ()):
        _check_type(f"{where}, 'each'", each, NUMBER)


def _check_date(where: str, date: str | None) -> None:
    try:
        datetime.fromisoformat(date or "2000-01-01")
    except ValueError:
        raise ResultError(
            f"{where}, date is {date!r}. It must be a date of ISO 8601. Write 2026-11-24, or null."
        ) from None
