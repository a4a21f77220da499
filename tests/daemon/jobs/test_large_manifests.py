"""Placing a job takes work in proportion to its ranks; a manifest that asks for more is refused."""

from __future__ import annotations

from itertools import accumulate

import pytest

from reft.core.coding.placement import place
from reft.core.layout import cells, sharing
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.layout.symbolic import WHOLE, AxisCut, LeafPattern, PatternTable, SymbolicLayout, leaves_of
from reft.errors import ConfigError
from reft.wire.manifest import table_to
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs.capsule_replication import node_placement
from tests.support.instruction_count import instructions

LEAVES = 3


def manifest(world: int, pieces: int = 1, ranks_of_nodes: list[int] | None = None) -> pb.Manifest:
    """Returns the manifest of a job whose leaves are cut into `pieces` of equally many holders."""
    sizes = ranks_of_nodes or [1] * world
    nodes = [
        pb.Node(name=f"n{i}", id=f"id{i}", ranks=range(begin, begin + size))
        for i, (begin, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False))
    ]
    rows = 16 * pieces
    axis = WHOLE if pieces == 1 else 0
    leaves = tuple(LeafPattern(f"p{i}", "float32", False, 4, (rows, 1 << 14), (axis, WHOLE)) for i in range(LEAVES))
    axes = () if pieces == 1 else (rows,)
    layouts = [
        pb.RankLayout(cuts=[16 * i, 16][: 2 * len(axes)], digest=i.to_bytes(16, "little")) for i in range(pieces)
    ]
    return pb.Manifest(
        job="job", world=world, nodes=nodes, protect="auto", tolerate=-1, chunk_bytes=1 << 16, slots=4,
        packed_tables=[table_to(PatternTable(leaves, axes))], layouts=layouts,
        layout_of=[rank % pieces for rank in range(world)],
    )  # fmt: skip


SHAPES = {
    "replicas": lambda world: manifest(world),
    "shards": lambda world: manifest(world, world),
    "pairs": lambda world: manifest(world, world // 2),
    "one node has half of the ranks": lambda world: manifest(world, world, [world // 2] + [1] * (world // 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_ranks_take_twice_the_work(shape):
    node_placement(SHAPES[shape](100), 1)  # what is cached for later calls is made here
    small, large = (SHAPES[shape](world) for world in (400, 800))
    work = [instructions(lambda each=each: node_placement(each, 1)) for each in (small, large)]
    assert work[1] < 2.4 * work[0], f"{work} instructions"


@pytest.mark.parametrize("shape", ["replicas", "shards"])
def test_a_hundred_thousand_ranks_are_placed(shape):
    world = 100_000
    placement = node_placement(SHAPES[shape](world), 1)
    if shape == "replicas":  # capsules go to the next two nodes, of the one lane that survives two losses
        assert placement.holders == (2, 3) and not placement.guard_lanes
    if shape == "shards":
        assert sum(len(lane.members) for lane in placement.guard_lanes) == world
    assert placement.holders


def test_cells_list_their_leaves_on_demand():
    pattern = [LeafPattern(name, "uint8", False, 1, (200,), (0,)) for name in ("b", "a", "c")]
    layouts = {
        bytes([i]): SymbolicLayout(PatternTable(tuple(pattern), (200,)), (AxisCut(100 * i, 100),)) for i in (0, 1)
    }
    division = divide(layouts, [b"\0", b"\1", b"\0", b"\1"])
    for cell, digest in zip(division.cells, layouts, strict=True):
        packed = pack(sorted(leaves_of(pattern, layouts[digest].cuts), key=lambda leaf: leaf.name))
        assert (cell.leaves, cell.offsets, cell.nbytes) == (packed.leaves, packed.offsets, packed.data_bytes)


def test_two_leaves_of_one_name_are_refused():
    table = PatternTable((LeafPattern("w", "uint8", False, 1, (9,), (WHOLE,)),) * 2, ())
    with pytest.raises(ValueError, match="two leaves have the same name"):
        divide({b"x": SymbolicLayout(table, ())}, [b"x", b"x"])


# Manifests that would take hours or all memory: refused before the work begins.


def test_too_many_layouts_and_families_are_refused(monkeypatch):
    monkeypatch.setattr(sharing, "COMBINATIONS_MAX", 5)
    with pytest.raises(ConfigError, match="6 layouts and families of leaves to compare; the limit is 5"):
        node_placement(manifest(6, 6), 0)
    node_placement(manifest(5, 5), 0)


def test_too_many_holders_are_refused(monkeypatch):
    monkeypatch.setattr(cells, "HOLDERS_MAX", 5)
    with pytest.raises(ConfigError, match="6 holders of 1 cells; the limit is 5"):
        node_placement(manifest(6), 0)
    node_placement(manifest(5), 0)


def test_too_many_members_of_lanes_are_refused(monkeypatch):
    """A cell has a lane for each holder in one domain, and a lane has a member in each domain."""
    leaf = Leaf("w", "uint8", (9,), (1,), 9, False, (9,), (0,))
    layout = pack([leaf])
    division = divide({layout.digest: layout}, [layout.digest] * 6)
    monkeypatch.setattr("reft.core.coding.placement.HOLDERS_MAX", 8)
    place(division, [0, 0, 0, 1, 1, 1], "auto", None, 64)
    with pytest.raises(ValueError, match="9 members of lanes; the limit is 8"):
        place(division, [0, 0, 0, 1, 1, 2], "auto", None, 64)
