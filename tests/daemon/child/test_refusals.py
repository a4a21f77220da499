"""Tests the line and the status of refused callers: bounded, whatever arrives."""

from __future__ import annotations

import re

from reft_daemon.child.refusals import (
    ADDRESSES_MAX,
    ADDRESSES_SAID,
    OTHER_REASONS,
    OTHERS,
    REASONS_MAX,
    REASONS_SAID,
    RefusalCounts,
)
from tests.support.daemons import ROOT


def test_one_line_a_minute_has_reasons_counts_and_addresses(caplog):
    refusals = RefusalCounts()
    refusals.say(0)
    assert not caplog.messages
    for _ in range(7):
        refusals.count("they did not speak HTTP/2", "10.0.0.1")
    refusals.count("their TLS handshake failed", "10.0.0.2")
    refusals.say(1)
    assert caplog.messages == [
        'refused at the doors: count=8 why="7 because they did not speak HTTP/2, 1 because their TLS handshake failed" '
        'by="10.0.0.1 (7), 10.0.0.2 (1)"'
    ]
    assert caplog.records[0].name == "reft.audit"
    refusals.count("they did not speak HTTP/2", "10.0.0.1")
    refusals.say(60)
    assert len(caplog.messages) == 1, "the minute is not over"
    refusals.say(61)
    assert caplog.messages[1].endswith('why="1 because they did not speak HTTP/2" by="10.0.0.1 (1)"')
    refusals.say(200)
    assert len(caplog.messages) == 2
    assert refusals.totals == {"they did not speak HTTP/2": 8, "their TLS handshake failed": 1}


def test_a_flood_of_addresses_and_reasons_is_bounded(caplog):
    refusals = RefusalCounts()
    for i in range(ADDRESSES_MAX + 50):
        refusals.count("r", f"a{i}")
    for i in range(2 * REASONS_MAX):
        refusals.count(f"r{i}", "b")
    assert len(refusals.totals) == REASONS_MAX + 1
    assert refusals.totals[OTHER_REASONS] == REASONS_MAX + 1
    refusals.say(0)
    (line,) = caplog.messages
    assert f"{ADDRESSES_MAX + 50} because r," in line and f"{OTHERS} (50)" in line
    others = 2 * REASONS_MAX - (REASONS_MAX + 1) - (REASONS_SAID - 2)
    assert f', {others} because {OTHER_REASONS}" by=' in line and line.count(" because ") == REASONS_SAID + 1
    assert line.endswith(f' and {ADDRESSES_MAX + 2 - ADDRESSES_SAID} more"')


def reasons(refusals: RefusalCounts, now_s: float) -> list[tuple[str, int, int, float]]:
    return [(each.reason, each.total, each.last_minute, each.age_s) for each in refusals.status(now_s).reasons]


def test_the_status_has_the_last_minute_and_all_since_the_start():
    refusals = RefusalCounts()
    assert not refusals.status(5).total and not refusals.status(5).reasons
    for second in range(90):
        refusals.count("a", "10.0.0.1")
        refusals.say(second)
    refusals.count("b", "10.0.0.2")
    assert reasons(refusals, 90) == [("a", 90, 59, 1.0), ("b", 1, 1, 0.0)], "also before the next say"
    status = refusals.status(120)
    assert (status.total, status.last_minute) == (91, 30) and status.more_reasons == 0
    assert reasons(refusals, 160) == [("b", 1, 0, 70.0), ("a", 90, 0, 71.0)]


def test_the_status_names_the_addresses_with_the_most_lately():
    refusals = RefusalCounts()
    refusals.count("a", "earlier")
    refusals.say(0)
    refusals.count("a", "first of the next line")
    refusals.say(300)
    assert list(refusals.status(300).reasons[0].addresses) == ["first of the next line"]
    for i in range(ADDRESSES_SAID + 2):
        for _ in range(i + 2):
            refusals.count("a", f"10.0.0.{i}")
    (status,) = refusals.status(301).reasons
    assert list(status.addresses) == [f"10.0.0.{i}" for i in range(ADDRESSES_SAID + 1, 1, -1)]
    assert status.more_addresses == 3


def test_a_flood_does_not_grow_the_status():
    refusals = RefusalCounts()
    for i in range(2 * REASONS_MAX):
        for address in range(20):
            refusals.count(f"r{i}", f"{i}.{address}")
        refusals.status(i)
    status = refusals.status(2 * REASONS_MAX)
    assert len(status.reasons) == REASONS_SAID and status.more_reasons == REASONS_MAX + 1 - REASONS_SAID
    assert status.reasons[0].reason == OTHER_REASONS and status.total == 40 * REASONS_MAX
    assert status.ByteSize() < 2000


REASON = re.compile(r'"((?:they|their|what they|others|no connection)\b[^"({,]*)')


def test_the_page_says_of_each_reason_what_to_do():
    page = (ROOT / "daemon/SECURITY.md").read_text().partition("\n## Refusals\n")[2]
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    explained = tuple(reason for row in rows for reason in row.split(", "))
    folders = [ROOT / "daemon/reft_daemon" / each for each in ("server", "mover")]
    sources = [path.read_text() for each in folders for path in each.rglob("*.py")]
    sources.append((ROOT / "reft/wire/certificate_role.py").read_text())
    found = {reason.strip() for text in sources for reason in REASON.findall(text)}
    assert len(found) > 12 and "they did not speak HTTP/2" in found
    assert not [reason for reason in found if not reason.startswith(explained)]
