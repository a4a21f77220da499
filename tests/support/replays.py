"""Ranks that train a small model, whose optimizer state another node recomputes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reft.core.commit.version import Version
from reft.core.layout.layout import Layout, Leaf, align, pack
from reft.replay.fold import reads_parameter
from reft.wire import capsule_format, messages
from reft.wire.capsule_format import NameTable
from reft.wire.record_format import (
    NO_PARAMETER,
    NO_RECORD,
    GradientRecord,
    RecordLeaf,
    RecordUpdate,
    encode_record,
    record_digest,
)
from reft.wire.slot_format import SlotMap, chunk_digest
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import replay_pb2
from reft_daemon.arena.arena import SlotFile
from tests.support.parity import CHUNK, at, memory_slot

OPTIMIZER = "optimizer.0"
SHAPES = {"bias": (33,), "matrix": (130, 127), "kernel": (64, 17, 4, 4)}
SMALL = 64 << 10
ADAMW: tuple[str, dict[str, Any]] = ("AdamW", {"lr": 1e-2})


def leaf_of(name: str, tensor: torch.Tensor) -> Leaf:
    shape = tuple(tensor.shape)
    return Leaf(
        name, str(tensor.dtype).removeprefix("torch."), shape, tensor.stride(), tensor.nbytes, False, shape,
        (0,) * len(shape),
    )  # fmt: skip


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns a dense tensor's bytes, in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).numpy().tobytes()


class TrainingOwner:
    """A rank that trains. `update` is one step of its optimizer.

    Attributes:
        rank: the rank; it decides the gradients.
        parameters: name → parameter; the kernel lies in memory as channels_last.
        recorded: the update of the last step, as a node that copies the state records it.
    """

    def __init__(self, rank: int, kind: str, settings: Mapping[str, Any], shapes: Mapping[str, Any] = SHAPES) -> None:
        self.rank, self.kind = rank, kind
        self.noise = torch.Generator().manual_seed(rank)
        self.parameters = {name: self._randn(shape).requires_grad_() for name, shape in shapes.items()}
        first, *rest = self.parameters.values()
        self.optimizer = getattr(torch.optim, kind)([{"params": [first], "lr": 0.02}, {"params": rest}], **settings)
        self.recorded: tuple[list[dict[str, Any]], dict[str, tuple[int, bytes, bytes | None]]] = ([], {})
        self.update()

    def _randn(self, shape: Sequence[int]) -> torch.Tensor:
        values = torch.randn(tuple(shape), generator=self.noise)
        return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values

    def update(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = self._randn(parameter.shape) * 0.1
        groups = [{k: copy.copy(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        leaves = {}
        for name, parameter in self.parameters.items():
            group = 0 if name == next(iter(self.parameters)) else 1
            if any(leaf.nbytes >= SMALL for leaf in self.leaves.values() if leaf.name.endswith(f".{name}")):
                before = bytes_of(parameter) if reads_parameter(self.kind, groups[group]) else None
                leaves[name] = (group, bytes_of(parameter.grad), before)
        self.recorded = (groups, leaves)
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.95

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Leaf's name → tensor."""
        return {
            f"{OPTIMIZER}.{key}.{name}": tensor
            for name, parameter in self.parameters.items()
            for key, tensor in self.optimizer.state.get(parameter, {}).items()
        }

    @property
    def leaves(self) -> dict[str, Leaf]:
        return {name: leaf_of(name, tensor) for name, tensor in self.state.items()}

    @property
    def layout(self) -> Layout:
        """The section: as `divide` lays it out."""
        return pack(sorted((leaf for leaf in self.leaves.values() if leaf.nbytes >= SMALL), key=lambda leaf: leaf.name))

    def section(self, layout: Layout | None = None) -> bytes:
        layout, state = layout or self.layout, self.state
        data = np.zeros(layout.data_bytes, np.uint8)
        for leaf, offset in zip(layout.leaves, layout.offsets, strict=True):
            data[offset : offset + leaf.nbytes] = np.frombuffer(bytes_of(state[leaf.name]), np.uint8)
        return data.tobytes()

    def inline(self) -> dict[str, bytes]:
        return {name: bytes_of(tensor) for name, tensor in self.state.items() if tensor.nbytes < SMALL}


def section_digests(section: bytes, chunk_bytes: int = CHUNK) -> list[int]:
    chunks = (section[at : at + chunk_bytes] for at in range(0, len(section), chunk_bytes))
    return [chunk_digest(np.frombuffer(chunk, np.uint8)) for chunk in chunks]


def seal(slot: SlotMap) -> None:
    slot.landed()
    slot.sealed(np.fromiter(slot.digests_of(0, slot.chunks), np.uint64))


def write_record(
    slot: SlotMap, version: Version, owners: Sequence[TrainingOwner], previous: str, has_update: bool = True
) -> str:
    """Writes and seals the record of a mark; returns its digest."""
    data, updates = bytearray(), []
    for owner in owners if has_update else ():
        groups, recorded = owner.recorded
        leaves = []
        for name, (group, gradient, parameter) in recorded.items():
            begin, shape = len(data), tuple(owner.parameters[name].shape)
            data += gradient.ljust(align(len(gradient), 64), b"\0")
            parameter_at = NO_PARAMETER if parameter is None else len(data)
            data += (parameter or b"").ljust(align(len(parameter or b""), 64), b"\0")
            leaves.append(RecordLeaf(owner.rank, name, group, begin, len(gradient), "float32", shape, parameter_at))
        updates.append(RecordUpdate(OPTIMIZER, owner.kind, tuple(groups), tuple(leaves)))
    capsule = encode_record(GradientRecord(version.step, previous, tuple(updates)))
    slot.begin(version, bytes(16), b"", len(data))
    slot.write(0, np.frombuffer(bytes(data), np.uint8))
    slot.put_capsule(capsule)
    seal(slot)
    return record_digest(slot.reread(), capsule, [int(each) for each in slot.digests[: slot.chunks]])


class ReplayScene:
    """Owners that trained from a base on, what their copies hold, and records of each mark.

    Attributes:
        order: what makes the copies of the last step from those of the base.
        base, target: the parity slots.
        records: of the marks between.
        wanted: the data that the copies must have.
    """

    def __init__(
        self, kind: str = "AdamW", settings: Mapping[str, Any] = ADAMW[1], owners: int = 1, marks: int = 5,
        without_update: Sequence[int] = (),
    ) -> None:  # fmt: skip
        base = at(10)
        self.owners = [TrainingOwner(rank, kind, settings) for rank in range(1, owners + 1)]
        piece = align(max(owner.layout.data_bytes for owner in self.owners), CHUNK)
        self.nbytes = owners * piece
        self.base, self.target = (memory_slot(f"parity-0.slot-{i}", 0, self.nbytes) for i in range(2))
        self.base.map.begin(base, b"lane" * 4, b"", self.nbytes)
        self.base.map.data[:] = np.frombuffer(self._copies(piece), np.uint8)
        seal(self.base.map)
        inline = [owner.inline() for owner in self.owners]
        self.records: list[SlotFile] = []
        previous, capacity = NO_RECORD, 4 * piece * owners
        for mark in range(base.step + 1, base.step + marks + 1):
            has_update = mark not in without_update
            for owner in self.owners if has_update else ():
                owner.update()
            self.records.append(memory_slot(f"record-0.slot-{mark}", 0, capacity))
            version = Version(base.epoch, mark)
            previous = write_record(self.records[-1].map, version, self.owners, previous, has_update)
        self.wanted = self._copies(piece)
        self.order = replay_pb2.ReplayOrder(
            base=messages.version_to(base), version=messages.version_to(version), lane=b"lane" * 4,
            data_bytes=self.nbytes,
            sections=[
                self._section(owner, number * piece, inline[number]) for number, owner in enumerate(self.owners)
            ],
        )  # fmt: skip

    def _copies(self, piece: int) -> bytes:
        return b"".join(owner.section().ljust(piece, b"\0") for owner in self.owners)

    def _section(self, owner: TrainingOwner, begin: int, inline: Mapping[str, bytes]) -> replay_pb2.ReplaySection:
        layout, leaves = owner.layout, owner.leaves
        return replay_pb2.ReplaySection(
            owner=owner.rank, base_begin=begin, begin=begin, nbytes=layout.data_bytes,
            leaves=[messages.leaf_to(*each) for each in zip(layout.leaves, layout.offsets, strict=True)],
            inline_leaves=[messages.leaf_to(leaves[name], place=pb.INLINE) for name in inline],
            inline_bytes=list(inline.values()), digests=section_digests(owner.section()), chunk_bytes=CHUNK,
        )  # fmt: skip

    @property
    def made(self) -> bytes:
        """The data of the target."""
        return self.target.map.data[: self.nbytes].tobytes()

    @property
    def slots(self) -> list[SlotFile]:
        return [self.base, self.target, *self.records]


def owner_capsule(
    owner: TrainingOwner, version: Version, data: bytes, names: NameTable, absent: Sequence[str] = ()
) -> pb.CapsuleRecord:
    """Returns an owner's capsule, with the digests of its slot's data."""
    capsule = capsule_format.encode({"riders": owner.inline(), "absent": list(absent), "compared": {}}, names)
    digests = np.array(section_digests(data, SMALL), "<u8").tobytes()
    return pb.CapsuleRecord(
        rank=owner.rank, version=messages.version_to(version), capsule=capsule, digests=digests,
        unreplicated_bytes=sum(leaf.nbytes for leaf in owner.layout.leaves),
    )  # fmt: skip


def write_owner_step(slot: SlotMap, version: Version, data: bytes, capsule: bytes) -> None:
    """Writes and seals a step of an owner, as a trainer does."""
    slot.begin(version, b"l" * 16, b"", len(data))
    slot.put_capsule(capsule)
    slot.write(0, np.frombuffer(data, np.uint8))
    seal(slot)
