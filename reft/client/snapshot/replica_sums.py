"""Reduces replicas' bytes to sums that a host and a device compute alike.

    bytes     word word word …   row 0        a word has 8 bytes, a row ROW_WORDS words
              word word word …   row 1   ─►   one sum of each row, modulo 2^64
              …                                one sum of each column
              rest                             the rest as it is: less than a row

    sums      | sums of rows | sums of columns | rest |       no columns where there is no whole row

Sums see each change of one word, and each exchange of two different words: they change a row's sum
or a column's. They can't see changes that cancel out in each row and in each column. At least four
words must change for that, two by two in the same rows and columns. Independent differences do so
with probability 2^-64. The sums do not protect against an attacker.

Sums of integers do not depend on the order of adding, so each device gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from reft.client.state.tensors import flat_bytes, is_dense
from reft.wire.slot_format import Bytes

ROW_WORDS = 1024
ROW_BYTES = 8 * ROW_WORDS
# Both sums of a piece are computed while the piece is in the core's cache.
PIECE_BYTES = 1 << 20
# A type that numpy has, for each size of an element.
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
STAGED_BYTES = 8 << 20  # device memory for bytes that do not begin at a multiple of a word


def sums_bytes(nbytes: int) -> int:
    """Returns the size of the sums of so many bytes."""
    rows, rest = divmod(nbytes, ROW_BYTES)
    return 8 * rows + ROW_BYTES * bool(rows) + rest


def sums_of(data: Bytes) -> Bytes:
    """Returns the sums of bytes in the host's memory; makes no copy of the bytes."""
    return _sums(data[begin : begin + PIECE_BYTES] for begin in range(0, data.nbytes, PIECE_BYTES))


def tensor_sums(tensor: torch.Tensor) -> Bytes:
    """Returns the sums of a tensor's bytes.

    They are read in memory order, or row-major if the tensor has gaps. No temporary is as large as
    the tensor, except for a tensor with gaps on a device. The CUDA engine takes such tensors only
    if they are small.
    """
    if tensor.device.type != "cpu":
        data = flat_bytes(tensor if is_dense(tensor) else tensor.contiguous())
        sums = torch.empty(sums_bytes(data.nbytes), dtype=torch.uint8, device="cpu")
        copy_sums(data, sums)
        return sums.numpy()
    pieces = (piece.numpy() for piece in pieces_of(tensor, PIECE_BYTES))
    return _sums(pieces if is_dense(tensor) else _whole_rows(pieces))


def pieces_of(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    """Yields the bytes of a tensor in pieces of at most `nbytes`: views, or copies if it has gaps.

    They follow in memory order, or row-major if the tensor has gaps.
    """
    if is_dense(tensor):
        yield from flat_bytes(tensor).split(nbytes)
    else:
        yield from _row_major(tensor.detach(), nbytes)


def _row_major(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    if tensor.nbytes <= nbytes:
        yield flat_bytes(tensor.contiguous()) if tensor.device.type != "cpu" else _packed(tensor)
        return
    rows = nbytes // (tensor.nbytes // len(tensor))
    for part in tensor.split(rows) if rows else tensor:
        yield from _row_major(part, nbytes)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a small tensor on the host, row-major.

    numpy copies them: torch would use its threads for each piece, and wait for all of them.
    """
    elements = tensor.view(SAME_SIZE[tensor.element_size()]).numpy()
    return torch.from_numpy(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))


def copy_sums(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> None:
    """Computes the sums of bytes on their device, and copies them to the host.

    All work is enqueued on the current stream.

    Args:
        source: the bytes.
        target: host memory of `sums_bytes(source.nbytes)` bytes.
        non_blocking: whether the host goes on at once; then `target` must be pinned.
    """
    rows = source.nbytes // ROW_BYTES
    whole = rows * ROW_BYTES
    if rows:
        sums = torch.empty(rows + ROW_WORDS, dtype=torch.int64, device=source.device)
        row_sums, column_sums = sums[:rows], sums[rows:]
        if source.data_ptr() % 8 == 0 and source.storage_offset() % 8 == 0:
            _sum(source[:whole], row_sums, column_sums)
        else:
            _sum_staged(source[:whole], row_sums, column_sums)
        target[: sums.nbytes].copy_(sums.view(torch.uint8), non_blocking=non_blocking)
    if whole < source.nbytes:
        target[-(source.nbytes - whole) :].copy_(source[whole:], non_blocking=non_blocking)


def _sum(data: torch.Tensor, row_sums: torch.Tensor, column_sums: torch.Tensor) -> None:
    words = data.view(torch.int64).view(-1, ROW_WORDS)
    torch.sum(words, 1, out=row_sums)
    torch.sum(words, 0, out=column_sums)


def _sum_staged(data: torch.Tensor, row_sums: torch.Tensor, column_sums: torch.Tensor) -> None:
    """Sums bytes that a device can't read as words, because of where they begin."""
    staged = torch.empty(min(data.nbytes, STAGED_BYTES), dtype=torch.uint8, device=data.device)
    partial_sums = torch.empty_like(column_sums)
    column_sums.zero_()
    for begin in range(0, data.nbytes, STAGED_BYTES):
        piece = data[begin : begin + STAGED_BYTES]
        aligned = staged[: piece.nbytes]
        aligned.copy_(piece, non_blocking=True)
        _sum(aligned, row_sums[begin // ROW_BYTES :][: piece.nbytes // ROW_BYTES], partial_sums)
        column_sums.add_(partial_sums)


def _sums(pieces: Iterable[Bytes]) -> Bytes:
    """Returns the sums of pieces; all pieces but the last consist of whole rows."""
    row_sums, column_sums = [], np.zeros(ROW_WORDS, np.uint64)
    rest = np.empty(0, np.uint8)
    for piece in pieces:
        whole = piece.nbytes // ROW_BYTES * ROW_BYTES
        if whole:
            # numpy would copy words that begin elsewhere twice, into a buffer for each sum.
            rows = piece[:whole] if piece.ctypes.data % 8 == 0 else piece[:whole].copy()
            words = rows.view(np.uint64).reshape(-1, ROW_WORDS)
            row_sums.append(np.add.reduce(words, axis=1))
            column_sums += np.add.reduce(words, axis=0)
        rest = piece[whole:]
    columns = [column_sums] if row_sums else []
    return np.concatenate([*(each.view(np.uint8) for each in (*row_sums, *columns)), rest])


def _whole_rows(pieces: Iterable[Bytes]) -> Iterator[Bytes]:
    """Yields the same bytes in pieces of whole rows; the rest comes last."""
    rest = np.empty(0, np.uint8)
    for piece in pieces:
        joined = np.concatenate([rest, piece])
        whole = joined.nbytes // ROW_BYTES * ROW_BYTES
        yield joined[:whole]
        rest = joined[whole:]
    yield rest
