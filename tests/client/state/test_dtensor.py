"""Regions of DTensor pieces on random meshes, compared with torch's own, in one process."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.materialize import live_index
from reft.client.state.extract.dtensor import Region, is_strided, local_piece, region_of
from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.parameters import NamedParameter
from reft.client.state.tensors import TensorIndex, leaf_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import exposures, place
from reft.core.layout.cells import divide
from reft.core.layout.layout import pack
from reft.errors import UnsupportedState


@pytest.fixture(scope="module")
def rank_zero_of_four():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def cut(whole, mesh_shape, coordinate, placements):
    """Returns the piece of a tensor, cut by torch's own placements from left to right."""
    for placement, count, at in zip(placements, mesh_shape, coordinate, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, count, with_padding=False, contiguous=True)[0][at]
    return whole


@st.composite
def placed(draw):
    """Draws (shape, mesh shape, placements) with up to 16 ranks.

    Includes dimensions of size 1, and fewer rows than ranks.
    """
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 16))
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    placements = []
    for _ in mesh:
        kind = draw(st.sampled_from(["replicate", "shard", "shard", "strided"]))
        if kind == "replicate":
            placements.append(Replicate())
        elif kind == "shard":
            placements.append(Shard(draw(dims)))
        else:
            placements.append(_StridedShard(draw(dims), split_factor=draw(st.integers(1, 3))))
    return tuple(shape), tuple(mesh), placements


@settings(max_examples=150, deadline=None)
@given(placed())
def test_pieces_equal_torchs_and_equal_regions_hold_equal_elements(case):
    shape, mesh, placements = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    leaves: dict[tuple[object, ...], torch.Tensor] = {}
    for coordinate in itertools.product(*(range(size) for size in mesh)):
        piece = cut(whole, mesh, coordinate, placements)
        local, box = region_of(shape, mesh, coordinate, placements)
        assert local == tuple(piece.shape)
        if not piece.numel():
            continue
        assert torch.equal(leaves.setdefault((local, box), piece), piece)
        if not box.tag:
            region = tuple(slice(at, at + size) for at, size in zip(box.offset, local, strict=True))
            assert box.shape == shape and torch.equal(whole[region], piece)
        if not box.tag or not any(map(is_strided, placements)):
            torch_says = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
            assert torch_says == (local, box.offset)
    distinct = {piece.numpy().tobytes() for piece in leaves.values()}
    assert len(distinct) == len(leaves), "two regions with the same elements: reft would not find these replicas"


@settings(max_examples=50, deadline=None)
@given(placed())
def test_the_holders_of_a_cell_are_the_ranks_with_the_same_elements(case):
    shape, mesh, placements = case
    layouts, pieces = [], []
    for coordinate in itertools.product(*(range(size) for size in mesh)):
        piece = cut(torch.arange(math.prod(shape)).reshape(shape), mesh, coordinate, placements).contiguous()
        _, box = region_of(shape, mesh, coordinate, placements)
        tensor_index = TensorIndex()
        tensor_index.add("w", {"w": piece}, "w", piece, box=box)
        layouts.append(tensor_index.layout())
        pieces.append(piece.numpy().tobytes() if piece.numel() else b"")
    division = divide({layout.digest: layout for layout in layouts}, [layout.digest for layout in layouts])
    holders = {each: [rank for rank, own in enumerate(pieces) if own == each] for each in pieces if each}
    expected = sorted(tuple(ranks) for ranks in holders.values() if len(ranks) > 1)
    assert [cell.holders for cell in division.cells] == expected


def test_an_uneven_strided_piece_is_named_by_its_rows():
    local, box = region_of((9,), (4,), (0,), [_StridedShard(0, split_factor=2)])
    assert local == (3,) and box.tag == "[0:2+5:6 of 9]"
    assert np.array_equal(cut(torch.arange(9), (4,), (0,), [_StridedShard(0, split_factor=2)]), [0, 1, 5])


def test_pending_sums_are_refused_by_name(rank_zero_of_four):
    tensor = DTensor.from_local(torch.ones(4), rank_zero_of_four, [Replicate(), Partial()], run_check=False)
    with pytest.raises(UnsupportedState, match=r"(?s)optimizer\.0\.sum is placed .*Partial"):
        TensorIndex().add("optimizer.0.sum", {}, "sum", tensor)


def test_local_memory_that_contradicts_the_placements_is_refused(rank_zero_of_four):
    tensor = DTensor.from_local(
        torch.ones(3, 2), rank_zero_of_four, [Shard(0), Shard(1)], run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
    )  # fmt: skip
    with pytest.raises(UnsupportedState, match=r"(?s)w has local shape \[3, 2\].*mean \[2, 2\]"):
        local_piece("w", tensor)


def test_a_replaced_local_tensor_is_noticed(rank_zero_of_four):
    tensor = DTensor.from_local(torch.ones(2, 2), rank_zero_of_four, [Shard(0), Replicate()], run_check=False)
    tensor_index = TensorIndex()
    tensor_index.add("w", {"w": tensor}, "w", tensor)
    before = tensor_index.versions()
    assert tensor_index.is_current()
    with torch.no_grad():
        tensor.add_(1)
    assert tensor_index.is_current() and tensor_index.versions() != before
    tensor._local_tensor = torch.ones(2, 2)
    assert not tensor_index.is_current()


OPTIMIZERS = [  # torch 2.13's Rprop and Adafactor cannot step DTensors
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Muon,
]  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("placements", [(Replicate(), Shard(0)), (Shard(0), Shard(1))], ids=str)
def test_state_is_predicted_and_created_as_in_the_first_step(rank_zero_of_four, kind, placements):
    def build():
        module = nn.Linear(6, 5, bias=False)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), rank_zero_of_four, placements))
        return module, kind(module.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    def described(leaves):
        return sorted((leaf.name, leaf.dtype, leaf.describe(), leaf.stride) for leaf in leaves)

    def kinds(optimizer):
        return [
            (key, type(value), getattr(value, "placements", None), value.dtype)
            for state in optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        ]

    module, optimizer = build()
    tracked = TrackedObjects({"model.0": module}, [optimizer], {})
    predicted = [*tracked.bind().leaves(), *tracked.predict(tracked.names())]
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    saved = tracked.bind().leaves()
    assert described(predicted) == described(saved)
    other, another = build()
    fresh = TrackedObjects({"model.0": other}, [another], {})
    tensors = live_index(saved, fresh, fresh.bind()).tensors
    assert kinds(another) == kinds(optimizer)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {leaf.name: leaf.shape for leaf in saved}


def layout_at(mesh, coordinate, placements):
    """Returns a rank's layout of a sharded parameter with two moments, and a whole scalar.

    The parameter has 1024 x 64 floats.
    """
    names = ["model.0.w", "optimizer.0.exp_avg.model.0.w", "optimizer.0.exp_avg_sq.model.0.w"]
    local, box = region_of((1024, 64), mesh, coordinate, placements)
    leaves = [leaf_of(name, torch.empty(local), False, box) for name in names]
    return pack([*leaves, leaf_of("optimizer.0.step.model.0.w", torch.empty(()), False)])


def placement_on(mesh, placements, domains):
    layouts = [layout_at(mesh, each, placements) for each in itertools.product(*(range(size) for size in mesh))]
    division = divide({layout.digest: layout for layout in layouts}, [layout.digest for layout in layouts])
    return place(division, [ord(each) for each in domains], "auto", 1, 1 << 20)


def test_shards_of_fsdp_have_one_holder_and_are_reported_as_exposed():
    (exposure,) = exposures(placement_on((4,), [Shard(0)], ["a", "b", "c", "d"]))
    assert exposure.reason == "kept" and exposure.ranks == (0, 1, 2, 3) and exposure.nbytes == 3 * 1024 * 64 * 4
    assert (
        exposure.what
        == "768.0 KiB have only one holder (unreplicated shards, or state that differs by rank): lost with its node."
    )


def test_shards_of_hsdp_on_separate_nodes_are_protected():
    placement = placement_on((2, 2), [Replicate(), Shard(0)], ["a", "a", "b", "b"])
    assert [cell.holders for cell in placement.division.cells] == [(0, 1, 2, 3), (0, 2), (1, 3)]
    assert exposures(placement) == ()
    assert exposures(placement_on((2, 2), [Shard(0), Replicate()], ["a", "a", "b", "b"]))[0].reason == "one domain"


def test_strides_of_size_1_dimensions_are_ignored_but_created_state_has_them():
    """Ranks may see different strides there; torch's fused kernels need the parameter's own."""
    memory = torch.arange(8.0)
    flat, turned = memory.view(1, 8), memory.as_strided((1, 8), (1, 1))
    assert flat.stride() != turned.stride()
    assert leaf_of("w", flat, False) == leaf_of("w", turned, False)
    columns = torch.empty(8, 2).t().contiguous().t()[:, :1].as_strided((8, 1), (1, 8))
    for local in (turned, columns):
        parameter, real = nn.Parameter(local), nn.Parameter(local)
        optimizer, other = (torch.optim.AdamW([each], fused=True) for each in (parameter, real))
        extractor, names = (
            OptimizerExtractor(),
            {id(parameter): NamedParameter("model.0.w", parameter, parameter, None)},
        )
        extractor.make(
            "optimizer.0", optimizer, list(extractor.predict("optimizer.0", optimizer, names)), names, HugePageBuffer(0)
        )
        real.grad = torch.zeros_like(real)
        other.step()
        made, own = optimizer.state[parameter]["exp_avg"], other.state[real]["exp_avg"]
        assert made.stride() == own.stride(), local.stride()


def test_adagrad_state_of_an_empty_piece_is_not_saved():
    """FSDP1 gives an empty piece no gradient.

    Its counter stands still while the counters of other ranks, with the same name, go on.
    """
    names_by_rank = []
    for shape, offset in (((0,), (8,)), ((3,), (5,))):
        parameter = nn.Parameter(torch.zeros(shape))
        optimizer, tensor_index = torch.optim.Adagrad([parameter]), TensorIndex()
        names = {id(parameter): NamedParameter("model.0.w", parameter, parameter, Region((8,), offset))}
        OptimizerExtractor().bind(tensor_index, "optimizer.0", optimizer, names)
        names_by_rank.append(sorted(tensor_index.tensors))
    assert names_by_rank == [[], ["optimizer.0.step.model.0.w", "optimizer.0.sum.model.0.w"]]
