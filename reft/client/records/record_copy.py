"""Copies gradients into a record slot, and digests its chunks: from the host, or from a device.

Both run in the recorder's thread. Bytes of a chunk that no gradient covers become zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from reft.client.memory import streaming
from reft.client.memory.cuda import Device
from reft.client.state.tensors import flat_bytes
from reft.wire.slot_format import Bytes, chunk_digest


class TensorRun(NamedTuple):
    """A dense tensor, and where its bytes go in a record's data."""

    offset: int
    tensor: torch.Tensor


class RecordCopy(Protocol):
    """Copies dense tensors into chunks of a slot."""

    def ready(self) -> Any:
        """Returns what the copy must wait for: the trainer calls it at the pre-hook."""

    def copy(self, runs: Sequence[TensorRun], ready: Any, data: Bytes, chunk_bytes: int, chunks: range) -> list[int]:
        """Fills chunks of a slot, and returns their digests. Returns after the last read.

        Args:
            runs: the tensors, in the order of their offsets.
            ready: what `ready` returned.
            data: the data of the slot, up to its end.
            chunk_bytes: size of a chunk.
            chunks: the chunks to fill. All runs lie in them.
        """


class HostRecordCopy:
    """Copies tensors that lie in host memory."""

    def ready(self) -> None:
        return None

    def copy(self, runs: Sequence[TensorRun], ready: Any, data: Bytes, chunk_bytes: int, chunks: range) -> list[int]:
        sources = [(run.offset, flat_bytes(run.tensor).numpy()) for run in runs]
        digests, first = [], 0
        for chunk in chunks:
            begin, end = chunk * chunk_bytes, min((chunk + 1) * chunk_bytes, data.nbytes)
            while first < len(sources) and sources[first][0] + sources[first][1].nbytes <= begin:
                first += 1
            digests.append(_fill(data[begin:end], list(_pieces(sources[first:], begin, end))))
        return digests


def _pieces(sources: Sequence[tuple[int, Bytes]], begin: int, end: int) -> Iterator[tuple[int, Bytes]]:
    """Yields the parts of the sources between two offsets, with their offsets behind `begin`."""
    for offset, source in sources:
        if offset >= end:
            return
        cut = source[max(begin - offset, 0) : end - offset]
        yield max(offset - begin, 0), cut


def _fill(target: Bytes, pieces: Sequence[tuple[int, Bytes]]) -> int:
    """Fills one chunk, and returns its digest."""
    if len(pieces) == 1 and pieces[0][1].nbytes == target.nbytes:
        streaming.copy(target, pieces[0][1])
        return chunk_digest(pieces[0][1])  # still in the core's cache; the slot's bytes are not
    end = 0
    for offset, piece in pieces:
        target[end:offset] = 0
        np.copyto(target[offset : offset + piece.nbytes], piece)
        end = offset + piece.nbytes
    target[end:] = 0
    return chunk_digest(target)


class DeviceRecordCopy:
    """Copies tensors from a CUDA device, on a side stream.

    Args:
        device: the streams.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def ready(self) -> Any:
        return self._device.record_compute()

    def copy(self, runs: Sequence[TensorRun], ready: Any, data: Bytes, chunk_bytes: int, chunks: range) -> list[int]:
        part = data[chunks.start * chunk_bytes : chunks.stop * chunk_bytes]
        memory, begin, end = torch.from_numpy(part), chunks.start * chunk_bytes, 0
        self._device.side_waits(ready)
        with self._device.on_side(), torch.no_grad():
            for offset, tensor in runs:
                at = offset - begin
                memory[at : at + tensor.nbytes].copy_(flat_bytes(tensor), non_blocking=True)
            copied = self._device.record_side()
        for offset, tensor in runs:
            part[end : offset - begin] = 0
            end = offset - begin + tensor.nbytes
        part[end:] = 0
        self._device.host_waits(copied)
        sizes = range(0, part.nbytes, chunk_bytes)
        return [chunk_digest(part[at : at + chunk_bytes]) for at in sizes]
