"""Copies to a device: a bit that flips on the way is found, whatever the alignment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from reft.client.memory.cuda import Device
from reft.client.restore.decode import DeviceDecoder
from reft.client.restore.device_copies import DeviceCopier
from reft.client.restore.executor import NO_RANK, LoadReport
from tests.support.loads import CLEAN, Job, few
from tests.support.streams import Inline, Late

CPU = torch.device("cpu")


class Flipping(Inline):
    """A device to which one copy goes wrong in one bit."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number

    def on_side(self):
        return _FlipCopy(self)


class _FlipCopy(TorchDispatchMode):
    def __init__(self, device: Flipping) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::copy_":
            self._device.number -= 1
            if self._device.number == -1:
                args[0].view(torch.uint8)[-1] ^= 64
        return result


@given(st.integers(0, 17), st.integers(1, 100), st.data())
def test_any_flipped_bit_is_found_at_any_alignment(offset, nbytes, draws):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    memory = torch.zeros(200, dtype=torch.uint8)
    target = memory[offset : offset + nbytes]
    copies = DeviceCopier(Inline())
    copies.copy(target, data)
    assert copies.are_right() and np.array_equal(target.numpy(), data)
    other = data.copy()
    other[draws.draw(st.integers(0, nbytes - 1))] ^= 1 << draws.draw(st.integers(0, 7))
    copies = DeviceCopier(Inline())
    copies.copy(target, data)
    copies.copy(target, other)  # right by itself
    assert copies.are_right() and not np.array_equal(target.numpy(), data)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 64, 1003])
@pytest.mark.parametrize("offset", [0, 3, 8])
def test_a_copy_that_goes_wrong_is_found(nbytes, offset):
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    copies = DeviceCopier(Flipping(1))
    for _ in range(2):
        copies.copy(torch.zeros(2000, dtype=torch.uint8)[offset : offset + nbytes], data)
    assert not copies.are_right()


def test_a_late_device_has_the_bytes_after_a_wait():
    target, data = torch.zeros(100, dtype=torch.uint8), np.arange(100, dtype=np.uint8)
    copies = DeviceCopier(Late())
    copies.copy(target, data)
    assert not target.any(), "the copy only began"
    copies.wait()
    assert np.array_equal(target.numpy(), data) and copies.are_right()


def test_a_flip_in_the_copy_to_a_device_is_a_fault_of_its_rank():
    job, made = Job(3, "aec", 1, few()), list[Device]()

    def decoder() -> DeviceDecoder:
        made.append(Flipping(3 if len(made) == 1 else 1 << 60))
        return DeviceDecoder(made[-1], CPU, 64 << 10)

    job.decoder = decoder
    results = job.load()
    wrong = [rank for rank, report in enumerate(results) if report != CLEAN]
    assert len(wrong) == 1
    fault = f"rank {wrong[0]}'s device holds other bytes than were copied to it"
    assert results[wrong[0]] == LoadReport((), {fault: NO_RANK})
    assert not job.is_whole()
