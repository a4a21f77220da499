"""Reads the lines that rehearsed trainers write, while they write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from reft.core.rehearsal.records import (
    AliveObject,
    AliveRecord,
    AttachRecord,
    ForwardKind,
    MarkRecord,
    MoveRecord,
    RehearsalRecord,
    RehearsedAttempt,
    UntracedRecord,
    attempts_of,
)
from reft.errors import FormatError, ReftError


class RehearsalError(ReftError):
    """A rehearsal could not be carried out. Nothing was compared."""


def _attach(entry: Mapping[str, Any]) -> AttachRecord:
    return AttachRecord(
        entry["rank"],
        entry["world"],
        entry["pid"],
        entry["step"],
        entry["restored_from"],
        entry["time"],
        entry["generators"],
        tuple(entry["state"]),
        entry["regroups"],
        entry["hash"],
    )


def _mark(entry: Mapping[str, Any]) -> MarkRecord:
    return MarkRecord(
        entry["step"],
        entry["time"],
        tuple(entry["inputs"]),
        entry["at_batch"],
        entry["at_forward"],
        entry["generators"],
        entry["groups"],
        entry["state"],
        entry["leaves"],
        tuple(map(ForwardKind, entry["forwards"])),
        entry["epoch_ends"],
        entry["saves"],
    )


def _move(entry: Mapping[str, Any]) -> MoveRecord:
    return MoveRecord(entry["generator"], entry["file"], entry["line"], entry["code"], entry["kind"] == "usual")


def _alive(entry: Mapping[str, Any]) -> AliveRecord:
    return AliveRecord([AliveObject(each["kind"], each["type"], each["name"]) for each in entry["objects"]])


def _untraced(entry: Mapping[str, Any]) -> UntracedRecord:
    return UntracedRecord(entry["reason"])


_BY_KIND: Final[Mapping[str, Callable[[Mapping[str, Any]], RehearsalRecord]]] = {
    "attach": _attach,
    "mark": _mark,
    "moved": _move,
    "usual": _move,
    "untraced": _untraced,
    "alive": _alive,
}


# SIGKILL may cut a line. The next process of the rank goes on in the same line.
_NEXT_ATTACH = re.compile(rb'.+(\{"kind": ?"attach".*)')


def parse(line: bytes) -> RehearsalRecord | None:
    """Returns the record in a line; None for a kind that is not compared.

    Raises:
        RehearsalError: the trainer says that it could not record.
        FormatError: the line is no record.
    """
    cut = _NEXT_ATTACH.fullmatch(line)
    try:
        entry = json.loads(cut[1] if cut else line)
        if entry["kind"] == "failed":
            raise RehearsalError(f"the trainer could not record the rehearsal: {entry['error']}.")
        return _BY_KIND[entry["kind"]](entry) if entry["kind"] in _BY_KIND else None
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"a line of a rehearsal can't be read ({error!r}): {line[:80]!r}.") from error


class RecordReader:
    """Follows the files PREFIX.<rank>.jsonl of one run.

    Args:
        prefix: of the files, as in REFT_REHEARSE.
    """

    def __init__(self, prefix: Path) -> None:
        self.records: dict[int, list[RehearsalRecord]] = {}
        self._prefix = prefix
        self._read_bytes: dict[Path, int] = {}

    def poll(self) -> None:
        """Reads what was written since the last call. A line without its end is left for later."""
        for path in self._prefix.parent.glob(f"{self._prefix.name}.*.jsonl"):
            rank = int(path.name.removesuffix(".jsonl").rpartition(".")[2])
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            if end:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
                records = map(parse, whole.split(b"\n"))
                self.records.setdefault(rank, []).extend(record for record in records if record)

    def attempts(self) -> dict[int, list[RehearsedAttempt]]:
        """Returns the attempts of each rank, oldest first."""
        return {rank: attempts_of(records) for rank, records in sorted(self.records.items())}
