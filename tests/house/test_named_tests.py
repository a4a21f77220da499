"""The tests and guards that a page names in its tables exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT

TESTS = ROOT / "tests"
PAGES = {"tests/README.md": 40, "tests/daemon/server/README.md": 60}  # page → rows at least
GUARDS = (ROOT / "daemon/reft_daemon", ROOT)  # where the page's paths of guards begin
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"(?P<module>[\w/]*)(?:::(?P<test>\w+))?(?:\[.*\])?")


def rows(text: str, column: str) -> Iterator[tuple[str, str]]:
    """Yields the first cell and the cell of that column, for each row of a table that has it."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if not cells or re.fullmatch(r"[|\s-]+", line):
            header = header if cells else []
        elif not header:
            header = cells
        elif column in header and len(cells) == len(header):
            yield cells[0], cells[header.index(column)]


def missing_tests(text: str, tests: Path) -> list[str]:
    """Returns what the tables name as a test and is none, and the rows without a test."""
    missing = []
    for first, cell in rows(text, "test"):
        module, named = "", 0
        for word in CODE.findall(cell):
            if (name := NAME.fullmatch(word)) is None or ("/" not in word and "::" not in word):
                continue
            module, named = name["module"] or module, named + 1
            path = tests / f"{module}.py"
            if not (_has_test(path, name["test"]) if name["test"] else path.exists() or (tests / module).is_dir()):
                missing.append(f"{first}: {word}")
        if not named:
            missing.append(f"{first}: no test")
    return missing


def _has_test(path: Path, name: str) -> bool:
    return path.exists() and re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE) is not None


def missing_guards(text: str, folders: tuple[Path, ...]) -> list[str]:
    """Returns the guards that are no file, and the rows without a guard."""
    found = [(first, CODE.findall(cell)) for first, cell in rows(text, "guard")]
    absent = [
        f"{first}: {path}" for first, paths in found for path in paths if not any((each / path).is_file() for each in folders)
    ]  # fmt: skip
    return absent + [f"{first}: no guard" for first, paths in found if not paths]


@pytest.mark.parametrize("page", PAGES)
def test_each_test_and_each_guard_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    assert missing_tests(text, TESTS) == []
    assert missing_guards(text, GUARDS) == []
    assert len([*rows(text, "test")]) >= PAGES[page], "the test reads the tables"


def test_what_does_not_exist_is_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "test_b.py").write_text("def test_one(x):\n    pass\n\nasync def test_two():\n    pass\n")
    (tmp_path / "g.py").touch()
    page = "\n".join(
        [
            "| attack | guard | test |",
            "|---|---|---|",
            "| 1 | `g.py` | `a/test_b::test_one[x-y]`, `::test_two`, `a/test_b` (all), `a`, with `make soak` |",
            "| 2 | `h.py` | `a/test_b::test_three`, `::test_on`, `a/test_c::test_one`, `a/test_c`, `b/c` |",
            "| 3 | none | none |",
            "",
            "| old | new |",
            "|---|---|",
            "| `a/test_b::test_four` | `a/test_b::test_five` |",
        ]
    )
    assert missing_tests(page, tmp_path) == [
        *(f"2: {word}" for word in ("a/test_b::test_three", "::test_on", "a/test_c::test_one", "a/test_c", "b/c")),
        "3: no test",
    ]
    assert missing_guards(page, (tmp_path,)) == ["2: h.py", "3: no guard"]
