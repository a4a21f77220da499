"""Defines the gradient record of a mark: the gradients that a node keeps for the ranks it copies.

A record lies in a slot of its own kind (reft.wire.slot_format), which has no leaf table.

    header     version = (epoch, mark), layout = digest of the planned leaves, rank = the recorder
    digests    of the chunks of the data, as in any slot
    capsule    a plain tree, see below
    data       gradients, and parameters before the update, each at a multiple of ALIGNMENT

    {"mark": 7,                      the mark that ends the step
     "previous": "9f0c…",            digest of the record of mark 6; "" if there is none
     "updates": [                    the steps of optimizers since mark 6, in their order
       {"optimizer": "optimizer.0",  the prefix of the optimizer's leaves
        "class": "AdamW",            class that updates the state, of torch.optim
        "groups": [{"lr": 0.1, …}],  all groups of the optimizer, without parameters
        "leaves": [[owner, name, group, offset, nbytes, dtype, shape, param_offset], …]}]}

A leaf is one gradient. `owner` is the rank whose section has the moments, `name` the parameter's.
The gradient has the shape and the strides of its parameter, without gaps. Its bytes lie in the
order of memory. `param_offset` is where the parameter's bytes before the update begin, in the same
order and number; -1 if they are not recorded. A record without updates says: the mark changed
nothing.

Records form a chain. The digest of a record covers its header's facts, its capsule, and the digests
of its chunks; the capsule names the record before. So a dropped, repeated, reordered or changed
record breaks the chain at its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from reft.core.commit.slots import SlotState
from reft.errors import FormatError
from reft.wire import capsule_format
from reft.wire.slot_format import Header, SlotMap

NO_RECORD: Final = ""  # `previous` of a record that begins a chain
NO_PARAMETER: Final = -1  # `param_offset` of a leaf whose parameter is not recorded

Scalar = bool | int | float | str | None | tuple[bool | int | float | str | None, ...]


@dataclass(frozen=True)
class RecordLeaf:
    """One gradient of a record; see the module.

    Attributes:
        owner: the rank whose section has the moments of the parameter.
        name: name of the parameter.
        group: index of the parameter's group in the update's groups.
        offset: where the gradient's bytes begin in the record's data.
        nbytes: bytes of the gradient.
        dtype: dtype of the gradient, as torch names it without prefix.
        shape: shape of gradient and parameter.
        param_offset: where the parameter's bytes begin, or NO_PARAMETER.
    """

    owner: int
    name: str
    group: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    param_offset: int = NO_PARAMETER


@dataclass(frozen=True)
class RecordUpdate:
    """One step of one optimizer.

    Attributes:
        optimizer: the prefix of the optimizer's leaves, e.g. "optimizer.0".
        kind: name of the class in torch.optim that updates the state, e.g. "AdamW".
        groups: the values of each group as the optimizer used them, without parameters.
        leaves: the recorded gradients.
    """

    optimizer: str
    kind: str
    groups: tuple[Mapping[str, Scalar], ...]
    leaves: tuple[RecordLeaf, ...]


@dataclass(frozen=True)
class GradientRecord:
    """What one record holds, without the gradients' bytes.

    Attributes:
        mark: the mark that ends the recorded step.
        previous: digest of the record of mark - 1, or NO_RECORD.
        updates: the steps of optimizers since mark - 1, in their order.
    """

    mark: int
    previous: str
    updates: tuple[RecordUpdate, ...]


def encode_record(record: GradientRecord) -> bytes:
    """Returns the record's capsule.

    Raises:
        UnsupportedState: a value of a group is not plain.
    """
    updates = [
        {
            "optimizer": update.optimizer,
            "class": update.kind,
            "groups": [dict(group) for group in update.groups],
            "leaves": [
                [each.owner, each.name, each.group, each.offset, each.nbytes, each.dtype, list(each.shape),
                 each.param_offset]
                for each in update.leaves
            ],
        }
        for update in record.updates
    ]  # fmt: skip
    return capsule_format.encode({"mark": record.mark, "previous": record.previous, "updates": updates})


def decode_record(capsule: bytes, data_bytes: int) -> GradientRecord:
    """Returns the record of a capsule.

    Args:
        capsule: the slot's capsule.
        data_bytes: size of the slot's data; no leaf may end behind it.

    Raises:
        FormatError: the bytes are no capsule, or a field is missing or impossible.
    """
    tree = _fields(capsule_format.decode(capsule), {"mark": int, "previous": str, "updates": list}, "the record")
    if tree["mark"] < 0:
        raise FormatError(f"the record is of mark {tree['mark']}.")
    return GradientRecord(
        tree["mark"], tree["previous"], tuple(_update_of(each, data_bytes) for each in tree["updates"])
    )


def _update_of(tree: object, data_bytes: int) -> RecordUpdate:
    fields = _fields(tree, {"optimizer": str, "class": str, "groups": list, "leaves": list}, "an update")
    groups = tuple(_group_of(group) for group in fields["groups"])
    leaves = tuple(_leaf_of(leaf, len(groups), data_bytes) for leaf in fields["leaves"])
    return RecordUpdate(fields["optimizer"], fields["class"], groups, leaves)


def _group_of(tree: object) -> Mapping[str, Scalar]:
    if type(tree) is not dict or not all(type(key) is str and _is_scalar(value) for key, value in tree.items()):
        raise FormatError(f"a group of the record is not of plain values: {tree!r:.200}.")
    return tree


def _is_scalar(value: object) -> bool:
    values = value if type(value) is tuple else (value,)
    return all(each is None or type(each) in (bool, int, float, str) for each in values)


def _leaf_of(tree: object, groups: int, data_bytes: int) -> RecordLeaf:
    kinds = (int, str, int, int, int, str, list, int)
    if type(tree) is not list or [type(each) for each in tree] != list(kinds):
        raise FormatError(f"a leaf of the record has other fields than {len(kinds)} of its kinds: {tree!r:.200}.")
    owner, name, group, offset, nbytes, dtype, shape, param_offset = tree
    if not all(type(size) is int and size >= 0 for size in shape):
        raise FormatError(f"{name} of the record has the shape {shape!r:.200}.")
    begins = [offset] if param_offset == NO_PARAMETER else [offset, param_offset]
    if owner < 0 or nbytes < 0 or not 0 <= group < groups or min(begins) < 0 or max(begins) + nbytes > data_bytes:
        raise FormatError(f"{name} lies outside the record's {data_bytes} bytes or {groups} groups: {tree!r:.200}.")
    return RecordLeaf(owner, name, group, offset, nbytes, dtype, tuple(shape), param_offset)


def _fields(tree: object, kinds: Mapping[str, type], what: str) -> dict[str, Any]:
    if type(tree) is not dict or {key: type(value) for key, value in tree.items()} != dict(kinds):
        raise FormatError(f"{what} has other fields than {', '.join(kinds)}: {tree!r:.200}.")
    return tree


def record_digest(header: Header, capsule: bytes, digests: Sequence[int]) -> str:
    """Returns the digest by which the next record of the chain names this one.

    Args:
        header: the header of the record's slot.
        capsule: the slot's capsule.
        digests: digest of each chunk of the record.

    Raises:
        ValueError: the slot is empty.
    """
    if header.version is None:
        raise ValueError("an empty slot holds no record")
    epoch, mark = header.version.epoch, header.version.step
    facts = (header.job, header.rank, epoch.counter, epoch.ident.hex(), mark, header.layout.hex(),
             header.geometry.chunk_bytes, header.data_bytes, xxhash.xxh3_64_hexdigest(capsule),
             [int(digest) for digest in digests])  # fmt: skip
    return xxhash.xxh3_64_hexdigest(repr(facts).encode())


def read_record(slot: SlotMap) -> tuple[GradientRecord, str]:
    """Returns the record of a slot, and its digest. Does not compare the data with its digests.

    Raises:
        FormatError: the slot is not sealed, its capsule is damaged, or the header is of another
            mark.
    """
    header = slot.reread()
    if header.state != SlotState.SEALED or header.version is None:
        raise FormatError(f"the record slot is {header.state.name}, not SEALED.")
    capsule = slot.capsule()
    record = decode_record(capsule, header.data_bytes)
    if record.mark != header.version.step:
        raise FormatError(f"the record of mark {record.mark} lies in a slot of {header.version}.")
    return record, record_digest(header, capsule, [int(each) for each in slot.digests[: slot.chunks]])
