"""Copies host bytes to a device, and compares what arrived by 64-bit sums.

    host bytes ─► side stream: copy, then the sum of the bytes there ─┐
         └─────► sum on the host ────────────────────────────────────┴─► compared at the end

The sum adds the bytes as 64-bit words. So one wrong bit is always found, and any other change
unless the sum stays the same by chance. Words that change places are not found.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from reft.client.memory.cuda import Device
from reft.wire.slot_format import Bytes

WORD = 8


class DeviceCopier:
    """Copies to one device; serves several threads.

    Args:
        streams: the device's streams; None: copies block the host.
    """

    def __init__(self, streams: Device | None) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._sums: list[tuple[int, torch.Tensor]] = []

    def copy(self, target: torch.Tensor, data: Bytes) -> None:
        """Begins to copy uint8 [n] to memory of the device; `data` must stay until `wait`."""
        head = -target.storage_offset() % WORD  # torch views whole words at their own places only
        with self._streams.on_side() if self._streams else contextlib.nullcontext():
            target.copy_(torch.from_numpy(data), non_blocking=self._streams is not None)
            arrived = torch.zeros(3, dtype=torch.int64, device=target.device)
            for i, part in enumerate(_split(target, head)):
                torch.sum(part, 0, dtype=torch.int64, out=arrived[i])
        with self._lock:
            self._sums.append((_sum(data, head), arrived))

    def wait(self) -> None:
        """Returns when all copies begun so far are done."""
        if self._streams and self._sums:
            with self._streams.on_side():
                done = self._streams.record_side()
            self._streams.host_waits(done)

    def are_right(self) -> bool:
        """Returns whether the device has what was copied; waits for all copies."""
        self.wait()
        return all(expected == int(arrived.sum()) for expected, arrived in self._sums)


def _split(memory: torch.Tensor, head: int) -> list[torch.Tensor]:
    end = head + max(memory.nbytes - head, 0) // WORD * WORD
    if end == head:
        return [memory]  # torch can't view even an empty part as words at this place
    return [memory[:head], memory[head:end].view(torch.int64), memory[end:]]


def _sum(data: Bytes, head: int) -> int:
    end = head + max(data.nbytes - head, 0) // WORD * WORD
    words = data[head:end].view("<i8")
    total = int(words.sum()) + int(data[:head].sum()) + int(data[end:].sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
