"""Brings a version back: from a sealed slot, through digests, into the live tensors, compared in bits.

    slot (mapped, or read from another node's daemon) ─► each chunk's digest ─► bytes of each leaf ─► tensor
                                                            │ wrong: BadSlot, an erasure: the plan is made again

Tensors are written directly, never by `load_state_dict`: that keeps what it is handed as live state, so training would
write into the slot, and it casts the moments of bf16 parameters.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from reft.client.copier import by_chunk, pieces_of
from reft.client.state import Bindings, Subjects, is_dense
from reft.core.layout import Layout, Leaf, align, differences
from reft.errors import FormatError, LayoutChanged, RestoreError
from reft.wire import capsule
from reft.wire.messages import table_from
from reft.wire.slot_format import SlotMap, chunk_digest

log = logging.getLogger("reft")
THREADS = 2  # one core nearly saturates memory; the second hides page faults
HUGE_BYTES = 2 << 20  # of a huge page on x86 and most arm64


class BadSlot(RestoreError):
    """A slot's bytes are not what its header promised; another version may still be whole."""


def load(slot: SlotMap, subjects: Subjects, at_chunk: Callable[[int], object]) -> dict[str, Any]:
    """Writes a slot's leaves into the live tensors; the tree of its capsule.

    Args:
        slot: sealed, of this rank.
        subjects: models and optimizers; optimizer state that does not exist yet is made.
        at_chunk: called before each chunk.

    Raises:
        BadSlot: a digest is wrong.
        LayoutChanged: the held leaves are not those of the model and optimizer.
    """
    try:
        layout = table_from(slot.table())
        tree = capsule.decode(slot.capsule())
    except FormatError as error:
        raise BadSlot(str(error)) from error
    tensors = _targets(layout, subjects)
    _copy(slot, layout, tensors, at_chunk)
    return tree


def _targets(layout: Layout, subjects: Subjects) -> Mapping[str, torch.Tensor]:
    """The live tensor of every held leaf."""
    bindings = subjects.bind()
    make_missing_state(layout, subjects, bindings)
    bindings = subjects.bind()
    live = bindings.layout().leaves
    lines = differences(layout.leaves, live)
    if lines:
        raise LayoutChanged(
            "the held state is of another model or optimizer:\n  " + "\n  ".join(lines),
            "start it under another job name, or drop what is held with reft-cli purge",
        )
    return bindings.tensors


def make_missing_state(layout: Layout, subjects: Subjects, bindings: Bindings) -> None:
    """Gives optimizers the state tensors that are held but do not exist before a first step."""
    parameters = dict(subjects.parameter_names())
    room = _Room(sum(align(leaf.nbytes) for leaf in layout.leaves if leaf.name not in bindings.tensors))
    for leaf in layout.leaves:
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


def _copy(
    slot: SlotMap, layout: Layout, tensors: Mapping[str, torch.Tensor], at_chunk: Callable[[int], object]
) -> None:
    """Checks each chunk and copies its bytes, in THREADS threads."""
    chunk_bytes = slot.header.geometry.chunk_bytes
    hosts = {name: tensor if _is_plain(tensor) else _staging(tensor) for name, tensor in tensors.items()}
    pieces = pieces_of(layout, hosts, staged=True) + pieces_of(layout, hosts, staged=False)
    table = by_chunk(pieces, chunk_bytes, slot.chunks)
    data, digests = slot.data, slot.digests

    def one(index: int) -> None:
        at_chunk(index)
        if chunk_digest(slot.chunk(index)) != int(digests[index]):
            raise BadSlot(
                f"chunk {index} of {slot.chunks} of rank {slot.header.rank}, {slot.header.version} is damaged."
            )
        for piece in table[index]:
            np.copyto(piece.source, data[piece.offset : piece.offset + piece.source.nbytes])

    def share(first: int) -> None:
        for index in range(slot.chunks * first // THREADS, slot.chunks * (first + 1) // THREADS):
            one(index)

    # One task a thread: thousands of futures cost more than the copy. One run of chunks a thread: two threads that meet in
    # one fresh huge page would both clear it.
    with ThreadPoolExecutor(THREADS, thread_name_prefix="reft-load") as pool:
        list(pool.map(share, range(THREADS)))
    with torch.no_grad():
        for name, tensor in tensors.items():
            if hosts[name] is not tensor:
                tensor.copy_(hosts[name])


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_dense(tensor)


def _staging(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor on a device, or one whose elements are not one run; in the strides that the slot holds."""
    if is_dense(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
