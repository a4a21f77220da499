"""Writes the tables of bench/README.md from the results in bench/results: make bench-report.

    python bench/report.py [--results FOLDER] [--page FILE]

The text outside the two marker comments of the page stays. The text between them is generated. Runs
with the same title share a table, with a column for each run. bench/result.py describes a file of
results.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.result import Result, ResultError, Row, read

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- make bench-report writes the text from here on; change bench/results instead -->"
END = "<!-- make bench-report writes no more from here on -->"
WIDTH = 100
SIGNS = {"<=": "≤", "<": "<", ">=": "≥"}
OF_VENV = re.compile(r"^((?:\w+=\S* )*)(python|pytest)(?= )")


def results(folder: Path) -> list[Result]:
    """Returns all results of a folder, in the order of their file names."""
    return [read(path) for path in sorted(folder.glob("*.json"))]


def tables(found: Sequence[Result]) -> str:
    """Returns a section for each title, in the order of the file names."""
    titles = list(dict.fromkeys(each.title for each in found))
    return "\n".join(section(title, [each for each in found if each.title == title]) for title in titles)


def section(title: str, runs: Sequence[Result]) -> str:
    """Returns heading, facts and command of each run, the table, and notes."""
    parts = [f"### {title}\n"]
    for run in runs:
        parts.append(wrapped(facts(run), ""))
        parts.append(f"\n    {shown(run.command)}\n" if run.command else "")
    heads = [run.run or "measured" for run in runs]
    parts += [f"| | unit | goal | {' | '.join(heads)} |", "|---" * (3 + len(runs)) + "|"]
    names = dict.fromkeys((row.name, row.unit) for run in runs for row in run.rows)
    for name, unit in names:
        same = [next((row for row in run.rows if (row.name, row.unit) == (name, unit)), None) for run in runs]
        goals = dict.fromkeys(goal(row) for row in same if row and row.goal)
        parts.append(f"| {name} | {unit} | {', '.join(goals)} | {' | '.join(cell(row) for row in same)} |")
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return "\n".join([*parts, "", *(wrapped(note) for note in notes), *([""] if notes else [])])


def facts(run: Result) -> str:
    """Returns when, where and by which program a run was measured."""
    machine = run.machine
    known = [
        run.date or "date not written down",
        machine["cpu"],
        f"{machine['cores']} cores" if machine["cores"] else None,
        f"{machine['memory_gib']} GiB" if machine["memory_gib"] else None,
        *(f"{name} {machine[key]}" for name, key in (("Linux", "kernel"), ("Python", "python"), ("torch", "torch"))
          if machine[key]),
        None if any(machine.values()) else "machine not written down",
        f"commit {run.commit}" if run.commit else None,
        run.source,
        None if run.command else "command not written down",
    ]  # fmt: skip
    head = f"**{run.run or 'measured'}**, [`{run.program}`](results/{run.file}): "
    return head + "; ".join(each for each in known if each) + "."


def shown(command: str) -> str:
    """Returns a command in a form that works without an activated environment."""
    return OF_VENV.sub(r"\1.venv/bin/\2", command)


def goal(row: Row) -> str:
    sign, limit = (row.goal or "").split(" ")
    return f"{SIGNS[sign]} {limit}"


def cell(row: Row | None) -> str:
    """Returns the figures of a row, as one cell of a table."""
    if row is None:
        return ""
    spread = {
        (True, True): f"{row.min} to {row.max}",
        (True, False): f"at least {row.min}",
        (False, True): f"at most {row.max}",
        (False, False): "",
    }[row.min is not None, row.max is not None]
    first = str(row.value) if row.value is not None else ", ".join(map(str, row.each))
    parts = [f"{first} ({spread})" if first and spread else first or spread]
    parts += [f"p50 {row.p50}"] if row.p50 is not None else []
    parts += [f"p99 {row.p99}"] if row.p99 is not None else []
    return "; ".join(each for each in parts if each) + (" **missed**" if row.is_missed else "")


def wrapped(text: str, mark: str = "* ") -> str:
    """Returns a paragraph, or one point of a list, in lines. Each has at most WIDTH columns."""
    indent = " " * len(mark)
    return textwrap.fill(
        text, WIDTH, initial_indent=mark, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def page(text: str, generated: str) -> str:
    """Returns the page with these tables between its marker comments."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        missing = END if begin else BEGIN
        raise ResultError(f"The page lacks the line {missing!r}. The tables need two marker lines. Put the line back.")
    return f"{before}{BEGIN}\n\n{generated.rstrip()}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder with files of results")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="page with two marker comments")
    options = parser.parse_args()
    try:
        options.page.write_text(page(options.page.read_text(), tables(results(options.results))))
    except ResultError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
