"""Tests which capsules the step structure reads, and passes on to the restore."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from reft.client.attach import structure
from reft.client.attach.plan import recover
from reft.client.attach.structure import rebuild_structure
from reft.errors import FormatError
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.attaches import begun, context, introduction, reply, survey_of


@pytest.mark.parametrize("damaged", [(), (1,), (0, 1)])
def test_the_restore_gets_the_capsules_that_were_read(monkeypatch, damaged):
    """Node c takes the place of node b and knows nothing, so rank 0 reads the capsule of rank 1."""
    reads = []

    def capsule(node: str, old: int, version: Any) -> pb.CapsuleRecord:
        reads.append((node, old))
        if old in damaged:
            raise FormatError("damaged.")
        return pb.CapsuleRecord(rank=old, capsule=b"no tree", digests=b"digests")

    monkeypatch.setattr(structure, "remote_slots", lambda *_: SimpleNamespace(capsule=capsule))
    monkeypatch.setattr(structure.structure, "rebuild", lambda tracked, counts, tree: ("a group",))
    survey = JobSurvey({**survey_of(begun("ab"), {"a": [8]}, a=[(1, 8)]).replies, "c": reply("c")})
    recovery = recover("job", survey, (), False)
    built = rebuild_structure(context(), introduction("ac"), SimpleNamespace(), survey, recovery, ())  # type: ignore[arg-type]
    assert reads == [("a", 1), ("a", 0)] and built.changes == ("a group",)
    assert {old: (each.rank, each.digests) for old, each in built.capsules.items()} == {
        old: (old, b"digests") for old in (0, 1) if old not in damaged
    }


@pytest.mark.parametrize("change", [lambda record: b"\xff", lambda record: record.replace(b"tree", b"free")])
def test_a_published_capsule_that_changed_on_its_way_counts_as_not_read(change):
    record = pb.CapsuleRecord(rank=1, capsule=b"tree", capsule_digest=xxhash.xxh3_64_intdigest(b"tree"))
    assert structure.arrived(record.SerializeToString()) == record
    assert structure.arrived(change(record.SerializeToString())) == pb.CapsuleRecord()
