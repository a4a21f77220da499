"""Makes the copies of one version from earlier ones and the gradients since.

    copies at P ──► the other parity slot, WRITING ──► fold, parameter by parameter ──► compare
    records P+1 … T ──────────────────────────────────────▲           every chunk │ as the owner
                                                                                  │ sealed it at T
                                                            equal: SEALED ◄───────┤
                                                            unequal: stays WRITING┘

Invariants
  1. A slot is SEALED only if each chunk of each section has the digest in its owner's capsule of T.
     So nothing that precedes can make a wrong copy: records, capsules and torch may all be wrong.
  2. A process that ends at any moment leaves WRITING, or a slot that is complete and compared.
  3. At most one parameter, its gradient, and torch's scratch are in memory beside the slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from reft.core.commit.gradient_records import RecordDigests, chain_gap
from reft.core.commit.slots import SlotState
from reft.errors import FormatError, ReftError
from reft.failpoints import Failpoints
from reft.replay.fold import HOST, CannotFold, ParameterFold
from reft.wire import messages
from reft.wire.record_format import NO_PARAMETER, GradientRecord, RecordLeaf, RecordUpdate, read_record
from reft.wire.slot_format import Bytes, SlotMap, chunk_digest
from reft.wire.v1 import replay_pb2


class CopiesDiffer(ReftError):
    """The recomputed bytes are not those of the owner."""


class MappedRecord(NamedTuple):
    """A record and the slot of its gradients."""

    record: GradientRecord
    slot: SlotMap


class RecordedUpdate(NamedTuple):
    """One recorded update of one parameter."""

    slot: SlotMap
    update: RecordUpdate
    leaf: RecordLeaf


def replay(
    order: replay_pb2.ReplayOrder,
    base: SlotMap,
    target: SlotMap,
    slots: Sequence[SlotMap],
    failpoints: Failpoints,
    device: torch.device = HOST,
) -> None:
    """Fills and seals `target`.

    Args:
        order: what is made of what.
        base: the copies of the earlier version.
        target: written anew, whatever it holds.
        slots: the records of the marks behind the base, in any order.
        failpoints: let tests end this process, or drop an update.
        device: where the optimizers compute.

    Raises:
        CannotFold: something is missing or damaged; the target holds nothing.
        CopiesDiffer: the result is not the owners' state; the target holds nothing.
        FormatError: a slot is damaged.
    """
    version = messages.version_from(order.version)
    header = base.header
    if header.state is not SlotState.SEALED or header.version != messages.version_from(order.base):
        raise CannotFold(f"the copies of step {order.base.step} are gone.")
    _check_order(order, base, target)
    records = _chain(order, slots)
    target.begin(version, order.lane, b"", order.data_bytes)
    failpoints.hit("replay.begun", step=version.step)
    _copy_sections(order, base, target)
    failpoints.hit("replay.copied", step=version.step)
    for section in order.sections:
        data = target.data[section.begin : section.begin + section.nbytes]
        for fold, updates in _folds(section, data, records, device):
            for update in updates:
                if not failpoints.hit("replay.update", step=version.step):
                    _apply(fold, update)
                failpoints.hit("replay.updated", step=version.step)
            fold.finish()
    failpoints.hit("replay.folded", step=version.step)
    for section in order.sections:
        data = target.data[section.begin : section.begin + section.nbytes]
        if wrong := _wrong_chunks(section, data):
            raise CopiesDiffer(_difference(section, wrong, base, records))
    digests = np.array([chunk_digest(target.chunk(index)) for index in range(target.chunks)], np.uint64)
    target.landed()
    failpoints.hit("replay.landed", step=version.step)
    target.sealed(digests)
    failpoints.hit("replay.sealed", step=version.step)


def _chain(order: replay_pb2.ReplayOrder, slots: Sequence[SlotMap]) -> list[MappedRecord]:
    """Returns the records in the order of their marks, without a gap.

    Raises:
        CannotFold: they do not.
        FormatError: a record is damaged, or no longer there.
    """
    epoch, mapped, digests = messages.version_from(order.version).epoch, dict[int, MappedRecord](), {}
    for slot in slots:
        record, digest = read_record(slot)
        if slot.header.version is None or slot.header.version.epoch != epoch:
            raise CannotFold(f"the record of mark {record.mark} is of another epoch.")
        mapped[record.mark] = MappedRecord(record, slot)
        digests[record.mark] = RecordDigests(record.previous, digest)
    if gap := chain_gap(digests, order.base.step, order.version.step):
        raise CannotFold(gap)
    return [mapped[mark] for mark in range(order.base.step + 1, order.version.step + 1)]


def _copy_sections(order: replay_pb2.ReplayOrder, base: SlotMap, target: SlotMap) -> None:
    """Copies all sections; what lies between and behind them is zeros."""
    end = 0
    for section in sorted(order.sections, key=lambda section: section.begin):
        target.data[end : section.begin] = 0
        end = section.begin + section.nbytes
        np.copyto(target.data[section.begin : end], base.data[section.base_begin :][: section.nbytes])
    target.data[end : order.data_bytes] = 0


def _folds(
    section: replay_pb2.ReplaySection, data: Bytes, records: Sequence[MappedRecord], device: torch.device
) -> Iterator[tuple[ParameterFold, list[RecordedUpdate]]]:
    """Yields each parameter of a section that was updated, and its updates."""
    updates: dict[tuple[str, str], list[RecordedUpdate]] = {}
    for record, slot in records:
        for update in record.updates:
            for leaf in update.leaves:
                if leaf.owner == section.owner:
                    updates.setdefault((update.optimizer, leaf.name), []).append(RecordedUpdate(slot, update, leaf))
    optimizers = {optimizer for optimizer, _ in updates}
    states = {optimizer: _states(section, data, optimizer) for optimizer in optimizers}
    for (optimizer, name), of_parameter in updates.items():
        kind = of_parameter[0].update.kind
        if any(each.update.kind != kind for each in of_parameter):
            raise CannotFold(f"{name} is updated by two classes of optimizers.")
        yield ParameterFold(name, kind, states[optimizer].pop(name, {}), device), of_parameter


def _states(section: replay_pb2.ReplaySection, data: Bytes, optimizer: str) -> dict[str, dict[str, torch.Tensor]]:
    """Returns parameter → key → tensor, mapped where the section has it, of one optimizer."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    mapped = [(leaf, data[leaf.offset : leaf.offset + leaf.nbytes]) for leaf in section.leaves]
    inline = [
        (leaf, np.frombuffer(bytearray(held), np.uint8))
        for leaf, held in zip(section.inline_leaves, section.inline_bytes, strict=True)
    ]
    for leaf, held in (*mapped, *inline):
        if leaf.name.startswith(f"{optimizer}."):
            key, _, name = leaf.name.removeprefix(f"{optimizer}.").partition(".")
            states.setdefault(name, {})[key] = _tensor(leaf.name, held, leaf.dtype, leaf.shape, leaf.stride)
    return states


def _apply(fold: ParameterFold, recorded: RecordedUpdate) -> None:
    slot, update, leaf = recorded
    stride = fold.stride_of(leaf.shape)
    begins = [leaf.offset] if leaf.param_offset == NO_PARAMETER else [leaf.offset, leaf.param_offset]
    tensors = [
        _tensor(leaf.name, slot.data[begin : begin + leaf.nbytes], leaf.dtype, leaf.shape, stride) for begin in begins
    ]
    fold.update(update.groups[leaf.group], *tensors)


def _tensor(name: str, data: Bytes, dtype: str, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Returns bytes as a tensor, without a copy.

    Raises:
        CannotFold: the bytes are no such tensor.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or data.nbytes != kind.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise CannotFold(f"{name} has {data.nbytes} bytes; that is no {dtype} {list(shape)}.")
    try:
        return torch.from_numpy(data).view(kind).as_strided(tuple(shape), tuple(stride))
    except RuntimeError as error:
        raise CannotFold(f"{name} can't be mapped: {error}.") from error


def _wrong_chunks(section: replay_pb2.ReplaySection, data: Bytes) -> list[int]:
    """Returns the chunks whose digest is not the owner's."""
    size = section.chunk_bytes
    wrong = []
    for index, digest in enumerate(section.digests):
        chunk = data[index * size : (index + 1) * size]
        if section.has_whole_chunks and chunk.nbytes < size:
            chunk = np.concatenate([chunk, np.zeros(size - chunk.nbytes, np.uint8)])
        if chunk_digest(chunk) != digest:
            wrong.append(index)
    return wrong


def _difference(
    section: replay_pb2.ReplaySection, wrong: Sequence[int], base: SlotMap, records: Sequence[MappedRecord]
) -> str:
    """Returns what differs, and the reason if memory has changed."""
    text = (
        f"the recomputed state of rank {section.owner} differs from the owner's in {len(wrong)} of "
        f"{len(section.digests)} chunks, first in chunk {wrong[0]}"
    )
    if base.bad_chunks():
        return f"{text}: the copies that it began from have changed in memory."
    for record, slot in records:
        if slot.bad_chunks():
            return f"{text}: the record of mark {record.mark} has changed in memory."
    return f"{text}: this processor does not repeat the owner's optimizer bit for bit."


def _check_order(order: replay_pb2.ReplayOrder, base: SlotMap, target: SlotMap) -> None:
    """Raises FormatError if an order does not fit its slots."""
    held, room = base.header.data_bytes, target.header.geometry.data_capacity
    copied = max((section.base_begin + section.nbytes for section in order.sections), default=0)
    made = max((section.begin + section.nbytes for section in order.sections), default=0)
    if copied > held or made > order.data_bytes or order.data_bytes > room:
        raise FormatError(
            f"sections up to byte {copied} of {held} don't fit up to byte {made} of {order.data_bytes}, in {room}."
        )
    for section in order.sections:
        chunks = -(-section.nbytes // section.chunk_bytes)
        outside = [leaf.name for leaf in section.leaves if leaf.offset + leaf.nbytes > section.nbytes]
        if len(section.digests) != chunks or outside:
            raise FormatError(f"rank {section.owner} has {len(section.digests)} digests of {chunks}; {outside[:1]}")
