"""Pages stay short, plain and linked: limits that a machine can hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT

FRONT_LINES, FRONT_BYTES = 150, 12 << 10  # of README.md
DESIGN_LINES = 200  # of each DESIGN.md
PROSE_COLUMNS = 100
VAGUE = re.compile(r"\bwhoever\b|\bof whom\b", re.IGNORECASE)
PRODUCT = ("reft/**/*.py", "daemon/**/*.py", "proto/**/*.proto", "reft/**/*.c")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def found(*patterns: str) -> list[Path]:
    """Files of the repository, without environments and caches."""
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = found("**/*.md")
each_page = pytest.mark.parametrize("page", PAGES, ids=map(named, PAGES))
each_design = pytest.mark.parametrize("page", found("**/DESIGN.md"), ids=named)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are neither a table's nor a code block's."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ")):
            yield number, line


def long_lines(text: str) -> list[str]:
    return [f"{number}: {len(line)} columns" for number, line in prose(text) if len(line) > PROSE_COLUMNS]


def anchors(text: str) -> set[str]:
    """What `#…` may name: headings, as GitHub writes them in links."""
    headings = [line.lstrip("#").strip().lower() for _, line in prose(text) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links to no file, and to no heading."""
    broken = []
    for target in LINK.findall("\n".join(line for _, line in prose_and_tables(page.read_text()))):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


def prose_and_tables(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside code blocks; code within a line is a word."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "code", line)


def test_the_front_page_is_short():
    text = (ROOT / "README.md").read_bytes()
    assert len(text.splitlines()) <= FRONT_LINES and len(text) <= FRONT_BYTES


@each_design
def test_a_design_page_is_short(page):
    assert len(page.read_text().splitlines()) <= DESIGN_LINES


@each_page
def test_prose_fits_a_diff(page):
    assert long_lines(page.read_text()) == []


@each_page
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_nobody_is_left_to_guess():
    texts = {named(path): path.read_text() for path in [*PAGES, *found(*PRODUCT)]}
    assert [f"{name}:{number}" for name, text in texts.items() for number, _ in vague(text)] == []
    assert len(texts) > 150, "it reads where people read"


def vague(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if VAGUE.search(line))


def test_each_rule_finds_its_violation_and_nothing_else(tmp_path):
    long = "x" * (PROSE_COLUMNS + 1)
    assert long_lines(f"{long}\n| {long} |\n    {long}\n```\n{long}\n```\n{long[1:]}") == ["1: 101 columns"]
    assert [number for number, _ in vague("Whoever it is\nwho ever\none of whom\nof whomever")] == [1, 3]
    assert anchors("# A `b`: c, d\n## The end\n```\n# no\n```") == {"a-b-c-d", "the-end"}
    (tmp_path / "b.md").write_text("## Here\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[x](b.md) [`x`](b.md#here) [x](https://a.b) [x](c.md) [x](b.md#there) `[x](d.md)`\n    [x](e.md)\n"
    )
    assert broken_links(page) == ["c.md", "b.md#there"]
