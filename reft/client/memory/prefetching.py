"""What a loop in Python will look at, brought into the core's cache ahead of it.

A mark comes when training has just read and written gigabytes: nothing that it compares is in a cache, and from one tensor to
the next there are too many instructions for the core to see ahead, so it would wait for the memory of each. A loop of five
instructions asks for all of it within the time of a few such waits. Elsewhere than on x86-64, and where the system lets no
process map code of its own, the objects themselves are touched, and what lies behind them is waited for.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from reft.client.memory.machine_code import address_of, mapped
from reft.wire.slot_format import Bytes

log = logging.getLogger("reft")

LINE = 64
# void fetch(const void *const *addresses, size_t count); System V: rdi, rsi; at least one. A prefetch raises nothing: whatever
# an address was taken from may be gone.
LOOP = bytes.fromhex(
    "f30f1efa"  #       endbr64
    "488b07"  #   next: mov        rax, [rdi]
    "0f1808"  #         prefetcht0 [rax]
    "4883c708"  #       add        rdi, 8
    "48ffce"  #         dec        rsi
    "75f1"  #           jne        next
    "c3"  #             ret
)
OBJECT_BYTES, TENSOR_BYTES, STORAGE_BYTES = 64, 208, 64  # of a container or tensor, and of what torch has behind it


def ahead(objects: Sequence[object], tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
    """A function that fetches what asking objects and tensors reads, and not what containers contain.

    Args:
        objects: containers and tensors.
        tensors: those of them whose memory is asked for; plain ones.
    """
    try:
        loop = mapped(LOOP)
    except OSError as error:
        log.info("nothing is fetched ahead of a mark: %s.", error)
        return lambda: tuple(objects)  # counts a reference to each
    lines = np.concatenate([
        _lines(map(id, objects), OBJECT_BYTES),
        _lines(map(_behind, tensors), TENSOR_BYTES),
        _lines((_behind(tensor.untyped_storage()) for tensor in tensors), STORAGE_BYTES),
        _lines([address_of(loop)], len(LOOP)),  # so that there is one
    ])  # fmt: skip
    call = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(address_of(loop))
    first, count = address_of(lines), len(lines)

    def fetch(_kept: tuple[Bytes, npt.NDArray[np.uint64]] = (loop, lines)) -> None:  # they live as long as what calls
        call(first, count)

    return fetch


def _behind(value: torch.Tensor | torch.UntypedStorage) -> int:
    """Where torch's own object lies. The attribute is private: a torch without it is no reason to fail, nothing lies at 0."""
    address: int = getattr(value, "_cdata", 0)
    return address


def _lines(addresses: Iterable[int], nbytes: int) -> npt.NDArray[np.uint64]:
    """An address in each line in which so many bytes from each of the addresses on lie."""
    begins = np.fromiter(addresses, np.uint64)
    offsets = np.array([*range(0, nbytes, LINE), nbytes - 1], np.uint64)
    return (begins[:, None] + offsets).ravel()  # a line that is asked for twice is fetched once
