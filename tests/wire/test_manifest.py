"""Tests that symbolic tables and a manifest's layouts round-trip; others are refused."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.layout.layout import pack
from reft.core.layout.symbolic import symbolic_form
from reft.errors import FormatError
from reft.wire.manifest import BYTES_MAX, TABLE_MAX, layouts_of, placement_of, table_from, table_to
from reft.wire.messages import MANIFEST_MAX
from reft.wire.v1 import daemon_pb2 as pb
from tests.core.layout.test_symbolic import LEAVES, MESHES, WILD, piece, ranks_of
from tests.support.manifests import described


@settings(deadline=None, max_examples=60)
@given(WILD)
def test_tables_with_their_own_bytes(leaves):
    table = symbolic_form(leaves).table
    assert table_from(table_to(table)) == table
    assert table_to(symbolic_form(leaves).table) == table_to(table)


@settings(deadline=None, max_examples=60)
@given(MESHES, LEAVES, st.booleans())
def test_layouts_of_a_manifest(mesh, rows, protects):
    ranks = ranks_of(mesh, rows)
    facts = described(*ranks)
    nodes = [pb.Node(id=str(rank), ranks=[rank]) for rank in range(len(ranks))]
    protect = "auto" if protects else "none"
    manifest = pb.Manifest(world=len(ranks), protect=protect, tolerate=1, chunk_bytes=4096, nodes=nodes, **facts)
    layouts, index = layouts_of(manifest)
    assert [layouts[i] for i in index] == [pack(leaves) for leaves in ranks]
    assert layouts.names == {leaf.name for leaves in ranks for leaf in leaves}
    assert len(layouts) == len({pack(leaves).digest for leaves in ranks}) == len(layouts[:])
    assert placement_of(manifest).division.layout_of == tuple(pack(leaves).digest for leaves in ranks)


def manifest(*ranks) -> pb.Manifest:
    return pb.Manifest(job="run1", world=len(ranks), **described(*ranks))


def two() -> pb.Manifest:
    return manifest(*([piece("w", (8, 6), 0, 2, rank)] for rank in range(2)))


def test_ranks_of_one_mesh_share_a_table():
    found = two()
    assert len(found.packed_tables) == 1 and [list(each.cuts) for each in found.layouts] == [[0, 4], [4, 4]]


def test_a_layout_with_a_wrong_digest_is_refused_when_it_is_read():
    found = two()
    found.layouts[1].cuts[0] = 3
    layouts, _ = layouts_of(found)
    assert layouts[0] == pack([piece("w", (8, 6), 0, 2, 0)])
    with pytest.raises(FormatError, match="layout 1 of the manifest has another digest"):
        layouts[1]


def break_cuts(found):
    found.layouts[0].cuts[1] = 9


def break_count(found):
    found.layouts[0].cuts.pop()


def break_table(found):
    found.layouts[0].table = 1


def break_twice(found):
    found.layouts[1].CopyFrom(found.layouts[0])


def break_bytes(found):
    found.packed_tables[0] = b"\xff\xff"


def break_end(found):
    found.packed_tables[0] = found.packed_tables[0][:-1]


def break_index(found):
    found.layout_of[1] = 2


@pytest.mark.parametrize(
    "breaks", [break_cuts, break_count, break_table, break_twice, break_bytes, break_end, break_index]
)
def test_a_manifest_that_contradicts_itself_is_refused(breaks):
    found = two()
    breaks(found)
    with pytest.raises(FormatError):
        layouts_of(found)


def test_an_impossible_leaf_is_refused():
    for changes in ({"axes": [0, 2]}, {"axes": [1]}, {"axes": [0, 1]}, {"order": [0, 0]}, {"item_bytes": BYTES_MAX}):
        table = pb.SymbolicTable.FromString(zlib.decompress(two().packed_tables[0]))
        for name, value in changes.items():
            table.leaves[0].ClearField(name)
            if isinstance(value, list):
                getattr(table.leaves[0], name).extend(value)
            else:
                setattr(table.leaves[0], name, value)
        with pytest.raises(FormatError):
            table_from(zlib.compress(table.SerializeToString()))
    huge = dataclasses.replace(piece("w", (8, 6), -1, 1, 0), nbytes=BYTES_MAX + 1, stride=(9, 9))
    with pytest.raises(FormatError):
        table_from(table_to(symbolic_form([huge]).table))


def test_a_manifest_of_protocol_7_is_read():
    """Its tables are not compressed."""
    found = two()
    found.tables.extend(zlib.decompress(table) for table in found.packed_tables)
    found.ClearField("packed_tables")
    assert [layouts_of(found)[0][i] for i in (0, 1)] == [layouts_of(two())[0][i] for i in (0, 1)]


def test_a_table_that_grows_too_large_is_refused():
    """A stranger's few bytes must not become gigabytes."""
    bomb = zlib.compress(bytes(TABLE_MAX + 1), level=9)
    assert len(bomb) < 1 << 20
    with pytest.raises(FormatError, match=f"more than {TABLE_MAX} bytes"):
        table_from(bomb)


def test_capsules_name_leaves_in_the_order_of_the_table():
    leaves = [piece(name, (8, 6), 0, 2, 0) for name in ("w", "a", "m")]
    layouts, index = layouts_of(manifest(leaves, leaves[:1]))
    assert [layouts.name_table(i).names for i in index] == [("w", "a", "m"), ("w",)]


@pytest.mark.parametrize("parameters", [3_840, pytest.param(75_000, marks=pytest.mark.slow)])
def test_names_of_many_parameters_fit_into_a_manifest(parameters):
    """With AdamW these are up to 300,000 leaves."""
    names = [f"model.0.layers.{i // 384}.mlp.experts.{i // 3 % 128}.proj_{i % 3}.weight" for i in range(parameters)]
    keys = ("", "optimizer.0.step.", "optimizer.0.exp_avg.", "optimizer.0.exp_avg_sq.")
    leaves = [piece(key + name, (8, 6), 0, 2, 0) for key in keys for name in names]
    assert len(table_to(symbolic_form(leaves).table)) < MANIFEST_MAX // 4 * parameters // 75_000
