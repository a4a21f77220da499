"""Pages stay short, plain and linked: limits that a machine can check."""

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


def files_matching(*patterns: str) -> list[Path]:
    """Returns the matching files of the repository, without environments and caches."""
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = files_matching("**/*.md")
each_page = pytest.mark.parametrize("page", PAGES, ids=map(named, PAGES))
each_design = pytest.mark.parametrize("page", files_matching("**/DESIGN.md"), ids=named)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields the numbered lines outside tables and code blocks."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ")):
            yield number, line


def long_lines(text: str) -> list[str]:
    return [f"{number}: {len(line)} columns" for number, line in prose(text) if len(line) > PROSE_COLUMNS]


def anchors(text: str) -> set[str]:
    """Returns the targets of `#…` links: headings in the form that GitHub gives them."""
    headings = [line.lstrip("#").strip().lower() for _, line in prose(text) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Returns relative links to a missing file, or to a missing heading."""
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
    """Yields the numbered lines outside code blocks; code within a line becomes one word."""
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
def test_no_line_of_prose_is_too_long(page):
    assert long_lines(page.read_text()) == []


@each_page
def test_each_link_has_a_target(page):
    assert broken_links(page) == []


def test_no_text_uses_vague_words():
    texts = {named(path): path.read_text() for path in [*PAGES, *files_matching(*PRODUCT)]}
    assert [f"{name}:{number}" for name, text in texts.items() for number, _ in vague(text)] == []
    assert len(texts) > 150, "the test reads the pages and the product"


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
