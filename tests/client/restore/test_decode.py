"""Lost shards of a device are decoded there: the same bytes, in bounded memory, and not before their parity is there."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reft.client.memory.cuda import Device
from reft.client.restore.decode import Decoder, DeviceDecoder, decoder_for
from reft.client.restore.tensor_view import FlatTensorView
from reft.errors import RestoreError
from tests.support.loads import Job, blank, every_loss, few, mixed, random
from tests.support.shards import alike
from tests.support.streams import Inline, Late

SCRATCH = 64 << 10
CPU = torch.device("cpu")
KINDS = [
    pytest.param((Inline, "cpu"), id="inline"),
    pytest.param((Late, "cpu"), id="late"),
    pytest.param((Device, "cuda"), id="cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


class Deaf(Late):
    """Nobody waits for what it was told to do."""

    def host_waits(self, event):
        pass


class Measured(Inline):
    """Counts the memory that is made while something is enqueued."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def on_side(self):
        return _Counting(self)


class _Counting(TorchDispatchMode):
    def __init__(self, measured: Measured) -> None:
        super().__init__()
        self._measured = measured

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            arg.untyped_storage().data_ptr()
            for arg in [*args, *(kwargs or {}).values()]
            if isinstance(arg, torch.Tensor)
        }
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in known:
            self._measured.made += found.untyped_storage().nbytes()
        return found


class OnDevice(Job):
    """A job whose ranks decode on a device; a leaf that is not dense is loaded on the host, like a counter of steps."""

    def __init__(self, kind, *args, scratch: int = SCRATCH, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        streams, device = kind
        self.streams: list[Device] = []
        self.device = torch.device(device)

        def decoder() -> Decoder:
            self.streams.append(streams())
            return DeviceDecoder(self.device, self.streams[-1], scratch)

        self.decoder = decoder

    def load(self, *args, **kwargs):
        self.live = [
            {name: tensor.to(self.device) if name != "strided" else tensor for name, tensor in tensors.items()}
            for tensors in self.live
        ]
        return super().load(*args, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("D", "f"), [(2, 1), (3, 1), (5, 2)])
def test_every_loss_that_is_tolerated_comes_back(kind, D, f):
    every_loss(OnDevice(kind, D, "aec", f, few(), scratch=2048), f)  # so that its rows are used again


@pytest.mark.parametrize("kind", KINDS)
def test_odd_sizes_and_columns_that_end_within_leaves(kind):
    """The scratch has room for a few columns of each band only."""
    job = OnDevice(kind, 5, "aec", 2, mixed(2), scratch=4096)
    assert job.load((0, 4)) == [()] * 5  # and the last data shard, which ends in padding, stays
    assert job.is_whole()


def test_a_decode_that_nobody_waits_for_is_noticed():
    """The test before must see what a real device may do: be late."""
    job = OnDevice((Deaf, "cpu"), 5, "aec", 2, mixed(2))
    found = job.load((1, 4))
    assert any(isinstance(result, RestoreError) for result in found)


def test_the_device_needs_the_scratch_and_nothing_else():
    tensors = {f"leaf{i}": random((90_000 + i,), torch.float32, i) for i in range(3)} | few()
    job = OnDevice((Measured, "cpu"), 4, "aec", 2, tensors)
    assert job.load((0, 3)) == [()] * 4
    assert job.is_whole()
    assert [streams.made for streams in job.streams] == [SCRATCH] * 4
    assert sum(tensor.nbytes for tensor in tensors.values()) > 16 * SCRATCH


def test_three_shards_of_a_wide_group_are_decoded_late():
    job = OnDevice((Late, "cpu"), 8, "aec", 3, few())
    assert job.load((1, 2, 6)) == [()] * 8
    assert job.is_whole()


def test_it_begins_when_the_tensors_are_made_and_ends_when_the_device_has():
    job = OnDevice((Inline, "cpu"), 3, "aec", 1)
    job.load((1,))
    for streams in job.streams:
        first, *rest = streams.order
        assert first == "record compute"
        assert rest[0] == "host waits for compute"
        recorded = [line.removeprefix("record ") for line in rest[1:] if line.startswith("record")]
        waited = [line for line in rest[1:] if line.startswith("host waits for side")]
        assert recorded and len(recorded) == len(waited)


def test_cells_of_the_host_are_decoded_there():
    job = Job(3, "aec", 1)
    made: list[Inline] = []

    def decoder() -> Decoder:
        made.append(Inline())
        return DeviceDecoder(torch.device("meta"), made[-1], SCRATCH)

    job.decoder = decoder
    assert job.load((1,)) == [()] * 3
    assert job.is_whole()
    assert all(streams.order == ["record compute", "host waits for compute"] for streams in made)


def test_state_of_the_host_has_a_decoder_of_the_host():
    assert type(decoder_for(CPU, SCRATCH)) is Decoder


def test_wrong_digests_of_a_lost_slot_are_refused():
    job = OnDevice((Inline, "cpu"), 4, "aec", 1)
    table = job.digests(2)
    table[1] ^= 1
    assert isinstance(job.load((2,), digests={2: table})[2], RestoreError)


def test_a_scratch_without_room_for_a_column_is_refused():
    found = OnDevice((Inline, "cpu"), 3, "aec", 1, scratch=128).load((1,))
    assert "REFT_PARITY_SCRATCH_BYTES" in str(found[0])


def test_what_is_scattered_over_leaves_is_gathered_again():
    tensors = mixed()
    del tensors["strided"]  # its memory is made for what is loaded
    job = Job(2, "none", 0, tensors)
    cell = job.placement.division.cells[0]
    host = FlatTensorView(cell.leaves, cell.offsets, tensors)
    device = FlatTensorView(cell.leaves, cell.offsets, live := blank(tensors), device=CPU)
    assert device.is_on_device and not host.is_on_device
    whole = torch.empty(cell.nbytes, dtype=torch.uint8)
    host.read(0, whole.numpy())
    for begin in range(0, cell.nbytes, 777):
        device.scatter(begin, whole[begin : begin + 777])
    device.finish()
    assert alike(live, tensors, list(tensors))
    back = torch.full((cell.nbytes,), 255, dtype=torch.uint8)
    for begin in range(0, cell.nbytes, 555):
        device.gather(begin, back[begin : begin + 555])
    assert torch.equal(back, whole)
