"""Decides which checkpoints on storage are removed after a newer one is complete.

    --keep 3          the three newest stay
    --keep-each 24h   and of each full 24 hours, counted from the oldest one, the first

The newest complete checkpoint always stays. What a killed writer left behind has no manifest. It is
removed once it is a day old, so that no writer that is still at work loses its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

REMAINS_S: Final = 86_400.0  # age at which files without a manifest are removed


@dataclass(frozen=True)
class RetentionSettings:
    """How many checkpoints stay.

    Attributes:
        keep: how many of the newest, at least 1.
        keep_each_s: one of each such span stays, too; 0: none.
    """

    keep: int = 3
    keep_each_s: float = 0.0


@dataclass(frozen=True)
class StoredEntry:
    """A folder of a lineage.

    Attributes:
        name: of the folder.
        time_s: when its manifest, or the folder itself, was written, by the storage's clock.
        is_complete: whether it has a manifest.
    """

    name: str
    time_s: float
    is_complete: bool


def to_remove(
    entries: Sequence[StoredEntry], order: Sequence[str], settings: RetentionSettings, now_s: float
) -> list[str]:
    """Returns the names of the folders to remove, the oldest first.

    Args:
        entries: all folders of a lineage.
        order: names of the complete ones, from the newest version to the oldest.
        settings: how many stay.
        now_s: the time by the storage's clock.
    """
    by_name = {entry.name: entry for entry in entries}
    complete = [by_name[name] for name in order if name in by_name and by_name[name].is_complete]
    kept = {entry.name for entry in complete[: max(settings.keep, 1)]}
    if settings.keep_each_s > 0 and complete:
        first_s = min(entry.time_s for entry in complete)
        spans: set[int] = set()
        for entry in reversed(complete):  # the oldest version first
            span = int((entry.time_s - first_s) // settings.keep_each_s)
            if span not in spans:
                spans.add(span)
                kept.add(entry.name)
    remains = [entry for entry in entries if not entry.is_complete and now_s - entry.time_s >= REMAINS_S]
    gone = [entry for entry in complete if entry.name not in kept] + remains
    return [entry.name for entry in sorted(gone, key=lambda entry: (entry.time_s, entry.name))]
