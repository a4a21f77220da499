"""Decides which whole tensors an export has, and which old pieces make them.

    pieces of all old ranks ─► by name ─► one whole, row-major tensor of each ─► transfers to it
                                     └─► or a line on what it can't be

    model.0.layers.1.weight                     layers.1.weight
    optimizer.0.exp_avg.model.0.layers.1.weight state.layers.1.weight.exp_avg

Invariants
  1. A name in an export is the name in the model's own state dict. If two models share a name, then
     all names begin with the model's number.
  2. A weight is whole, or nothing is exported. A weight that is held in a form without a known
     place in the whole tensor is named, never guessed.
  3. What is not exported of optimizers, and all other state, is counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reft.core.layout.layout import Leaf, strides_of
from reft.core.layout.model_form import ModelForm
from reft.core.layout.regions import itemsize
from reft.core.recovery.shard_matching import PieceTransfer, TensorPiece, match
from reft.core.text import counted

WEIGHT = re.compile(r"model\.(\w+)\.([^\[/]+)")
MOMENT = re.compile(r"optimizer\.(\d+)\.([^.\[/]+)\.(model\..+)")
FLAT = re.compile(r"(.*\.)?_flat_param")
DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})  # that a cast reads and writes


@dataclass(frozen=True)
class ExportTensor:
    """One whole tensor of an export.

    Attributes:
        name: in the export.
        leaf: the whole tensor, row-major, under the leaf's name.
        shape: of the tensor in the export.
        dtype: in the export.
        is_weight: whether the model's state dict has it; else the optimizer's.
    """

    name: str
    leaf: Leaf
    shape: tuple[int, ...]
    dtype: str
    is_weight: bool


@dataclass
class ExportMatch:
    """The tensors of an export, and the transfers that fill them.

    Attributes:
        tensors: in the order of their names; weights first.
        needs: the transfers. The target of each is the name of a tensor's leaf.
        problems: a line for each weight that can't be exported; with any, nothing is.
        notes: what the export leaves out or chooses, for a person.
    """

    tensors: list[ExportTensor] = field(default_factory=list)
    needs: list[PieceTransfer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match_export(pieces: Sequence[TensorPiece], has_optimizer: bool, dtype: str = "") -> ExportMatch:
    """Returns the tensors of an export, and where their bytes come from.

    Args:
        pieces: the pieces of all old ranks.
        has_optimizer: whether optimizer state is exported, too.
        dtype: of floating point weights in the export, one of DTYPES; empty: as they are held.
    """
    done, held = ExportMatch(), dict[str, Leaf]()
    for piece in pieces:
        held.setdefault(piece.leaf.name, piece.leaf)
    _add_weights(done, held, dtype)
    if has_optimizer:
        _add_moments(done, held)
    chosen = {each.leaf.name for each in done.tensors}
    left_out = sum(not name.startswith("model.") for name in held.keys() - chosen)
    if left_out:
        done.notes.append(f"{counted(left_out, 'tensor')} of optimizers and other state left out")
    wanted = [tuple(each.leaf for each in done.tensors)]
    matched = match([piece for piece in pieces if piece.leaf.name in chosen], wanted)
    done.needs = matched.needs
    done.problems += matched.problems
    if matched.own:
        done.notes.append(
            f"{counted(len(matched.own), 'tensor')}, first {matched.own[0]}: each rank has its own; the lowest rank's is taken"
        )
    return done


def _add_weights(done: ExportMatch, held: Mapping[str, Leaf], dtype: str) -> None:
    weights = sorted(name for name in held if name.startswith("model."))
    forms = {name: ModelForm.of(held[name]) for name in weights}
    found = {name: WEIGHT.fullmatch(forms[name].name or name) for name in weights if not forms[name].is_temporary}
    short = [each[2] for each in found.values() if each is not None]
    are_distinct = len(set(short)) == len(short)
    for name, parts in found.items():
        whole, shape = _whole(held[name]), forms[name].shape
        if parts is None or FLAT.fullmatch(parts[2]):
            done.problems.append(f"{name}: its place in the whole tensor is not known")
        elif shape is not None and math.prod(shape) != math.prod(whole.shape):
            done.problems.append(f"{name}: {list(whole.shape)} elements are no {list(shape)}")
        else:
            label = parts[2] if are_distinct else f"{parts[1]}.{parts[2]}"
            cast = dtype if whole.dtype in DTYPES else ""
            done.tensors.append(
                ExportTensor(label, whole, whole.shape if shape is None else shape, cast or whole.dtype, True)
            )


def _add_moments(done: ExportMatch, held: Mapping[str, Leaf]) -> None:
    weights = {each.leaf.name: each for each in done.tensors}
    found = {name: parts for name in held if (parts := MOMENT.fullmatch(name)) is not None and parts[3] in weights}
    has_one = len({parts[1] for parts in found.values()}) < 2
    for name, parts in sorted(found.items()):
        whole, weight = _whole(held[name]), weights[parts[3]]
        is_flat = whole.shape != weight.shape and whole.shape == weight.leaf.shape
        label = f"state.{weight.name}.{parts[2]}"
        label = label if has_one else f"{parts[1]}.{label}"
        done.tensors.append(ExportTensor(label, whole, weight.shape if is_flat else whole.shape, whole.dtype, False))


def _whole(leaf: Leaf) -> Leaf:
    """Returns the whole tensor of a piece, row-major."""
    shape = leaf.global_shape
    nbytes = itemsize(leaf) * math.prod(shape)
    return Leaf(leaf.name, leaf.dtype, shape, strides_of(shape), nbytes, False, shape, (0,) * len(shape), leaf.form)
