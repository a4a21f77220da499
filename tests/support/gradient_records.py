"""A rank that records gradients, without a daemon: its node copies rank 1's state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from reft.client.records.record_copy import HostRecordCopy, RecordCopy
from reft.client.records.record_plan import plan_records
from reft.client.records.record_slots import RecordSlots
from reft.client.records.record_writer import RecordWriter
from reft.client.records.recorder import GradientRecorder
from reft.client.state.tensors import flat_bytes
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import place
from reft.core.commit.pins import Pins
from reft.core.commit.slots import Slot
from reft.core.commit.version import Epoch
from reft.core.layout.cells import divide
from reft.core.layout.layout import pack
from reft.wire.record_format import GradientRecord, RecordLeaf, read_record
from reft.wire.slot_format import Geometry, SlotMap
from reft.wire.v1 import daemon_pb2 as pb

CHUNK = 4096
EPOCH = Epoch(3, b"3" * 16)


def record_slots_of(count: int, data_bytes: int, rank: int = 0) -> list[Any]:
    """Returns record slots without a daemon."""
    slots = []
    for index in range(count):
        geometry = Geometry(0, data_bytes, CHUNK)
        slot_map = SlotMap.create(np.full(geometry.file_bytes, 0xAA, np.uint8), geometry, "job", rank)
        slot = SimpleNamespace(index=index, map=slot_map, descriptor=-1)
        slot.view = lambda slot=slot: Slot(slot.index, slot.map.header.state, slot.map.header.version)
        slots.append(slot)
    return slots


class RecordingRank:
    """Rank 0 of two. Rank 1 updates the parameters whose index is odd.

    Args:
        kind: class of the optimizer.
        groups: how many groups the parameters are dealt to.
        count: number of record slots.
        copy: copies the gradients.
        shapes: shapes of the parameters.
        slots: the slots of an earlier rank, to be written on.
        mark: the completed step; None: unknown.
        optimizers: how many optimizers the parameters are cut among.
        **values: of the optimizer.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], groups: int = 1, count: int = 4, copy: RecordCopy | None = None,
        shapes: Sequence[tuple[int, ...]] = ((40, 30), (30,), (3000,), (70, 20), (1,), (9000,)), epoch: Epoch = EPOCH,
        slots: list[Any] | None = None, mark: int | None = 0, optimizers: int = 1, **values: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(4)
        self.model = nn.Module()
        self.parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for i, parameter in enumerate(self.parameters):
            self.model.register_parameter(f"p{i}", parameter)
        self.optimizers = [kind(_dealt(part, groups), **values) for part in _cut(self.parameters, optimizers)]
        self.optimizer = self.optimizers[0]
        self.tracked = TrackedObjects({"model.0": self.model}, tuple(self.optimizers), {})
        self.names = [f"model.0.p{i}" for i in range(len(shapes))]
        predicted = self.tracked.predict(self.tracked.names())
        leaves_of = [[leaf for leaf in predicted if int(leaf.name.rpartition(".p")[2]) % 2 == rank] for rank in (0, 1)]
        layouts = [pack([*self.tracked.bind().leaves(), *leaves]) for leaves in leaves_of]
        division = divide({each.digest: each for each in layouts}, [each.digest for each in layouts], (), 0)
        self.placement = place(division, range(2), "auto", 1, CHUNK, 4)
        self.plan = plan_records(self.placement, 0, [1], self.tracked)
        self.reporter: Any = SimpleNamespace(
            pins=Pins(), is_stale=False, reply=pb.ReportReply(), facts=SimpleNamespace(epoch=epoch, rank=0, job="job")
        )
        self.slots = slots or record_slots_of(count, self.plan.layout.data_bytes)
        self.copy = copy or HostRecordCopy()
        self.writer = RecordWriter(self.plan, RecordSlots(self.slots, lambda *_: []), self.reporter, self.copy, None)
        self.recorder = GradientRecorder(self.plan, self.writer, self.copy, mark)
        self.seen: dict[str, tuple[bytes, bytes]] = {}  # gradient and parameter at the last step
        for index, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(partial(self._before, index))
        self.step_number = 0

    def _before(self, index: int, *_: object) -> None:
        self.seen = {
            name: (bytes_of(each.grad), bytes_of(each))
            for name, each in zip(self.names, self.parameters, strict=True)
            if each.grad is not None
        }
        self.recorder.before_step(index)

    def backward(self, scale: float = 1.0) -> None:
        loss = sum((each * torch.randn(each.shape)).square().sum() for each in self.parameters)
        (loss * scale).backward()

    def step(self, set_to_none: bool = True) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def mark(self, calls_hooks: bool = True) -> None:
        """Marks a step, and waits until its record is written."""
        self.step_number += 1
        self.recorder.mark(self.step_number, calls_hooks)
        self.wait()

    def wait(self) -> None:
        self.writer.idle().result(20)

    def protect(self) -> None:
        """Protects the last marked step."""
        self.reporter.pins = Pins(0, self.step_number, -1, self.step_number)

    def records(self) -> dict[int, tuple[GradientRecord, str, SlotMap]]:
        """Returns the sealed records of the epoch, and their digests and slots, by mark."""
        found = {}
        for slot in self.slots:
            header = slot.map.reread()
            if header.state.name == "SEALED" and header.version.epoch == self.reporter.facts.epoch:
                assert slot.map.bad_chunks() == []
                found[header.version.step] = (*read_record(slot.map), slot.map)
        return found

    def close(self) -> None:
        self.recorder.close()


def _cut(parameters: Sequence[nn.Parameter], count: int) -> list[Sequence[nn.Parameter]]:
    size = -(-len(parameters) // count)
    return [parameters[begin : begin + size] for begin in range(0, len(parameters), size)]


def _dealt(parameters: Sequence[nn.Parameter], groups: int) -> list[dict[str, Any]]:
    return [{"params": parameters[g::groups], "lr": 0.1 / (g + 1)} for g in range(groups)]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return flat_bytes(tensor.detach()).cpu().numpy().tobytes()


def gradient_of(leaf: RecordLeaf, slot: SlotMap) -> bytes:
    """Returns the bytes of a recorded gradient."""
    return slot.data[leaf.offset : leaf.offset + leaf.nbytes].tobytes()


def parameter_of(leaf: RecordLeaf, slot: SlotMap) -> bytes:
    """Returns the bytes of a recorded parameter."""
    return slot.data[leaf.param_offset : leaf.param_offset + leaf.nbytes].tobytes()


def tensor_of(data: bytes, leaf: RecordLeaf) -> torch.Tensor:
    """Returns a tensor of a leaf's shape and dtype with these bytes."""
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, leaf.dtype)).reshape(leaf.shape)
