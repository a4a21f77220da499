"""Records that ranks exchange: any record survives JSON, and another form is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from reft.client.link.exchange import RankMessage, from_json, gather, share, to_json, together
from reft.client.link.rank_group import RankGroup
from reft.errors import AttachError, FormatError


@dataclass(frozen=True)
class Inner:
    data: bytes
    names: frozenset[str]


@dataclass(frozen=True)
class Outer:
    name: str
    count: int | None
    every: int | str
    is_on: bool
    parts: tuple[Inner, ...]
    by_rank: dict[int, tuple[int, ...]]
    texts: Mapping[str, str]
    inner: Inner | None = None


PLAIN = Outer("a", None, "auto", True, (), {}, {})
FULL = Outer(
    "b", 3, 4, False, (Inner(b"\0\xff", frozenset("xy")),), {7: (1, 2), 8: ()}, {"k": "v"}, Inner(b"", frozenset())
)


@pytest.mark.parametrize("record", [PLAIN, FULL])
def test_a_record_survives_json(record):
    assert from_json(Outer, json.loads(json.dumps(to_json(record)))) == record


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"count": ...}, "Outer has no field 'count'"),
        ({"new": 1}, "Outer has an unknown field 'new'"),
        ({"name": 3}, "Outer: '3' is a int, expected str"),
        ({"count": True}, "is a bool, expected int or NoneType"),
        ({"every": None}, "expected int or str"),
        ({"parts": {}}, "expected list"),
        ({"parts": [{"data": "A", "names": []}]}, "Outer: Inner: 'A' is not base64"),
        ({"by_rank": {"x": []}}, "key 'x' is no int"),
        ({"inner": 3}, "expected dict"),
    ],
)
def test_a_record_of_another_form_is_refused_by_name(changes, text):
    value = {name: each for name, each in (to_json(PLAIN) | changes).items() if each is not ...}
    with pytest.raises(FormatError, match=re.escape(text)):
        from_json(Outer, value)


class OlderPeer:
    """A rank group of two ranks; rank 1 runs another version of reft."""

    def gather_or_raise(self, act: Any, extra_s: float = 0, deadline_s: float | None = None) -> list[Any]:
        return [act(), {}]


def test_a_peer_of_another_version_is_refused_with_its_rank():
    with pytest.raises(
        AttachError, match=r"rank 1 sent a record .* no field 'data'.\nFix: give all nodes the same reft"
    ):
        gather(OlderPeer(), lambda: RankMessage(b"x"), RankMessage)  # type: ignore[arg-type]


def test_a_rank_keeps_its_own_result_and_gets_the_records_of_all():
    alone = RankGroup(1.0)
    assert share(alone, lambda: ("kept", RankMessage(b"sent")), RankMessage) == ("kept", [RankMessage(b"sent")])
    assert together(alone, lambda: 3) == 3
