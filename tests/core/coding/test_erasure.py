"""Tests every code against a naive XOR of its table.

All patterns of losses and operation counts are tested.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.coding.erasure import (
    CACHE_BYTES,
    COLUMNS_MAX,
    COLUMNS_MIN,
    SHARDS_MAX,
    ArrayFunctions,
    ErasureCode,
    XorOp,
    XorProgram,
    XorStep,
    code_for,
    encode_program,
    make_program,
    run,
    run_columns,
)
from tests.support.codes import decode_program

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
        with pytest.raises(ValueError, match=f"{k - len(gone) + len(have)} shards .* are read; the code needs {k}"):
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


# Any shards from any k


def check_make(code: ErasureCode, shards: np.ndarray, read: tuple[int, ...], made: tuple[int, ...]) -> XorProgram:
    program = make_program(code, read, made)
    assert program.outputs == tuple((shard, packet) for shard in made for packet in range(code.w))
    assert {shard for shard, _ in program.inputs} <= set(read)
    assert list(program.inputs) == sorted(program.inputs)
    for (shard, packet), output in zip(program.outputs, execute(program, shards), strict=True):
        assert np.array_equal(output, shards[shard, packet]), (code.kind, code.k, code.f, read, made)
    return program


def made_sets(code: ErasureCode) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields each set of k shards, with each set of other shards."""
    for read in itertools.combinations(range(code.k + code.f), code.k):
        others = [shard for shard in range(code.k + code.f) if shard not in read]
        for count in range(len(others) + 1):
            yield from ((read, made) for made in itertools.combinations(others, count))


@pytest.mark.parametrize(("k", "f"), SHAPES)
def test_any_k_shards_make_any_others(k, f):
    code = code_for(k, f)
    shards = stripe(code, 9)
    made_steps, separate_steps = 0, 0
    for read, made in made_sets(code):
        program = check_make(code, shards, read, made)
        used = {source for _, left, right in program.steps for source in (left, right)}
        # No register is idle: inputs are read, scratch is written and read.
        assert used >= {*range(len(program.inputs))}
        first_scratch = len(program.inputs) + len(program.outputs)
        assert used >= {*range(first_scratch, first_scratch + program.scratch)}
        assert made or program == XorProgram((), (), 0, ())
        lost, parities = [i for i in range(k) if i not in read], [shard - k for shard in read if shard >= k]
        programs = [encode_program(code, shard - k) for shard in made if shard >= k]
        if programs or set(made) & set(lost):
            programs.append(decode_program(code, lost, parities))
        made_steps += len(program.steps)
        separate_steps += sum(len(each.steps) for each in programs)
    assert made_steps <= separate_steps


@pytest.mark.parametrize(("k", "f"), [(17, 3), (59, 2), (61, 3), (60, 4)])
def test_wide_codes_make_any_shards(k, f):
    code = code_for(k, f)
    shards = stripe(code, 3)
    rng = random.Random(k * f)
    for _ in range(4):
        read = tuple(sorted(rng.sample(range(k + f), k)))
        others = [shard for shard in range(k + f) if shard not in read]
        check_make(code, shards, read, tuple(others))
        check_make(code, shards, read, tuple(sorted(rng.sample(others, 1))))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_code_makes_any_shards(data):
    k = data.draw(st.integers(1, 20), label="k")
    f = data.draw(st.integers(0, 5), label="f")
    read = tuple(sorted(data.draw(st.permutations(range(k + f)), label="read")[:k]))
    others = [shard for shard in range(k + f) if shard not in read]
    made = tuple(shard for shard in others if data.draw(st.booleans(), label=f"make {shard}"))
    check_make(code_for(k, f), stripe(code_for(k, f), 5, seed=k), read, made)


def test_copies_are_made_without_scratch():
    assert make_program(code_for(1, 3), [2], [0, 1, 3]).steps == tuple(XorStep(target, 0, None) for target in (1, 2, 3))


def test_unwanted_lost_data_is_computed_only_as_far_as_needed():
    code = code_for(3, 3)
    assert len(make_program(code, [3, 4, 5], [2]).steps) < len(make_program(code, [3, 4, 5], [0, 1, 2]).steps)
    assert make_program(code, [0, 1, 2], [4]) == encode_program(code, 1)
    assert make_program(code, [1, 3, 4], [0, 2]) == decode_program(code, [0, 2], [0, 1])


@pytest.mark.parametrize(
    ("read", "made", "says"),
    [
        ((0, 1, 2), (4,), r"3 shards \[0, 1, 2\] are read; the code needs 4"),
        ((0, 1, 2, 2), (4,), r"3 shards \[0, 1, 2\] are read; the code needs 4"),
        ((0, 1, 2, 3, 4), (5,), "5 shards .* are read; the code needs 4"),
        ((0, 1, 2, 6), (3,), "shard 6 of a code with 6; they are counted from 0"),
        ((0, 1, 2, 3), (6,), "shard 6 of a code with 6"),
        ((-1, 1, 2, 3), (4,), "shard -1 of a code with 6"),
        ((0, 1, 2, 4), (3, 4), "shard 4 is read and wanted"),
    ],
)
def test_shards_that_are_refused(read, made, says):
    with pytest.raises(ValueError, match=says):
        make_program(code_for(4, 2), read, made)


# The cache


def test_programs_are_made_once():
    code = code_for(6, 2)
    assert encode_program(code, 1) is encode_program(code, 1)
    assert decode_program(code, [1], [0]) is decode_program(code, (1,), {0, 1})
    assert make_program(code, range(2, 8), (0, 1)) is make_program(code, [*range(7, 1, -1)], {1, 0})
    assert make_program(code, range(1, 7), (0,)) is decode_program(code, [0], [0])


def test_the_tables_of_a_code_are_not_hashed():
    """Lists have no hash."""
    assert hash(ErasureCode("xor", 2, 1, 1, [], [])) == hash(code_for(2, 1))  # type: ignore[arg-type]


def test_codes_that_differ_only_in_their_tables_have_their_own_programs():
    plain = code_for(3, 1)
    short = dataclasses.replace(plain, parity=((frozenset({(0, 0), (1, 0)}),),))
    assert encode_program(plain, 0) != encode_program(short, 0)


# What else is true of programs


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
    programs += [make_program(code, read, made) for read, made in made_sets(code)]
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


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(2, 6), st.integers(0, 6), st.booleans()), max_size=30))
def test_steps_do_the_same_as_the_operations(ops):
    program = XorProgram(((0, 0), (0, 1)), ((1, 0), (1, 1)), 3, tuple(XorOp(*op) for op in ops))
    registers = list(np.random.default_rng(0).integers(0, 256, (7, 8), dtype=np.uint8))
    expected = [register.copy() for register in registers]
    for target, source, is_copy in program.ops:
        expected[target] = expected[source].copy() if is_copy else expected[target] ^ expected[source]
    run(program, registers[:2], registers[2:4], registers[4:])
    assert np.array_equal(registers, expected)
    assert len(program.steps) <= len(program.ops)


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


# The interpreter


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


def test_no_temporaries():
    """Each step works on registers only, and writes to its target through `out`."""
    code = code_for(4, 2)
    shards = stripe(code, 64)

    def xor(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        assert {each.ctypes.data for each in (left, right, out)} <= known
        targets.append(out.ctypes.data)
        np.bitwise_xor(left, right, out=out)

    program = encode_program(code, 1)
    groups = ([shards[each] for each in program.inputs], stale(4, 64), stale(program.scratch, 64))
    known = {each.ctypes.data for group in groups for each in group}
    targets: list[int] = []
    run(program, *groups, ArrayFunctions(xor, np.copyto))
    assert len(targets) == xors(program)
    assert np.array_equal(groups[1], shards[5])


# Blocks of columns

WIDTHS = (0, 1, 63, COLUMNS_MIN, COLUMNS_MIN + 1, 150_001)


class SpiedRow(np.ndarray):
    """A row of bytes that records the columns that are taken."""

    columns: list[slice]

    def __getitem__(self, columns):
        self.columns.append(columns)
        return np.asarray(super().__getitem__(columns))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("k", "f"), [(1, 1), (3, 1), (4, 2), (5, 3), (17, 3)])
def test_columns_of_any_width_give_the_same_bytes(k, f, width):
    code = code_for(k, f)
    shards = stripe(code, width)
    shards.flags.writeable = False
    program = make_program(code, range(f, k + f), range(f))
    outputs = stale(len(program.outputs), width)
    run_columns(program, [shards[each] for each in program.inputs], outputs)
    for packet, output in zip(program.outputs, outputs, strict=True):
        assert np.array_equal(output, shards[packet])


@pytest.mark.parametrize(("k", "f"), [(2, 1), (6, 2), (5, 3), (17, 3)])
def test_blocks_of_columns_fit_the_cache_and_begin_at_cache_lines(k, f):
    code, width = code_for(k, f), 600_000
    program = make_program(code, range(f, k + f), range(f))
    rows = [np.zeros(width, np.uint8).view(SpiedRow) for _ in range(len(program.inputs) + len(program.outputs))]
    for row in rows:
        row.columns = []
    run_columns(program, rows[: len(program.inputs)], rows[len(program.inputs) :])
    blocks = rows[0].columns
    assert all(row.columns == blocks for row in rows)
    assert blocks[0].start == 0 and blocks[-1].stop >= width
    assert all(before.stop == after.start for before, after in itertools.pairwise(blocks))
    assert all(block.start % 64 == 0 for block in blocks)
    size, hot = blocks[0].stop, len(program.outputs) + program.scratch
    assert size <= COLUMNS_MAX and (size * hot <= CACHE_BYTES or size == COLUMNS_MIN)
    assert (size + 64) * hot > CACHE_BYTES or size == COLUMNS_MAX


def test_columns_take_scratch_for_one_block_only():
    program = encode_program(code_for(4, 2), 1)
    assert program.scratch == 1
    inputs = [np.zeros(4 << 20, np.uint8)] * len(program.inputs)
    outputs = stale(len(program.outputs), 4 << 20)
    tracemalloc.start()
    try:
        run_columns(program, inputs, outputs)
        assert tracemalloc.get_traced_memory()[1] < CACHE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("input_widths", "output_widths"),
    [((96, 96), (96,)), ((96, 96, 97), (96,)), ((96, 96, 96), (90,)), ((96, 96, 96), ()), ((96, 1, 96), (96,))],
)
def test_columns_that_do_not_fit_are_refused(input_widths, output_widths):
    inputs, outputs = ([np.zeros(width, np.uint8) for width in widths] for widths in (input_widths, output_widths))
    with pytest.raises(ValueError, match="registers"):
        run_columns(encode_program(code_for(3, 1), 0), inputs, outputs)


def test_the_empty_program_runs():
    run_columns(make_program(code_for(4, 2), range(4), ()), [], [])
