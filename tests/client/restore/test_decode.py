"""Lost shards of a device are decoded on the device.

The bytes are the same as on the host, memory is bounded, and decoding waits for the parity.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reft.client.memory.cuda import Device
from reft.client.restore.decode import DeviceDecoder, StripeDecoder, decoder_for
from reft.client.restore.executor import NO_RANK
from reft.client.restore.slot_reader import SlotReader
from reft.client.restore.tensor_view import FlatTensorView
from tests.support.loads import CLEAN, Job, blank, every_loss, few, mixed, random
from tests.support.shards import Postbox, alike
from tests.support.streams import Inline, Late

SCRATCH = 64 << 10
CPU = torch.device("cpu")
KINDS = [
    pytest.param((Inline, "cpu"), id="inline"),
    pytest.param((Late, "cpu"), id="late"),
    pytest.param((Device, "cuda"), id="cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


class Deaf(Late):
    """Streams for which no thread waits."""

    def host_waits(self, event):
        pass


class Measured(Inline):
    """Records the sizes of memory that is allocated while work is enqueued."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

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
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self._measured.made.append(result.untyped_storage().nbytes())
        return result


class OnDevice(Job):
    """A job whose ranks decode on a device.

    A leaf that is not dense is loaded on the host, like a step counter.
    """

    def __init__(self, kind, *args, scratch: int = SCRATCH, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        streams, device = kind
        self.streams: list[Device] = []
        self.device = torch.device(device)

        def decoder() -> StripeDecoder:
            self.streams.append(streams())
            return DeviceDecoder(self.streams[-1], self.device, scratch)

        self.decoder = decoder

    def load(self, *args, **kwargs):
        self.live = [
            {name: tensor.to(self.device) if name != "strided" else tensor for name, tensor in tensors.items()}
            for tensors in self.live
        ]
        return super().load(*args, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("D", "f"), [(2, 1), (3, 1), (5, 2)])
def test_every_tolerated_loss_is_restored(kind, D, f):
    every_loss(OnDevice(kind, D, "aec", f, few(), scratch=2048), f)  # small, so that rows are reused


@pytest.mark.parametrize("kind", KINDS)
def test_odd_sizes_and_leaves_that_end_within_columns(kind):
    """The scratch holds only a few columns of each slice."""
    job = OnDevice(kind, 5, "aec", 2, mixed(2), scratch=4096)
    assert job.load((0, 4)) == [CLEAN] * 5  # the last data shard, which ends in padding, is not lost
    assert job.is_whole()


def test_a_decode_without_a_wait_is_detected():
    """The tests above must detect a late device, as real devices may be."""
    job = OnDevice((Deaf, "cpu"), 5, "aec", 2, mixed(2))
    results = job.load((1, 4))
    assert any("decoded from its peers" in fault for result in results for fault in result.faults)


def test_decoding_allocates_only_the_scratch_on_the_device():
    tensors = {f"leaf{i}": random((90_000 + i,), torch.float32, i) for i in range(3)} | few()
    job = OnDevice((Measured, "cpu"), 4, "aec", 2, tensors)
    assert job.load((0, 3)) == [CLEAN] * 4
    assert job.is_whole()
    state = sum(tensor.nbytes for tensor in tensors.values())
    large = sorted(sum(nbytes for nbytes in streams.made if nbytes > 24) for streams in job.streams)
    assert large == [0, 0, SCRATCH, SCRATCH], "only the ranks that decode; 24 bytes are the sums of one copy"
    assert max(sum(streams.made) for streams in job.streams) - SCRATCH < state // 50 and state > 16 * SCRATCH


def test_three_shards_of_a_wide_group_are_decoded_late():
    job = OnDevice((Late, "cpu"), 8, "aec", 3, few())
    assert job.load((1, 2, 6)) == [CLEAN] * 8
    assert job.is_whole()


def test_decoding_waits_for_the_tensors_and_for_the_device():
    job = OnDevice((Inline, "cpu"), 3, "aec", 1)
    job.load((1,))
    for streams in job.streams:
        first, *rest = streams.order
        assert first == "record compute"
        assert rest[0] == "host waits for compute"
        recorded = [line.removeprefix("record ") for line in rest[1:] if line.startswith("record")]
        waited = [line for line in rest[1:] if line.startswith("host waits for side")]
        assert recorded and len(recorded) == len(waited)


def test_cells_on_the_host_are_decoded_on_the_host():
    job = Job(3, "aec", 1)
    made: list[Inline] = []

    def decoder() -> StripeDecoder:
        made.append(Inline())
        return DeviceDecoder(made[-1], torch.device("meta"), SCRATCH)

    job.decoder = decoder
    assert job.load((1,)) == [CLEAN] * 3
    assert job.is_whole()
    assert all(streams.order == ["record compute", "host waits for compute"] for streams in made)


def test_state_on_the_host_gets_the_host_decoder():
    assert type(decoder_for(CPU, SCRATCH)) is StripeDecoder


def test_wrong_digests_of_a_lost_slot_are_faults():
    job = OnDevice((Inline, "cpu"), 4, "aec", 1)
    table = bytearray(job.digests(2))
    table[8] ^= 1
    fault = "chunk 1 of rank 2, decoded from its peers, differs from the saved bytes"
    assert job.load((2,), digests={2: bytes(table)})[2].faults == {fault: NO_RANK}


def test_a_scratch_too_small_for_a_column_is_refused():
    box = Postbox(deadline_s=5.0)  # the other ranks wait so long for the keeper, which has failed
    results = OnDevice((Inline, "cpu"), 3, "aec", 1, scratch=128).load((1,), box=box)
    assert "REFT_PARITY_SCRATCH_BYTES" in str(results[1]), "the keeper decodes"


def test_gather_returns_what_was_written_over_leaves():
    tensors = mixed()
    del tensors["strided"]  # not dense: this view would copy it
    job = Job(2, "none", 0, tensors)
    cell = job.placement.division.cells[0]
    host = FlatTensorView(cell.leaves, cell.offsets, tensors)
    device = FlatTensorView(cell.leaves, cell.offsets, live := blank(tensors), device=CPU)
    assert device.is_on_device and not host.is_on_device
    whole = torch.empty(cell.nbytes, dtype=torch.uint8)
    host.read(0, whole)
    for begin in range(0, cell.nbytes, 777):
        device.write(begin, whole[begin : begin + 777].numpy())
    device.finish()
    assert alike(live, tensors, list(tensors))
    back = torch.full((cell.nbytes,), 255, dtype=torch.uint8)
    for begin in range(0, cell.nbytes, 555):
        device.read(begin, back[begin : begin + 555])
    assert torch.equal(back, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_copies_from_the_mapping_of_a_pinned_slot(kind, monkeypatch):
    job, mapped = OnDevice(kind, 3, "aec", 1), []
    mapping = SlotReader.mapped
    monkeypatch.setattr(SlotReader, "mapped", lambda *args: mapped.append(args) or mapping(*args))
    for slot in job.slots:
        slot.is_pinned = True
    assert job.load() == [CLEAN] * 3
    assert job.is_whole() and mapped
    job.slots[1].data[5] ^= 1
    assert job.load()[1].damaged == (1,)
