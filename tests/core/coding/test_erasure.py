"""Tests every code against a naive XOR of its table.

All patterns of losses and operation counts are tested.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.coding import erasure
from reft.core.coding.erasure import (
    SHARDS_MAX,
    ErasureCode,
    XorOp,
    XorProgram,
    XorStep,
    code_for,
    decode_program,
    encode_program,
    run,
)

SHAPES = [(domains - f, f) for domains in range(2, 9) for f in range(1, 5 if domains >= 6 else 4) if f < domains]
KINDS = {1: "xor", 2: "evenodd", 3: "star", 4: "cauchy"}
STALE = 0xA5  # initial bytes of outputs and scratch, which must not matter


def stale(count: int, nbytes: int) -> list[np.ndarray]:
    return [np.full(nbytes, STALE, np.uint8) for _ in range(count)]


def execute(program: XorProgram, shards: np.ndarray) -> list[np.ndarray]:
    """Returns the outputs of the program. `shards` [k + f, packet, byte] do not change."""
    shards.flags.writeable = False
    outputs = stale(len(program.outputs), shards.shape[2])
    run(program, [shards[each] for each in program.inputs], outputs, stale(program.scratch, shards.shape[2]))
    return outputs


def stripe(code: ErasureCode, nbytes: int, seed: int = 0) -> np.ndarray:
    """Returns random data with its parities, computed from the table alone."""
    shards = np.random.default_rng(seed).integers(0, 256, (code.k + code.f, code.w, nbytes), dtype=np.uint8)
    for j, r in itertools.product(range(code.f), range(code.w)):
        shards[code.k + j, r] = np.bitwise_xor.reduce([shards[each] for each in sorted(code.parity[j][r])])
    return shards


def split(code: ErasureCode, lost: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns the lost data shards, and the parities that are not lost."""
    return [i for i in lost if i < code.k], [j for j in range(code.f) if code.k + j not in lost]


def check_decode(code: ErasureCode, shards: np.ndarray, lost: tuple[int, ...]) -> XorProgram:
    gone, have = split(code, lost)
    program = decode_program(code, gone, have)
    assert program.outputs == tuple((i, r) for i in gone for r in range(code.w))
    allowed = {*range(code.k), *(code.k + j for j in have)} - set(gone)
    assert {shard for shard, _ in program.inputs} <= allowed
    for (shard, packet), found in zip(program.outputs, execute(program, shards), strict=True):
        assert np.array_equal(found, shards[shard, packet]), (code.kind, code.k, code.f, lost)
    return program


def xors(program: XorProgram) -> int:
    return sum(step.right is not None for step in program.steps)


def losses(count: int, most: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(most + 1))


# Correctness


@pytest.mark.parametrize(("k", "f"), SHAPES)
def test_encode_is_the_xor_of_the_table(k, f):
    code = code_for(k, f)
    shards = stripe(code, 29)
    for parity in range(f):
        program = encode_program(code, parity)
        assert program.outputs == tuple((k + parity, packet) for packet in range(code.w))
        assert {shard for shard, _ in program.inputs} == set(range(k))
        assert np.array_equal(execute(program, shards), shards[k + parity])


@pytest.mark.parametrize(("k", "f"), SHAPES)
def test_every_loss_of_up_to_f_shards_is_decoded(k, f):
    code = code_for(k, f)
    shards = stripe(code, 13)
    for lost in losses(k + f, f):
        check_decode(code, shards, lost)


@pytest.mark.parametrize(("k", "f"), SHAPES)
def test_every_loss_of_more_than_f_shards_is_refused(k, f):
    code = code_for(k, f)
    for lost in itertools.combinations(range(k + f), f + 1):
        gone, have = split(code, lost)
        with pytest.raises(ValueError, match=f"{len(gone)} data shards are lost and only {len(have)} parities"):
            decode_program(code, gone, have)


@pytest.mark.parametrize("f", [1, 2, 3])
@pytest.mark.parametrize("k", [17, 58, 59, 62])
def test_wide_codes_decode_random_losses(k, f):
    code = code_for(k, f)
    shards = stripe(code, 3)
    rng = random.Random(k * f)
    for lost in (rng.sample(range(k), f), rng.sample(range(k + f), f)):  # data alone, and any
        program = check_decode(code, shards, tuple(sorted(lost)))
        assert xors(program) <= 1.15 * (k - 1) * len(program.outputs)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_code_any_loss_any_packet(data):
    k = data.draw(st.integers(1, 14), label="k")
    f = data.draw(st.integers(0, 5), label="f")
    code = code_for(k, f)
    lost = data.draw(st.sets(st.integers(0, k + f - 1), max_size=f), label="lost")
    shards = stripe(code, data.draw(st.integers(0, 70), label="packet bytes"), seed=k)
    check_decode(code, shards, tuple(sorted(lost)))
    for parity in range(f):
        assert np.array_equal(execute(encode_program(code, parity), shards), shards[k + parity])


def test_unneeded_parities_are_not_read():
    program = decode_program(code_for(5, 3), [2], [2, 0, 1])
    assert program == decode_program(code_for(5, 3), {2}, (0,))


def test_without_losses_the_program_is_empty():
    assert decode_program(code_for(4, 2), (), (0, 1)) == XorProgram((), (), 0, ())


# What the tables look like


@pytest.mark.parametrize(("k", "f"), [*SHAPES, (3, 0), (1, 0), (1, 5), (62, 2), (61, 3), (60, 4), (100, 5)])
def test_kinds_and_tables(k, f):
    code = code_for(k, f)
    assert (code.k, code.f) == (k, f)
    assert code.kind == ("copy" if k == 1 or f == 0 else KINDS[min(f, 4)])
    assert len(code.parity) == len(code.common) == f
    for packets, common in zip(code.parity, code.common, strict=True):
        assert len(packets) == code.w
        assert all(common < packet for packet in packets)
        assert all(0 <= i < k and 0 <= r < code.w for packet in packets for i, r in packet)
    if f:
        assert code.parity[0] == tuple(frozenset((i, r) for i in range(k)) for r in range(code.w))
    if code.kind == "cauchy":
        assert 1 << (code.w - 1) < k + f <= 1 << code.w


def test_tables_never_change():
    """A decoder must use the table of the encoder, which may be an older release."""
    star = code_for(4, 3)  # p = 5
    assert star.common == (frozenset(), frozenset({(1, 3), (2, 2), (3, 1)}), frozenset({(1, 0), (2, 1), (3, 2)}))
    assert star.parity[1][0] ^ star.common[1] == {(0, 0), (2, 3), (3, 2)}
    assert star.parity[2][1] ^ star.common[2] == {(0, 1), (1, 2), (2, 3)}
    assert star.parity[:2] == code_for(4, 2).parity
    wide = [(k, f, [[sorted(packet) for packet in parity] for parity in code_for(k, f).parity]) for k, f in SHAPES]
    assert zlib.crc32(repr(wide).encode()) == 0xF2BEEF0A


def test_packets_of_a_shard():
    assert [code_for(k, 2).w for k in (2, 3, 4, 5, 6, 7, 8, 11, 12)] == [2, 2, 4, 4, 6, 6, 10, 10, 12]


@pytest.mark.parametrize(("k", "f"), [(k, f) for k, f in SHAPES if k > 1])
def test_encoding_takes_few_operations(k, f):
    """Every code needs at least k - 1 XORs for each parity packet."""
    code = code_for(k, f)
    count = sum(xors(encode_program(code, parity)) for parity in range(f))
    least = (k - 1) * f * code.w
    if code.kind == "cauchy":
        assert count <= 1.55 * least
    else:
        # each parity but the first: the adjuster's own sum and its addition to every packet, less
        # what it left out
        assert count == least + (f - 1) * (code.w - 1)
        assert count <= 1.35 * least


@pytest.mark.parametrize(("k", "f", "most"), [(2, 2, 1.5), (4, 2, 3.75), (6, 2, 5.85), (5, 3, 6.1), (3, 3, 3.2)])
def test_decoding_takes_few_operations(k, f, most):
    """The maximum over all losses, as XORs for each lost packet."""
    code = code_for(k, f)
    programs = [decode_program(code, *split(code, lost)) for lost in losses(k + f, f)]
    assert max(xors(each) / len(each.outputs) for each in programs if each.outputs) <= most


@pytest.mark.parametrize(("k", "f"), SHAPES)
def test_programs_write_before_they_read_and_never_write_inputs(k, f):
    code = code_for(k, f)
    programs = [encode_program(code, parity) for parity in range(f)]
    programs += [decode_program(code, *split(code, lost)) for lost in losses(k + f, f)]
    for program in programs:
        filled = set(range(len(program.inputs)))
        for target, source, is_copy in program.ops:
            assert source in filled and len(program.inputs) <= target
            assert (target in filled) != is_copy
            filled.add(target)
        assert filled == set(range(len(program.inputs) + len(program.outputs) + program.scratch))
        assert xors(program) == sum(not op.is_copy for op in program.ops)


def test_a_copy_and_the_first_xor_are_one_step():
    assert encode_program(code_for(3, 1), 0).steps == (XorStep(3, 0, 1), XorStep(3, 3, 2))
    assert encode_program(code_for(1, 1), 0).steps == (XorStep(1, 0, None),)


def test_a_copy_is_made_before_it_is_read_or_its_source_changes():
    copied = XorProgram(((0, 0),), ((1, 0), (1, 1)), 0, (XorOp(1, 0, True), XorOp(2, 1, True), XorOp(1, 0, False)))
    assert copied.steps == (XorStep(1, 0, None), XorStep(2, 1, None), XorStep(1, 1, 0))


# Refusals


@pytest.mark.parametrize(
    ("k", "f", "says"),
    [
        (0, 1, "0 data shards; at least 1"),
        (-3, 1, "-3 data shards"),
        (2, -1, "-1 parity shards; at least 0"),
        (SHARDS_MAX, 1, f"{SHARDS_MAX} data and 1 parity shards are {SHARDS_MAX + 1}; the limit is {SHARDS_MAX}"),
    ],
)
def test_codes_that_are_refused(k, f, says):
    with pytest.raises(ValueError, match=says):
        code_for(k, f)


def test_numbers_out_of_range_are_refused():
    code = code_for(4, 2)
    for parity in (-1, 2):
        with pytest.raises(ValueError, match=f"parity {parity} of a code with 2"):
            encode_program(code, parity)
    with pytest.raises(ValueError, match="data shard 4 of a code with 4"):
        decode_program(code, [4], [0])
    with pytest.raises(ValueError, match="parity 2 of a code with 2"):
        decode_program(code, [0], [2])


def test_a_code_that_loses_data_is_refused():
    twice = (frozenset({(0, 0), (1, 0)}),)
    code = ErasureCode("xor", 2, 2, 1, (twice, twice), (frozenset(), frozenset()))
    with pytest.raises(ValueError, match="1 packets can't be computed"):
        decode_program(code, [0, 1], [0, 1])


@pytest.mark.parametrize(
    ("inputs", "outputs", "scratch"),
    [
        ([(4, "u1")] * 2, [(4, "u1")], []),
        ([(4, "u1")] * 3, [(4, "u1")], [(4, "u1")]),
        ([(4, "u1")] * 3, [(5, "u1")], []),
        ([(1, "u1"), *[(4, "u1")] * 2], [(4, "u1")], []),  # numpy would broadcast
        ([(4, "u1")] * 3, [(4, "u8")], []),
    ],
)
def test_registers_that_do_not_fit_are_refused(inputs, outputs, scratch):
    made = [[np.zeros(size, dtype) for size, dtype in group] for group in (inputs, outputs, scratch)]
    with pytest.raises(ValueError, match="registers"):
        run(encode_program(code_for(3, 1), 0), *made)


# The numpy executor


def test_words_and_slices_give_the_same_bytes():
    code = code_for(5, 3)
    shards = stripe(code, 96)
    program = decode_program(code, [0, 2, 4], [0, 1, 2])
    whole = np.stack(execute(program, shards))
    words = [np.zeros(12, np.uint64) for _ in program.outputs]
    scratch = [np.zeros(12, np.uint64) for _ in range(program.scratch)]
    run(program, [shards[each].view(np.uint64) for each in program.inputs], words, scratch)
    assert np.array_equal(np.stack(words).view(np.uint8), whole)
    parts = [np.stack(execute(program, shards[:, :, part])) for part in (slice(0, 7), slice(7, 64), slice(64, 96))]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)


def test_no_temporaries(monkeypatch):
    """Each step works on registers only, and writes to its target through `out`."""
    code = code_for(4, 2)
    shards = stripe(code, 64)
    known: set[int] = set()

    class Spy:
        @staticmethod
        def bitwise_xor(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
            assert {each.ctypes.data for each in (left, right, out)} <= known
            np.bitwise_xor(left, right, out=out)

        copyto = staticmethod(np.copyto)

    program = encode_program(code, 1)
    groups = ([shards[each] for each in program.inputs], stale(4, 64), stale(program.scratch, 64))
    known |= {each.ctypes.data for group in groups for each in group}
    monkeypatch.setattr(erasure, "np", Spy)
    run(program, *groups)
    assert np.array_equal(groups[1], shards[5])
