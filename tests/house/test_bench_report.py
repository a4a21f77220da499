"""The tables of bench/README.md are those of bench/results, and each command on the page works."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from bench import report, result
from bench.result import ResultError, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "bench" / "README.md").read_text()
COMMANDS = re.findall(
    r"^ {4,}((?:\w+=\S* )*(?:\.venv/bin/|make |reft-|python |pytest |torchrun ).*)$", PAGE, re.MULTILINE
)
PROGRAMS = re.findall(r"^\| `bench/(\w+)\.py` \|", PAGE, re.MULTILINE)

MADE_UP = {
    "title": "Made up", "run": None, "program": "bench/save.py", "command": "OMP_A=1 python bench/save.py --quick",
    "date": "2026-01-02T03:04:05+00:00",
    "machine": {"cpu": "Abacus", "cores": 2, "memory_gib": 8.0, "kernel": "6.1.0", "python": None, "torch": None},
    "commit": "1234567", "source": None,
    "rows": [
        {"name": "time", "unit": "s", "goal": "<= 1.25", "value": 1.5, "min": 1.25, "max": 2, "p99": 1.75},
        {"name": "share", "unit": "", "goal": ">= 0.8", "value": 0.8},
        {"name": "single ones", "unit": "s", "goal": "< 5", "value": None, "each": [3, 5]},
        {"name": "ends", "unit": "s", "goal": None, "value": None, "min": 3, "max": 5},
    ],
    "notes": ["Nothing ran."],
}  # fmt: skip
RENDERED = """### Made up

**measured**, [`bench/save.py`](results/a.json): 2026-01-02T03:04:05+00:00; Abacus; 2 cores; 8.0
GiB; Linux 6.1.0; commit 1234567.

    OMP_A=1 .venv/bin/python bench/save.py --quick

| | unit | goal | measured |
|---|---|---|---|
| time | s | ≤ 1.25 | 1.5 (1.25 to 2); p99 1.75 **missed** |
| share |  | ≥ 0.8 | 0.8 |
| single ones | s | < 5 | 3, 5 **missed** |
| ends | s |  | 3 to 5 |

* Nothing ran.
"""


def stored(folder: Path, name: str = "a", **changed) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**MADE_UP, **changed}))
    return path


# The page


def test_the_page_is_what_make_bench_report_makes():
    made = report.page(PAGE, report.tables(report.results(ROOT / "bench" / "results")))
    assert made == PAGE, "run make bench-report; change files in bench/results, not the tables"


def test_each_line_of_prose_fits_into_a_diff():
    prose = [line for line in PAGE.splitlines() if not line.startswith(("|", "    "))]
    assert [line for line in prose if len(line) > report.WIDTH] == []


def test_each_program_is_on_the_page():
    ends = {path.stem for path in (ROOT / "bench").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert set(PROGRAMS) == ends - {"picture", "record_demo", "report", "recovery_trainer"} and len(PROGRAMS) > 10


class Parsed(Exception):
    """The program has read its options, and would begin."""


@pytest.fixture
def stops_once_parsed(monkeypatch):
    def parse_args(parser, *arguments):
        read(parser, *arguments)
        raise Parsed

    read = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.chdir(ROOT)


def begins(monkeypatch, program: str, arguments: list[str]) -> bool:
    """Whether a program takes these options."""
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    try:
        importlib.import_module(f"bench.{program}").main()
    except Parsed:
        return True
    except SystemExit as ended:
        return not ended.code  # --help
    return False


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_each_command_on_the_page_works(command, monkeypatch, stops_once_parsed):
    words = [each for each in shlex.split(command) if not re.match(r"\w+=", each)]
    if words[0] == "make":
        targets = re.findall(r"^([\w$(). -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] == ".venv/.ready" or words[1] in " ".join(targets).split()
    elif words[0] == ".venv/bin/pytest":
        paths = [word for word in words[1:] if word.startswith("tests/")]
        assert paths and all((ROOT / path).is_file() for path in paths)
    else:
        assert words[0] == ".venv/bin/python" and begins(monkeypatch, Path(words[1]).stem, words[2:])


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_can_write_its_results(program, monkeypatch, stops_once_parsed, tmp_path):
    assert begins(monkeypatch, program, ["--json", str(tmp_path / "new.json")])


# Rendering


def test_a_made_up_result_as_a_table(tmp_path):
    stored(tmp_path)
    assert report.tables(report.results(tmp_path)) == RENDERED


def test_runs_of_one_title_share_a_table(tmp_path):
    stored(tmp_path, "a", run="before", notes=[])
    stored(tmp_path, "b", run="after", rows=[{"name": "share", "unit": "", "goal": None, "value": 0.5}])
    made = report.tables(report.results(tmp_path))
    assert made.count("### ") == 1 and "| | unit | goal | before | after |" in made
    assert "| share |  | ≥ 0.8 | 0.8 | 0.5 |" in made and "| ends | s |  | 3 to 5 |  |" in made


def test_facts_that_nobody_wrote_down(tmp_path):
    stored(tmp_path, command=None, date=None, commit=None, machine=dict.fromkeys(MADE_UP["machine"]), source="copied")
    made = " ".join(report.tables(report.results(tmp_path)).split())
    assert "date not written down; machine not written down; copied; command not written down." in made


def test_digits_stay_as_the_file_has_them(tmp_path):
    path = stored(tmp_path)
    path.write_text(path.read_text().replace('"value": 0.8', '"value": 0.800'))
    assert "| 0.800 |" in report.tables(report.results(tmp_path))


def test_a_page_without_markers_stays_as_it_was(tmp_path, monkeypatch, capsys):
    stored(tmp_path)
    (tmp_path / "page.md").write_text(f"text\n{report.BEGIN}\nno end\n")
    monkeypatch.setattr(sys, "argv", ["report", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert report.main() == 1 and "need two marker lines. Put the line back." in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == f"text\n{report.BEGIN}\nno end\n"


# Malformed files


def row(**changed):
    return {"rows": [{"name": "a", "unit": "s", "goal": None, "value": 1, **changed}]}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"date": "yesterday"}, "a.json, date is 'yesterday'. It must be a date of ISO 8601. Write 2026-11-24, or null."),
        ({"title": None}, "a.json, 'title' is null. Only a text may stand there. Write a text."),
        ({"rows": {}}, "a.json, 'rows' is {}. Only a list may stand there. Write a list."),
        ({"host": "x"}, "a.json has 'host'. It may have title, "),
        ({"machine": {"cpu": "x"}}, "a.json, machine has no 'cores'. It needs cpu, cores, "),
        (row(value="7"), "a.json, rows[0], 'value' is \"7\". Only a number may stand there. Write a number."),
        (row(value=True), "a.json, rows[0], 'value' is true. Only a number may stand there."),
        (row(goal="small"), 'a.json, rows[0], goal is \'small\'. It may be "<=", "<" or ">=" and a number. Write "<= 1.25".'),
        (row(p99=None), "a.json, rows[0], 'p99' is null. Only a number may stand there."),
        (row(each=["x"]), "a.json, rows[0], 'each' is \"x\". Only a number may stand there."),
        (row(limit=3), "a.json, rows[0] has 'limit'. It may have name, "),
        ({"notes": [3]}, "a.json, notes[0] is 3. Only a text may stand there."),
    ],
)  # fmt: skip
def test_a_malformed_result_is_refused(changed, says, tmp_path):
    with pytest.raises(ResultError, match=re.escape(says)):
        result.read(stored(tmp_path, **changed))


@pytest.mark.parametrize("text", ["{", '{"title": NaN}', "[]", "{}"])
def test_a_file_that_is_no_result(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ResultError, match=r"^a\.json (is|has) .*(Write|Add) "):
        result.read(tmp_path / "a.json")


# Writing


def test_a_program_writes_what_the_report_reads(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new.json"
    monkeypatch.setattr(sys, "argv", ["pacing", "--chunks", "10", "--json", str(path)])
    importlib.import_module("bench.pacing").main()
    found = result.read(path)
    assert found.command == "python bench/pacing.py --chunks 10" and str(tmp_path) not in path.read_text()
    assert found.machine["cores"] and found.machine["torch"] and found.date and found.source is None
    assert [each.name for each in found.rows] == ["10 chunks, 0 columns of parity, 60 gaps"]
    assert "### Plan of where chunks go" in report.tables([found])


def test_of_a_path_only_the_name_is_published(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    arguments = ["--json=/a/b.json", "--trace", "/a/c.json", "--quick", "--json", "/a/d.json", "--mib", "3"]
    made = result.command_line("/a/bench/load.py", arguments)
    assert made.endswith("python bench/load.py --trace c.json --quick --mib 3")
    assert "OMP_WAIT_POLICY=passive " in made


def test_numbers_keep_three_digits():
    assert [result.rounded(each) for each in (1.23456, 1234.5, 0, float("nan"), None)] == [1.23, 1234, 0, None, None]
    assert result.row_to_json(Row("a", "s", None, 0.12345, each=(Decimal("1.005"),)))["value"] == 0.123
