"""Which tensors an export has, under which names, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest

from reft.core.layout.layout import Leaf, strides_of
from reft.core.layout.model_form import ModelForm
from reft.core.layout.regions import copy_runs
from reft.core.recovery.export_match import ExportMatch, match_export
from reft.core.recovery.shard_matching import PieceLocation, PieceSource, TensorPiece


def piece(
    name: str, shape: Sequence[int], whole: Sequence[int] = (), at: Sequence[int] = (), rank: int = 0, dtype: str = "float32",
    form: str = "", order: Sequence[int] = (),
) -> TensorPiece:  # fmt: skip
    whole = whole or shape
    size = {"float32": 4, "bfloat16": 2, "int64": 8}[dtype] * math.prod(shape)
    leaf = Leaf(
        name,
        dtype,
        tuple(shape),
        strides_of(shape, order),
        size,
        False,
        tuple(whole),
        tuple(at or [0] * len(whole)),
        form,
    )
    return TensorPiece(leaf, (PieceLocation(PieceSource.SLOT, rank, 0),))


def names(match: ExportMatch) -> list[str]:
    return [each.name for each in match.tensors]


def test_names_are_those_of_the_state_dict() -> None:
    held = [
        piece("model.0.layers.1.weight", (4, 2)),
        piece("optimizer.0.exp_avg.model.0.layers.1.weight", (4, 2)),
        piece("optimizer.0.step.model.0.layers.1.weight", ()),
        piece("state.scaler._scale", ()),
    ]
    match = match_export(held, has_optimizer=True)
    weight = "layers.1.weight"
    assert names(match) == [weight, f"state.{weight}.exp_avg", f"state.{weight}.step"]
    assert [each.is_weight for each in match.tensors] == [True, False, False] and not match.problems
    assert match.notes == ["1 tensor of optimizers and other state left out"]
    assert names(match_export(held, has_optimizer=False)) == [weight]


def test_two_models_keep_their_numbers_only_if_names_clash() -> None:
    apart = [piece("model.0.a", (2,)), piece("model.1.b", (2,))]
    assert names(match_export(apart, True)) == ["a", "b"]
    assert names(match_export([*apart, piece("model.1.a", (2,))], True)) == ["0.a", "1.a", "1.b"]


def test_tensors_without_elements_are_there() -> None:
    """A state dict has them, so a strict load wants them."""
    empty = [piece(name, (0, 5)) for name in ("model.0.none", "optimizer.0.exp_avg.model.0.none")]
    match = match_export([*empty, piece("model.0.w", (4,))], True, "bfloat16")
    assert [(each.name, each.shape, each.leaf.nbytes) for each in match.tensors] == [
        ("none", (0, 5), 0), ("w", (4,), 16), ("state.none.exp_avg", (0, 5), 0),
    ]  # fmt: skip
    assert [need.name for need in match.needs] == ["model.0.w"] and not match.problems and not match.notes


def test_temporary_buffers_are_left_out() -> None:
    held = [piece("model.0.a", (2,)), piece("model.0.mask[pp 0 of 2]", (2,), form=ModelForm(None, True).text())]
    match = match_export(held, True)
    assert names(match) == ["a"] and not match.problems and not match.notes


def test_tensor_has_the_name_under_which_the_state_dict_has_it() -> None:
    held = [piece("model.0.cache[pp 0 of 1]", (2,), form=ModelForm(name="model.0.mean").text())]
    assert names(match_export(held, True)) == ["mean"]


def test_flattened_weight_gets_its_shape_and_its_moments_too() -> None:
    form = ModelForm((2, 3)).text()
    held = [
        piece("model.0.w", (4,), (6,), (0,), 0, form=form),
        piece("model.0.w", (2,), (6,), (4,), 1, form=form),
        piece("optimizer.0.exp_avg.model.0.w", (6,)),
        piece("optimizer.0.step.model.0.w", ()),
    ]
    match = match_export(held, True)
    assert [(each.name, each.shape) for each in match.tensors] == [
        ("w", (2, 3)), ("state.w.exp_avg", (2, 3)), ("state.w.step", ()),
    ]  # fmt: skip
    assert not match.problems


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (piece("model.0.w[of 0:2,0:4]", (2,)), "its place in the whole tensor is not known"),
        (piece("model.0.layer._flat_param", (8,)), "its place in the whole tensor is not known"),
        (piece("model.0.w/codes", (8,)), "its place in the whole tensor is not known"),
        (piece("model.0.w", (2,), (4,), (0,)), "8 of the 16 bytes of float32 \\[4\\] were not held"),
        (piece("model.0.w", (5,), form=ModelForm((2, 3)).text()), "\\[5\\] elements are no \\[2, 3\\]"),
    ],
)
def test_weight_that_is_not_whole_is_refused_by_name(held: TensorPiece, said: str) -> None:
    (problem,) = match_export([held], True).problems
    assert problem.startswith(held.leaf.name)

    assert re.search(said, problem)


def test_only_floating_point_weights_are_cast() -> None:
    held = [
        piece("model.0.w", (2,)),
        piece("model.0.n", (2,), dtype="int64"),
        piece("optimizer.0.exp_avg.model.0.w", (2,)),
    ]
    dtypes = {each.name: each.dtype for each in match_export(held, True, "bfloat16").tensors}
    assert dtypes == {"w": "bfloat16", "n": "int64", "state.w.exp_avg": "float32"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pieces_of_any_memory_order_make_row_major_tensors(order: tuple[int, int]) -> None:
    whole = np.arange(24, dtype="<f4").reshape(4, 6)
    pieces = [piece("model.0.w", (4, 3), (4, 6), (0, at), rank, order=order) for rank, at in enumerate((0, 3))]
    target = np.zeros(whole.nbytes, np.uint8)
    for need in match_export(pieces, True).needs:
        part = whole[:, need.location.owner * 3 :][:, :3]
        data = np.ascontiguousarray(part.transpose(order)).view(np.uint8).reshape(-1)
        copy_runs(data, target, need.copy.within(0, need.nbytes))
    assert (target.view("<f4").reshape(4, 6) == whole).all()


def test_lowest_rank_counts_where_ranks_differ() -> None:
    own = TensorPiece(
        piece("model.0.mean", (2,)).leaf, tuple(PieceLocation(PieceSource.CAPSULE, rank, 0) for rank in (2, 1))
    )
    match = match_export([own], True)
    assert [need.location.owner for need in match.needs] == [1]
    assert "each rank has its own; the lowest rank's is taken" in match.notes[0]
