"""Live tensors for held state: those that are there, and those that an optimizer would only make in its first step.

Tensors are written directly, never by `load_state_dict`: that keeps what it is handed as live state, so training would
write into the slot, and it casts the moments of bf16 parameters.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from reft.client.state import Bindings, Subjects
from reft.core.layout import Leaf, align, differences
from reft.errors import LayoutChanged

HUGE_BYTES = 2 << 20  # of a huge page on x86 and most arm64


def live_tensors(leaves: Sequence[Leaf], subjects: Subjects) -> Mapping[str, torch.Tensor]:
    """The live tensor of every held leaf, by name; optimizer state that does not exist yet is made.

    Raises:
        LayoutChanged: the held leaves are not those of the model and optimizer.
    """
    make_missing_state(leaves, subjects, subjects.bind())
    bindings = subjects.bind()
    lines = differences(leaves, bindings.layout().leaves)
    if lines:
        raise LayoutChanged(
            "the held state is of another model or optimizer:\n  " + "\n  ".join(lines),
            "start it under another job name, or drop what is held with reft-cli purge",
        )
    return bindings.tensors


def make_missing_state(leaves: Sequence[Leaf], subjects: Subjects, bindings: Bindings) -> None:
    """Gives optimizers the state tensors that are held but do not exist before a first step."""
    parameters = dict(subjects.parameter_names())
    room = _Room(sum(align(leaf.nbytes) for leaf in leaves if leaf.name not in bindings.tensors))
    for leaf in leaves:
        prefix, _, rest = leaf.name.partition(".")
        if leaf.name in bindings.tensors:
            continue
        if prefix == "state" and leaf.name.endswith(("._scale", "._growth_tracker")):
            _make_scale(leaf, subjects)
        if prefix != "optimizer":
            continue
        index, _, rest = rest.partition(".")
        key, _, name = rest.partition(".")
        if int(index) < len(subjects.optimizers) and name in parameters:
            parameter = parameters[name]
            subjects.optimizers[int(index)].state[parameter][key] = _new_tensor(leaf, parameter, room)


class _Room:
    """Fresh host memory for many tensors in huge pages: in small pages it costs several times the copy into it.

    Tensors that malloc places one by one begin and end between huge pages, and much of them misses those. Each tensor
    made here has a storage of its own; the memory is given back once the last of them is gone.

    Args:
        nbytes: of all tensors, each aligned.
    """

    def __init__(self, nbytes: int) -> None:
        self._at = 0
        self._bytes = np.empty(0, np.uint8)
        if nbytes >= HUGE_BYTES:
            pages = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
            whole = np.frombuffer(pages, np.uint8)
            begin = -whole.ctypes.data % HUGE_BYTES
            self._bytes = whole[begin : begin + nbytes]

    def empty(self, leaf: Leaf, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the leaf's shape and strides; from malloc if there is no room, or none was worth making."""
        end = self._at + leaf.nbytes
        if end > len(self._bytes) or not leaf.nbytes:
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype)
        run = torch.from_numpy(self._bytes[self._at : end]).view(dtype)
        self._at = align(end)
        return run.as_strided(leaf.shape, leaf.stride)


def _new_tensor(leaf: Leaf, parameter: torch.Tensor, room: _Room) -> torch.Tensor:
    """Room for one leaf of optimizer state. A scalar counter stays on the host, where torch's own optimizers keep it."""
    dtype = getattr(torch, leaf.dtype)
    on_host = not leaf.shape and parameter.dim() > 0
    if on_host or parameter.device.type == "cpu":
        return room.empty(leaf, dtype)
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=parameter.device)


def _make_scale(leaf: Leaf, subjects: Subjects) -> None:
    _, name, key = leaf.name.split(".")
    scaler = subjects.scalers.get(name)
    if scaler is not None:
        device = "cpu" if not torch.cuda.is_available() else scaler._device
        setattr(scaler, key, torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device=device))
