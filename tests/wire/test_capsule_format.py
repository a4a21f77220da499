"""Tests the capsule: values round-trip to the bit and the type; others are refused by key path."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reft.errors import FormatError, UnsupportedState
from reft.wire.capsule_format import DEPTH_MAX, INT_BITS_MAX, NameRun, NameTable, TensorBytes, decode, encode

BITS = st.integers(0, (1 << 64) - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 2000), 1 << 2000), st.floats(), BITS,
    st.text(st.characters(exclude_categories=[])), st.binary(max_size=50),
)  # fmt: skip
DTYPES = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes(),
    hnp.complex_number_dtypes(), hnp.unicode_string_dtypes(max_len=4), hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)  # fmt: skip
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
SCALARS = ARRAYS.filter(lambda array: array.size).map(lambda array: array.reshape(-1)[0]).filter(lambda s: s.nbytes)
TENSORS = st.builds(
    TensorBytes, st.sampled_from(["bfloat16", "float8_e4m3fn"]), st.tuples(st.integers(0, 9)), st.binary(max_size=30)
)
KEYS = st.recursive(
    st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
TREES = st.recursive(
    st.one_of(PLAIN, ARRAYS, SCALARS, TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(collections.Counter),
    ),
    max_leaves=20,
)


def assert_same(one: Any, other: Any) -> None:
    """Asserts equality in type, order and bits."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, float):
        assert struct.pack("<d", one) == struct.pack("<d", other)
    else:
        assert one == other


@given(TREES)
@settings(max_examples=200, deadline=None)
def test_round_trip(tree):
    assert_same(decode(encode(tree)), tree)


NAMES = NameTable(("w", "b", "m", "v", ""))
NAMED_TREES = st.recursive(
    st.sampled_from([*NAMES.names, "another", "x", 3]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8), st.dictionaries(st.sampled_from([*NAMES.names, "another"]), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(NAMED_TREES)
@settings(max_examples=200, deadline=None)
def test_round_trip_with_names(tree):
    assert_same(decode(encode(tree, NAMES), NAMES), tree)


def test_names_are_written_as_numbers():
    names = NameTable(tuple(f"model.0.layers.{i}.weight" for i in range(75_000)))
    tree = {
        "params": list(names.names),
        "halves": [*names.names[::2]],
        "absent": names.names[7],
        "values": {names.names[8]: 1},
    }
    data = encode({key: tree[key] for key in ("params", "absent", "values")}, names)
    assert len(data) < 200 and b"layers" not in data
    assert len(encode(tree["halves"], names)) < 500_000
    assert decode(encode(tree, names), names) == tree


def test_other_names_are_refused():
    """Read with them, the state of one parameter would go to another."""
    data = encode({"params": ["w", "b"]}, NAMES)
    for other in (NameTable(("b", "w", "m", "v", "")), NameTable(("w", "b")), NameTable()):
        with pytest.raises(FormatError, match="refers to names with digest"):
            decode(data, other)


def test_without_names_the_other_values_are_read():
    tree = {"compared": {3: 4}, "params": ["b", "m", "another", "w"], "w": 1}
    read = decode(encode(tree, NAMES))
    assert read == {"compared": {3: 4}, "params": [NameRun(1, 2), "another", NameRun(0, 1)], NameRun(0, 1): 1}


def test_a_capsule_without_names_is_read_with_any():
    """Capsules of protocol 7 have all names in full."""
    assert decode(encode(["w", "other"]), NAMES) == ["w", "other"]


@pytest.mark.parametrize("node", [{"name": 5}, {"name": -1}, {"names": [[3, 3]]}, {"names": [[0, 0]]}, {"name": "w"}])
def test_numbers_without_a_name_are_refused(node):
    text = json.dumps({"named": [NAMES.digest, node]}).encode()
    with pytest.raises(FormatError):
        decode(struct.pack("<I", len(text)) + text, NAMES)


@pytest.mark.parametrize(
    "value",
    [
        -0.0, 5e-324, math.inf, -math.inf, math.nan, -math.nan, 0.1 + 0.2, (1 << INT_BITS_MAX) - 1, -(1 << 127), True, 1,
        ((1, (2, ())), [(3,)]), {1: "a", "1": "b"}, {(1, None): {}}, collections.Counter("abca"), b"", "\ud800", "\0",
        np.float32(1) / 3, np.array(7), np.zeros((0, 3), "<f2"), np.array([1, 2], ">i4"), np.int8(-1), np.bool_(True),
        np.array([1, 2, 3])[::-1], np.array([np.datetime64("2020-01-01")]), TensorBytes("bfloat16", (), b"\x80\x3f"),
    ],
)  # fmt: skip
def test_values_with_special_types_or_bits_round_trip(value):
    assert_same(decode(encode({"k": value})), {"k": value})


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF8DEADBEEF0001, 0x7FF0000000000001])
def test_a_nan_keeps_its_bits(bits):
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    assert struct.pack("<d", decode(encode([value]))[0]) == struct.pack("<Q", bits)


def test_states_of_random_generators_round_trip():
    generator = random.Random(1)
    assert decode(encode(generator.getstate())) == generator.getstate()
    for kind in (np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64):
        state = kind(1).state
        assert_same(decode(encode(state)), state)


def test_arrays_and_bytes_are_copies_that_can_be_written():
    array = decode(encode(np.zeros(3)))
    array[0] = 1
    assert array.flags.owndata


class Point(NamedTuple):
    x: int


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Raw(bytes):
    pass


RECURSIVE: list[object] = []
RECURSIVE.append(RECURSIVE)
REFUSED = [
    object(), len, lambda: 0, {1, 2}, frozenset(), Point(1), Color.RED, Text("a"), Raw(b"a"), 1j, range(3), int,
    collections.defaultdict(int), collections.deque(), memoryview(b"a"), Exception("a"), np.array([None]),
    np.zeros(2, [("a", "f4")]), np.ma.masked_array([1, 2], [True, False]), np.void(b"ab"), np.zeros(2, "V2"), np.str_(""),
    1 << INT_BITS_MAX, RECURSIVE,
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_other_types_are_refused_with_their_path(value):
    for tree, path in (({"state": {"loader": [0, value]}}, "state['loader'][1]"), ({"state": ({3: value},)}, "[3]")):
        with pytest.raises(UnsupportedState) as refused:
            encode(tree)
        assert path in str(refused.value)
    with pytest.raises(UnsupportedState):
        encode(value)


@pytest.mark.parametrize(
    "key", [b"a", np.int64(1), Color.RED, Text("a"), frozenset(), object()], ids=lambda key: type(key).__name__
)
def test_a_key_of_another_type_is_refused_with_its_place(key):
    with pytest.raises(UnsupportedState, match=r"state\['d'\] has a key of type"):
        encode({"state": {"d": {key: 1}}})


def nested(depth: int) -> object:
    tree: object = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def test_depth_is_limited_on_both_sides():
    assert decode(encode(nested(DEPTH_MAX))) == nested(DEPTH_MAX)
    with pytest.raises(UnsupportedState, match="nested deeper than"):
        encode(nested(DEPTH_MAX + 1))
    for depth in (DEPTH_MAX + 1, 100_000):
        with pytest.raises(FormatError):
            decode(raw("[" * depth + "1" + "]" * depth))


def test_integers_are_limited_on_the_way_in():
    with pytest.raises(UnsupportedState, match=f"{INT_BITS_MAX} are allowed"):
        encode({"n": -(1 << INT_BITS_MAX)})
    with pytest.raises(FormatError):
        decode(raw("9" * 100_000))


def raw(text: str, blob: bytes = b"") -> bytes:
    """Returns a capsule made by hand."""
    return struct.pack("<I", len(text.encode())) + text.encode() + blob


MALFORMED = [
    b"", b"\1", b"\0\0\0\0", b"\xff\xff\xff\xff{}", raw("123")[:-1], raw("{}"), raw('{"a":1,"b":2}'), raw('{"what":[]}'),
    raw('{"bytes":[0,1]}'), raw('{"bytes":[-1,1]}', b"ab"), raw('{"bytes":[0,-1]}', b"ab"), raw('{"bytes":[0.5,1]}', b"ab"),
    raw('{"bytes":[1e400,1]}', b"ab"), raw('{"bytes":[NaN,1]}', b"ab"), raw('{"bytes":["0",1]}', b"ab"), raw('{"bytes":null}'),
    raw('{"dict":[[1]]}'), raw('{"dict":[[[],1]]}'), raw('{"dict":7}'), raw('{"counter":[[{"dict":[]},1]]}'),
    raw('{"array":["<f8",[1],0,4]}', b"abcd"), raw('{"array":["<f8",[2],0,8]}', b"abcdefgh"),
    raw('{"array":["O",[1],0,8]}', b"abcdefgh"), raw('{"array":["V8",[1],0,8]}', b"abcdefgh"),
    raw('{"array":["(1,",[1],0,8]}', b"abcdefgh"), raw('{"array":[null,[1],0,8]}', b"abcdefgh"),
    raw('{"array":["f8,f8",[1],0,8]}', b"abcdefgh"), raw('{"array":["S0",[1],0,8]}', b"abcdefgh"),
    raw('{"array":["<i8",[1e400],0,8]}', b"abcdefgh"), raw('{"array":["<i8",[99999999999999999999],0,8]}', b"abcdefgh"),
     raw('{"array":["<i8","x",0,8]}', b"abcdefgh"),
    raw('{"tensor":["f",[Infinity],0,0]}'), raw('{"tensor":["f",[NaN],0,0]}'), raw('{"tensor":["f",[],0]}'),
    raw('{"scalar":["<U1",[],0,4]}', b"\0\0\x11\0"), raw('{"array":[">U1",[1],0,4]}', b"\0\x11\0\0"),
    raw('{"nan":"00"}'), raw('{"nan":7}'), raw('{"nan":"zz"}'), raw('"\xed"')[:-1], b"\2\0\0\0\xff\xff",
]  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data[4:40]))
def test_malformed_bytes_are_a_format_error_and_nothing_else(data):
    with pytest.raises(FormatError):
        decode(data)


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_a_format_error(data):
    try:
        decode(data)
    except FormatError:
        pass


JSON = st.recursive(
    st.one_of(st.none(), st.integers(-9, 99), st.floats(), st.sampled_from(["<f8", "<i4", "S3", "abc"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(
            st.sampled_from(["tuple", "dict", "counter", "ordered", "bytes", "array", "scalar", "tensor", "nan"]),
            inner, min_size=1, max_size=2,
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON, st.binary(max_size=20))
@settings(max_examples=300, deadline=None)
def test_any_tree_of_tags_decodes_or_is_a_format_error(tree, blob):
    try:
        decode(raw(json.dumps(tree), blob))
    except FormatError:
        pass


@given(TREES, st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_byte_is_a_format_error_or_another_tree_never_a_crash(tree, data):
    encoded = bytearray(encode(tree))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(encoded))
    except FormatError:
        pass


@given(TREES)
@settings(max_examples=60, deadline=None)
def test_truncated_bytes_are_a_format_error_or_lose_only_unused_bytes(tree):
    encoded = encode(tree)
    for size in range(0, len(encoded), max(1, len(encoded) // 20)):
        with pytest.raises(FormatError):
            decode(encoded[:size])
