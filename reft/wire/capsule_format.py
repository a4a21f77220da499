"""Encodes a capsule: small host state as a tree of plain values. Nothing in it is ever executed.

    4 bytes    length of the JSON text, little-endian
    JSON       the tree; a value that JSON lacks is an object with one key, the tag: tuple, dict,
               counter, ordered, bytes, array, scalar, tensor, nan
    blob       bytes of all byte strings, arrays and tensors, end to end;
               the tree names offset and size

Every dict is written as a list of pairs, so that keys keep their type and order. Floats read back
as the same bits. Any other value is refused with its key path, at attach and not at restore.
"""

from __future__ import annotations

import collections
import json
import math
import re
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

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


def encode(tree: object) -> bytes:
    """Returns the capsule's bytes.

    Raises:
        UnsupportedState: a value is of a type that is not stored; the message holds its key path.
    """
    blob = bytearray()
    text = _JSON.encode(_pack(tree, blob, (), 0)).encode()
    return _LENGTH.pack(len(text)) + text + bytes(blob)


def decode(data: bytes) -> Any:
    """Returns the tree that `encode` was given; arrays and bytes are copies.

    Raises:
        FormatError: the bytes are no capsule.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        if length > len(data) - _LENGTH.size:
            raise ValueError(f"it says {length} bytes of text, and has {len(data)} in all")
        tree = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        return _unpack(tree, memoryview(data)[_LENGTH.size + length :], 0)
    except (struct.error, ValueError, KeyError, TypeError, RecursionError, AttributeError, OverflowError) as error:
        raise FormatError(f"the capsule can't be read: {error}.") from error


def _pack(value: object, blob: bytearray, path: tuple[object, ...], depth: int) -> object:
    if depth > DEPTH_MAX:
        raise UnsupportedState(f"{_path(path)} is nested deeper than {DEPTH_MAX} levels.")
    if type(value) is float and math.isnan(value):
        return {"nan": _FLOAT.pack(value).hex()}  # JSON has one NaN, floats have many
    if value is None or (isinstance(value, (bool, str, float)) and type(value) in (bool, str, float)):
        return value
    if type(value) is int:
        if value.bit_length() > INT_BITS_MAX:
            raise UnsupportedState(
                f"{_path(path)} is an integer of {value.bit_length()} bits; {INT_BITS_MAX} are allowed."
            )
        return value
    if type(value) is list:
        if depth < DEPTH_MAX and set(map(type, value)) == {str}:
            return value  # fast path: thousands of parameter names
        return [_pack(item, blob, (*path, i), depth + 1) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_pack(item, blob, (*path, i), depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, dict) and type(value) in _TAG_OF:
        return {_TAG_OF[type(value)]: _pairs(value, blob, path, depth)}
    return _pack_bytes(value, blob, path)


def _pairs(value: dict[object, object], blob: bytearray, path: tuple[object, ...], depth: int) -> list[object]:
    pairs: list[object] = []
    for key, item in value.items():
        if type(key) not in (str, int, float, bool, tuple, type(None)):
            raise UnsupportedState(f"{_path(path)} has a key of type {type(key).__name__}: {key!r}.")
        pairs.append([_pack(key, blob, (*path, key), depth + 1), _pack(item, blob, (*path, key), depth + 1)])
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


def _unpack(node: Any, blob: memoryview, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError("nested too deep")
    if isinstance(node, list):
        return [_unpack(item, blob, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, body),) = node.items()
    if tag == "tuple":
        return tuple(_unpack(item, blob, depth + 1) for item in body)
    if tag in _DICTS:
        return _DICTS[tag]({_unpack(key, blob, depth + 1): _unpack(item, blob, depth + 1) for key, item in body})
    if tag == "bytes":
        return _cut(blob, *body)
    if tag == "nan":
        return _FLOAT.unpack(bytes.fromhex(body))[0]
    dtype, shape, at, size = body
    if tag == "tensor":
        return TensorBytes(str(dtype), tuple(int(n) for n in shape), _cut(blob, at, size))
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is no dtype of plain numbers")
    array = np.frombuffer(_cut(blob, at, size), np.dtype(dtype)).reshape(shape).copy()
    if tag == "scalar":
        return array[()]
    if tag == "array":
        return array
    raise ValueError(f"unknown tag {tag!r}")


def _cut(blob: memoryview, at: int, size: int) -> bytes:
    if at < 0 or size < 0 or at + size > len(blob):
        raise ValueError(f"{size} bytes at {at} lie outside a blob of {len(blob)}")
    return bytes(blob[at : at + size])


def _path(path: tuple[object, ...]) -> str:
    if not path:
        return "the state"
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])  # state['loader']['sampler']
