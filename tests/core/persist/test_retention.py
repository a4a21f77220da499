"""Which checkpoints are removed."""

import itertools

import pytest

from reft.core.persist.retention import REMAINS_S, RetentionSettings, StoredEntry, to_remove

HOUR = 3600.0


def _entries(*hours: float) -> list[StoredEntry]:
    return [StoredEntry(f"s{i}", hour * HOUR, True) for i, hour in enumerate(hours)]


def _newest_first(entries: list[StoredEntry]) -> list[str]:
    return [entry.name for entry in reversed(entries)]


def test_newest_stay() -> None:
    entries = _entries(0, 1, 2, 3, 4)
    assert to_remove(entries, _newest_first(entries), RetentionSettings(keep=3), 5 * HOUR) == ["s0", "s1"]


def test_one_of_each_span_stays() -> None:
    entries = _entries(0, 12, 24, 36, 48, 60, 61)
    removed = to_remove(entries, _newest_first(entries), RetentionSettings(1, 24 * HOUR), 61 * HOUR)
    assert removed == ["s1", "s3", "s5"]


def test_newest_version_stays_although_its_clock_is_the_oldest() -> None:
    entries = _entries(5, 4, 3)  # the clock went back
    assert to_remove(entries, ["s2", "s1", "s0"], RetentionSettings(keep=1), 6 * HOUR) == ["s1", "s0"]


@pytest.mark.parametrize("keep", [0, -1, 1])
def test_newest_always_stays(keep: int) -> None:
    entries = _entries(0, 1)
    assert to_remove(entries, ["s1", "s0"], RetentionSettings(keep), 2 * HOUR) == ["s0"]


def test_parts_without_manifest_go_after_a_day() -> None:
    remains = [StoredEntry("part", 0.0, False)]
    assert to_remove(remains, [], RetentionSettings(), REMAINS_S - 1) == []
    assert to_remove(remains, [], RetentionSettings(), REMAINS_S) == ["part"]


def test_a_complete_entry_of_another_history_stays() -> None:
    entries = _entries(0, 1, 2)
    assert to_remove(entries, ["s2"], RetentionSettings(keep=1), 9 * HOUR) == []


def test_later_prunings_remove_nothing_that_an_earlier_one_kept_for_its_span() -> None:
    entries = _entries(*(6.0 * i for i in range(20)))
    kept: list[StoredEntry] = []
    for entry in entries:
        kept.append(entry)
        gone = to_remove(kept, _newest_first(kept), RetentionSettings(2, 24 * HOUR), entry.time_s)
        kept = [each for each in kept if each.name not in gone]
    spans = [int(each.time_s // (24 * HOUR)) for each in kept]
    assert sorted(set(spans)) == list(range(5))
    assert len(kept) <= 5 + 2
    assert all(later.time_s > earlier.time_s for earlier, later in itertools.pairwise(kept))
