"""Encodes a capsule: small host state as a tree of plain values. Nothing in it is ever executed.

    4 bytes    length of the JSON text, little-endian
    JSON       the tree; a value that JSON lacks is an object with one key, the tag: tuple, dict,
               counter, ordered, bytes, array, scalar, tensor, nan, name, names
    blob       bytes of all byte strings, arrays and tensors, end to end;
               the tree names offset and size

Every dict is written as a list of pairs, so that keys keep their type and order. Floats read back
as the same bits. Any other value is refused with its key path, at attach and not at restore.

The names of leaves travel once, in the manifest. A capsule refers to them by number: `name` is one
number; `names` is a list of texts, in which [first, size] stands for names with adjacent numbers.
A name that the manifest lacks is written in full. The tag `named` around the whole tree has the
digest of the names that were used: with other names the capsule is refused, never read wrongly.
Capsules up to protocol 7 have no such tags.
"""

from __future__ import annotations

import collections
import json
import math
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from reft.errors import FormatError, UnsupportedState

DEPTH_MAX: Final = 64
INT_BITS_MAX: Final = 4096  # PCG64 has 128-bit integers; a limit keeps the text parser linear
_JSON: Final = json.JSONEncoder(separators=(",", ":"))
_LENGTH: Final = struct.Struct("<I")
_FLOAT: Final = struct.Struct("<d")
# Numbers, text and times only; the parser behind np.dtype accepts far more.
_DTYPE: Final = re.compile(r"[<>|=]?[?biufcSUmM]\d{0,9}(\[\d{0,9}[A-Za-z]{1,2}\])?")
_DICTS: Final = {"dict": dict, "counter": collections.Counter, "ordered": collections.OrderedDict}
_TAG_OF: Final[dict[type, str]] = {kind: tag for tag, kind in _DICTS.items()}


@dataclass(frozen=True)
class TensorBytes:
    """A tensor without torch: dtype by torch's name without prefix, shape, and row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class NameTable:
    """The names that a rank's capsules refer to by number.

    Attributes:
        names: the names of the rank's leaves, in the order of the manifest's table.
    """

    names: tuple[str, ...] = ()

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Name → its number."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def digest(self) -> str:
        """A digest that differs for other names, and for another order."""
        return xxhash.xxh3_64_hexdigest("\0".join(self.names).encode("utf-8", "surrogatepass"))


NO_NAMES: Final = NameTable()


class NameRun(NamedTuple):
    """Names with adjacent numbers, read without the table of names."""

    first: int
    size: int


class _Writer(NamedTuple):
    """The growing parts of a capsule, and the numbers of names."""

    blob: bytearray
    numbers: Mapping[str, int]


class _Reader(NamedTuple):
    """The parts of a capsule that a tree's nodes refer to."""

    blob: memoryview
    names: tuple[str, ...] | None


def encode(tree: object, names: NameTable = NO_NAMES) -> bytes:
    """Returns the capsule's bytes.

    Args:
        tree: plain values.
        names: texts that are written as numbers.

    Raises:
        UnsupportedState: a value is of a type that is not stored; the message holds its key path.
    """
    writer = _Writer(bytearray(), names.numbers)
    node = _pack(tree, writer, (), 0)
    text = _JSON.encode({"named": [names.digest, node]} if names.names else node).encode()
    return _LENGTH.pack(len(text)) + text + bytes(writer.blob)


def decode(data: bytes, names: NameTable | None = None) -> Any:
    """Returns the tree that `encode` was given; arrays and bytes are copies.

    Args:
        data: the capsule's bytes.
        names: the names that the capsule was encoded with. None leaves a NameRun in the place of
            each name, for readers of other parts of the tree.

    Raises:
        FormatError: the bytes are no capsule, or were encoded with other names.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        if length > len(data) - _LENGTH.size:
            raise ValueError(f"it says {length} bytes of text, and has {len(data)} in all")
        node = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        if isinstance(node, dict) and "named" in node:
            digest, node = node["named"]
            if names is not None and digest != names.digest:
                raise ValueError(f"it refers to names with digest {digest}; the manifest's have {names.digest}")
        reader = _Reader(memoryview(data)[_LENGTH.size + length :], names.names if names is not None else None)
        return _unpack(node, reader, 0)
    except (struct.error, ValueError, KeyError, TypeError, RecursionError, AttributeError, OverflowError) as error:
        raise FormatError(f"the capsule can't be read: {error}.") from error


def _pack(value: object, writer: _Writer, path: tuple[object, ...], depth: int) -> object:
    if depth > DEPTH_MAX:
        raise UnsupportedState(f"{_path(path)} is nested deeper than {DEPTH_MAX} levels.")
    if type(value) is float and math.isnan(value):
        return {"nan": _FLOAT.pack(value).hex()}  # JSON has one NaN, floats have many
    if type(value) is str:
        number = writer.numbers.get(value)
        return value if number is None else {"name": number}
    if value is None or (isinstance(value, (bool, float)) and type(value) in (bool, float)):
        return value
    if type(value) is int:
        if value.bit_length() > INT_BITS_MAX:
            raise UnsupportedState(
                f"{_path(path)} is an integer of {value.bit_length()} bits; {INT_BITS_MAX} are allowed."
            )
        return value
    if type(value) is list:
        if depth < DEPTH_MAX and set(map(type, value)) == {str}:
            return _pack_texts(value, writer.numbers)  # fast path: thousands of parameter names
        return [_pack(item, writer, (*path, i), depth + 1) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_pack(item, writer, (*path, i), depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, dict) and type(value) in _TAG_OF:
        return {_TAG_OF[type(value)]: _pairs(value, writer, path, depth)}
    return _pack_bytes(value, writer.blob, path)


def _pack_texts(texts: Sequence[str], numbers: Mapping[str, int]) -> object:
    """Returns the node of a list of texts: its names as runs of adjacent numbers."""
    # -2: a text that is no name. No number follows it: numbers begin at 0.
    found = np.fromiter((numbers.get(text, -2) for text in texts), np.int64, len(texts))
    if (found < 0).all():
        return list(texts)
    # A run begins where a number does not follow the number before, and at each other text.
    begins = np.flatnonzero((np.diff(found, prepend=found[0] - 2) != 1) | (found < 0)).tolist()
    items: list[object] = []
    for begin, end in zip(begins, [*begins[1:], len(texts)], strict=True):
        items.append(texts[begin] if found[begin] < 0 else [int(found[begin]), end - begin])
    return {"names": items}


def _pairs(value: dict[object, object], writer: _Writer, path: tuple[object, ...], depth: int) -> list[object]:
    pairs: list[object] = []
    for key, item in value.items():
        if type(key) not in (str, int, float, bool, tuple, type(None)):
            raise UnsupportedState(f"{_path(path)} has a key of type {type(key).__name__}: {key!r}.")
        pairs.append([_pack(key, writer, (*path, key), depth + 1), _pack(item, writer, (*path, key), depth + 1)])
    return pairs


def _pack_bytes(value: object, blob: bytearray, path: tuple[object, ...]) -> object:
    at = len(blob)
    if isinstance(value, (bytes, bytearray)) and type(value) in (bytes, bytearray):
        blob += value
        return {"bytes": [at, len(value)]}
    # A subclass (a masked array) has more than its numbers. So has a dtype that numpy knows only by
    # size.
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if not _DTYPE.fullmatch(value.dtype.str) or not value.dtype.itemsize:
            raise UnsupportedState(f"{_path(path)} is an array of {value.dtype}; plain numbers are stored.")
        data = np.asarray(value).tobytes()
        blob += data
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: [value.dtype.str, list(value.shape), at, len(data)]}
    if isinstance(value, TensorBytes):
        blob += value.data
        return {"tensor": [value.dtype, list(value.shape), at, len(value.data)]}
    raise UnsupportedState(
        f"{_path(path)} is of type {type(value).__module__}.{type(value).__qualname__}; stored are numbers, text, bytes, "
        "lists, tuples, dicts, numpy arrays and tensors.",
        "give its owner a state_dict() of these types",
    )


def _unpack(node: Any, reader: _Reader, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError("nested too deep")
    if isinstance(node, list):
        return [_unpack(item, reader, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, body),) = node.items()
    if tag == "tuple":
        return tuple(_unpack(item, reader, depth + 1) for item in body)
    if tag in _DICTS:
        return _DICTS[tag]({_unpack(key, reader, depth + 1): _unpack(item, reader, depth + 1) for key, item in body})
    if tag == "name":
        return _names_of(NameRun(body, 1), reader.names)[0]
    if tag == "names":
        runs = ([item] if isinstance(item, str) else _names_of(NameRun(*item), reader.names) for item in body)
        return [each for run in runs for each in run]
    if tag == "bytes":
        return _cut(reader.blob, *body)
    if tag == "nan":
        return _FLOAT.unpack(bytes.fromhex(body))[0]
    dtype, shape, at, size = body
    if tag == "tensor":
        return TensorBytes(str(dtype), tuple(int(n) for n in shape), _cut(reader.blob, at, size))
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is no dtype of plain numbers")
    array = np.frombuffer(_cut(reader.blob, at, size), np.dtype(dtype)).reshape(shape).copy()
    if array.dtype.kind == "U" and array.nbytes:
        codes = array.reshape(-1).view(f"{array.dtype.byteorder}u4")
        if codes.max() > sys.maxunicode:  # numpy does not check this, and no text can be made of it
            raise ValueError(f"{codes.max()} is no character")
    if tag == "scalar":
        return array[()]
    if tag == "array":
        return array
    raise ValueError(f"unknown tag {tag!r}")


def _names_of(run: NameRun, names: tuple[str, ...] | None) -> Sequence[object]:
    """Returns the names of a run; the run itself without the table."""
    if names is None:
        return (run,)
    if run.first < 0 or run.size < 1 or run.first + run.size > len(names):
        raise ValueError(f"{run.size} names from number {run.first} on are none of {len(names)}")
    return names[run.first : run.first + run.size]


def _cut(blob: memoryview, at: int, size: int) -> bytes:
    if at < 0 or size < 0 or at + size > len(blob):
        raise ValueError(f"{size} bytes at {at} lie outside a blob of {len(blob)}")
    return bytes(blob[at : at + size])


def _path(path: tuple[object, ...]) -> str:
    if not path:
        return "the state"
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])  # state['loader']['sampler']
