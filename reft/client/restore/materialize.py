"""Live tensors for all leaves of a snapshot.

This includes optimizer state that the optimizer creates only in its first step.

Tensors are written directly, never by `load_state_dict`. That method would keep the passed tensors
as live state, so training would write into the slot. It also casts the moments of bf16 parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.structure import OF_OPTIMIZER
from reft.client.state.tensors import TensorIndex, device_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout.layout import Leaf, align, differences
from reft.errors import LayoutChanged


def live_index(
    leaves: Sequence[Leaf], tracked: TrackedObjects, before: TensorIndex, buffer: HugePageBuffer | None = None
) -> TensorIndex:
    """Returns the index of the live tensors of every leaf; creates missing optimizer state.

    Args:
        leaves: the leaves of the snapshot.
        tracked: the tracked objects.
        before: the current tensor index. A new one would delay the ranks that wait for the state.
        buffer: memory for tensors to create; if None or too small, another buffer is allocated.

    Raises:
        LayoutChanged: the leaves are not those of the model and optimizer.
    """
    for prefix, values in tracked.held_values().items():
        values.fit(leaves, f"{prefix}.")
    before = _without_other_state({leaf.name for leaf in leaves}, tracked, before)
    missing = [leaf for leaf in leaves if leaf.name not in before.tensors or _was_resized(leaf, before)]
    tensor_index = _create_missing(missing, tracked, before, buffer) if missing else before
    lines = differences(leaves, tensor_index.layout().leaves)
    if lines:
        raise LayoutChanged(
            "the snapshot is of another model or optimizer:\n  " + "\n  ".join(lines),
            "start with the model of the snapshot; or use another name: REFT_JOB=NAME (torchrun: --rdzv-id=NAME); or delete "
            "the snapshots: reft-cli purge JOB --yes",
        )
    return tensor_index


def _without_other_state(names: Collection[str], tracked: TrackedObjects, before: TensorIndex) -> TensorIndex:
    """Empties optimizers that have state which the snapshot lacks; returns a current index.

    The script may have loaded such state from a checkpoint of its own. All state of the snapshot is
    made again then, as in a process whose optimizers have none.

    Args:
        names: names of the snapshot's leaves.
        tracked: the tracked objects.
        before: the current tensor index.
    """
    others = [name for name in before.tensors if name not in names and OF_OPTIMIZER.match(name)]
    for prefix, value, extractor in tracked.items() if others else ():
        if not isinstance(extractor, OptimizerExtractor) or not isinstance(value, torch.optim.Optimizer):
            continue
        if any(name.startswith(f"{prefix}.") for name in others):
            extractor.owner(value).state.clear()
    # an earlier try, for another version, may have emptied one, too
    return before if before.is_current() else tracked.bind()


def _was_resized(leaf: Leaf, before: TensorIndex) -> bool:
    """Returns whether the leaf is a buffer that training has resized."""
    return leaf.staged and tuple(before.tensors[leaf.name].shape) != leaf.shape


def _create_missing(
    missing: Sequence[Leaf], tracked: TrackedObjects, before: TensorIndex, buffer: HugePageBuffer | None
) -> TensorIndex:
    """Creates the missing leaves and returns the new tensor index."""
    if buffer is None or buffer.nbytes < sum(align(leaf.nbytes) for leaf in missing):
        buffer = missing_state_buffer(missing, before)
    try:
        make_missing_state(missing, tracked, buffer)
        return tracked.bind()
    finally:
        buffer.settle()  # an old kernel makes pages by writing zeros; wait before tensors are filled


def missing_state_buffer(leaves: Iterable[Leaf], tensor_index: TensorIndex) -> HugePageBuffer:
    """Returns a buffer for those leaves that do not exist.

    If all tensors will lie in the buffer, threads begin to make its pages. They will not if a
    parameter lies on a device or is a flat parameter.
    """
    buffer = HugePageBuffer(sum(align(leaf.nbytes) for leaf in leaves if leaf.name not in tensor_index.tensors))
    if all(named.local.device.type == "cpu" and not named.runs for named in tensor_index.names.values()):
        buffer.make_pages()
    return buffer


def make_missing_state(missing: Sequence[Leaf], tracked: TrackedObjects, buffer: HugePageBuffer) -> None:
    """Creates the saved state tensors that do not exist before a first step."""
    tracked.make(missing, buffer)
    for leaf in missing:
        if leaf.name.startswith("state.") and leaf.name.endswith(("._scale", "._growth_tracker")):
            _make_scale(leaf, tracked)


def _make_scale(leaf: Leaf, tracked: TrackedObjects) -> None:
    _, name, key = leaf.name.split(".")
    scaler = tracked.scalers.get(name)
    if scaler is not None:
        # The scaler itself uses the device of the loss.
        device = device_of(named.local for named in tracked.parameters())
        setattr(scaler, key, torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device=device))
