"""Live tensors for held state: those that are there, and those that an optimizer would only make in its first step.

Tensors are written directly, never by `load_state_dict`: that keeps what it is handed as live state, so training would
write into the slot, and it casts the moments of bf16 parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.tensors import TensorIndex, device_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout.layout import Leaf, align, differences
from reft.errors import LayoutChanged


def live_tensors(
    leaves: Sequence[Leaf], tracked: TrackedObjects, before: TensorIndex, room: HugePageBuffer | None = None
) -> Mapping[str, torch.Tensor]:
    """The live tensor of every held leaf, by name; optimizer state that does not exist yet is made.

    Args:
        leaves: held ones.
        before: what there is; looking for it once more would hold up who waits for the state.
        room: for what must be made; None, or one that is too small: another is made.

    Raises:
        LayoutChanged: the held leaves are not those of the model and optimizer.
    """
    missing = [leaf for leaf in leaves if leaf.name not in before.tensors or _was_resized(leaf, before)]
    tensor_index = _made(missing, tracked, before, room) if missing or not before.is_current() else before
    lines = differences(leaves, tensor_index.layout().leaves)
    if lines:
        raise LayoutChanged(
            "the held state is of another model or optimizer:\n  " + "\n  ".join(lines),
            "start it under another job name, or drop what is held with reft-cli purge",
        )
    return tensor_index.tensors


def _was_resized(leaf: Leaf, before: TensorIndex) -> bool:
    """Whether it is a buffer of another shape: training may have grown it."""
    return leaf.staged and tuple(before.tensors[leaf.name].shape) != leaf.shape


def _made(
    missing: Sequence[Leaf], tracked: TrackedObjects, before: TensorIndex, room: HugePageBuffer | None
) -> TensorIndex:
    """What there is once the missing leaves are made."""
    if room is None or room.nbytes < sum(align(leaf.nbytes) for leaf in missing):
        room = room_for(missing, tracked, before)
    try:
        make_missing_state(missing, tracked, room)
        return tracked.bind()
    finally:
        room.settle()  # an old kernel's pages are made by writing zeros: nobody may have a tensor there meanwhile


def room_for(leaves: Iterable[Leaf], tracked: TrackedObjects, tensor_index: TensorIndex) -> HugePageBuffer:
    """Room for those of the leaves that do not exist; where that is host memory, its pages are being made from now on."""
    room = HugePageBuffer(sum(align(leaf.nbytes) for leaf in leaves if leaf.name not in tensor_index.tensors))
    if tracked.makes_on_host:
        room.make_pages()
    return room


def make_missing_state(missing: Sequence[Leaf], tracked: TrackedObjects, room: HugePageBuffer) -> None:
    """Makes the state tensors that are held but do not exist before a first step."""
    tracked.make(missing, room)
    for leaf in missing:
        if leaf.name.startswith("state.") and leaf.name.endswith(("._scale", "._growth_tracker")):
            _make_scale(leaf, tracked)


def _make_scale(leaf: Leaf, tracked: TrackedObjects) -> None:
    _, name, key = leaf.name.split(".")
    scaler = tracked.scalers.get(name)
    if scaler is not None:
        device = device_of(named.local for named in tracked.parameters())  # as the scaler does: where the loss lies
        setattr(scaler, key, torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device=device))
