"""Exchanges of dataclasses between all ranks: a record ─► JSON types ─► a record, checked.

    this rank's record ─► to_json ─► RankGroup.gather_or_raise ─► from_json ─► all ranks' records
                                                                  └► another form: AttachError

All ranks must run the same reft. A peer that runs another version may send other fields. Such a
record is refused with the field's name, on every rank alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from reft.client.link.rank_group import RankGroup, bytes_of, text_of
from reft.errors import AttachError, FormatError

if TYPE_CHECKING:
    from google.protobuf.message import Message

Record = TypeVar("Record")
Kept = TypeVar("Kept")
Reply = TypeVar("Reply", bound="Message")
PLAIN = (bool, int, str, NoneType)


@dataclass(frozen=True)
class RankMessage:
    """Bytes from one rank to all ranks; empty if the rank has none to send."""

    data: bytes = b""


def share(
    rank_group: RankGroup, act: Callable[[], tuple[Kept, Record]], kind: type[Record], extra_s: float = 0.0
) -> tuple[Kept, list[Record]]:
    """Runs `act` on every rank; returns what this rank keeps, and all ranks' records.

    Args:
        rank_group: all ranks of the job.
        act: returns a value that this rank keeps, and the record to send.
        kind: the class of the records.
        extra_s: time added to the group's deadline.

    Raises:
        ReftError: `act` raised this error on this rank.
        AttachError: `act` raised on another rank, a rank missed the deadline, or a record has
            another form.
    """
    kept: list[Kept] = []

    def run() -> dict[str, Any]:
        value, record = act()
        kept.append(value)
        return to_json(record)

    records = _records(rank_group.gather_or_raise(run, extra_s=extra_s), kind)
    return kept[0], records


def gather(
    rank_group: RankGroup,
    act: Callable[[], Record],
    kind: type[Record],
    extra_s: float = 0.0,
    deadline_s: float | None = None,
) -> list[Record]:
    """Runs `act` on every rank, and returns all ranks' records; see `share`.

    Args:
        deadline_s: the longest to wait; None means the group's deadline.
    """
    replies = rank_group.gather_or_raise(lambda: to_json(act()), extra_s=extra_s, deadline_s=deadline_s)
    return _records(replies, kind)


def gather_replies(
    rank_group: RankGroup, asks: bool, ask: Callable[[], Reply], kind: type[Reply], extra_s: float = 0.0
) -> list[Reply]:
    """Runs `ask` on some ranks; returns the reply of each rank.

    It is empty for a rank that does not ask. See `share`; `kind` is the class of the replies.
    """

    def message() -> RankMessage:
        return RankMessage(ask().SerializeToString() if asks else b"")

    return [kind.FromString(each.data) for each in gather(rank_group, message, RankMessage, extra_s)]


def together(rank_group: RankGroup, act: Callable[[], Kept], extra_s: float = 0.0) -> Kept:
    """Runs `act` on every rank; returns this rank's result once all ranks have theirs.

    Raises:
        ReftError: see `share`.
    """
    return share(rank_group, lambda: (act(), RankMessage()), RankMessage, extra_s)[0]


def to_json(record: Any) -> Any:
    """Returns a record as JSON types: dicts, lists, texts, numbers. Bytes become text."""
    if is_dataclass(record):
        return {each.name: to_json(getattr(record, each.name)) for each in fields(record)}
    if isinstance(record, Mapping):
        return {str(key): to_json(value) for key, value in record.items()}
    if isinstance(record, frozenset):
        return sorted(record)
    if isinstance(record, (tuple, list)):
        return [to_json(value) for value in record]
    return text_of(record) if isinstance(record, bytes) else record


def from_json(kind: type[Record], value: Any) -> Record:
    """Returns the record that `to_json` was given.

    Args:
        kind: the record's class. The annotations of its fields say what is expected.
        value: the JSON value.

    Raises:
        FormatError: a field is missing, is unknown, or has a value of another type.
    """
    read: Callable[[Any], Record] = _reader(kind)  # type: ignore[arg-type]  # classes are hashable
    return read(value)


def _records(replies: list[dict[str, Any]], kind: type[Record]) -> list[Record]:
    records = []
    for rank, reply in enumerate(replies):
        try:
            records.append(from_json(kind, reply))
        except FormatError as error:
            raise AttachError(
                f"rank {rank} sent a record that this version of reft does not know: {error}",
                "give all nodes the same reft",
            ) from error
    return records


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Returns the function that reads a value of this type; made once for each type."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(kind):
        return _record_reader(kind)
    if kind is bytes:
        return _bytes
    if origin is UnionType:
        return _union_reader(arguments)
    if origin in (tuple, frozenset):
        item = _reader(arguments[0])
        return lambda value: origin(map(item, _checked(value, list)))
    if origin in (dict, Mapping):
        key_of, item = arguments[0], _reader(arguments[1])
        return lambda value: {_key(key, key_of): item(each) for key, each in _checked(value, dict).items()}
    return lambda value: _checked(value, kind)


def _record_reader(kind: Any) -> Callable[[Any], Any]:
    types = get_type_hints(kind)
    readers = {each.name: _reader(types[each.name]) for each in fields(kind)}

    def read(value: Any) -> Any:
        values = _checked(value, dict)
        for name in readers.keys() ^ values.keys():
            state = "an unknown" if name in values else "no"
            raise FormatError(f"{kind.__name__} has {state} field {name!r}.")
        try:
            return kind(**{name: reader(values[name]) for name, reader in readers.items()})
        except FormatError as error:
            raise FormatError(f"{kind.__name__}: {error}") from error

    return read


def _union_reader(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Returns the reader of plain types, or of one type and None."""
    if all(kind in PLAIN for kind in kinds):
        return lambda value: _checked(value, *kinds)
    (kind,) = (each for each in kinds if each is not NoneType)
    reader = _reader(kind)
    return lambda value: None if value is None else reader(value)


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise FormatError(f"{str(value)[:40]!r} is a {type(value).__name__}, expected {names}.")
    return value


def _bytes(value: Any) -> bytes:
    try:
        return bytes_of(_checked(value, str))
    except ValueError as error:
        raise FormatError(f"{value[:40]!r} is not base64.") from error


def _key(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise FormatError(f"key {text[:40]!r} is no {kind.__name__}.") from error
