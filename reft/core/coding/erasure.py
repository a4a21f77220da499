"""Erasure codes as tables of XOR operations: k data shards and f parity shards; any f may be lost.

A shard has w packets of equal size. Packet r of parity j is the XOR of the data packets in
`parity[j][r]`:

    data 0   data 1  ...  data k-1  |  parity 0 ... parity f-1
    ┌──────┐ ┌──────┐     ┌──────┐  |  ┌──────┐     ┌──────┐  f = 1: XOR
    │ 0    │ │ 0    │     │ 0    │  |  │ 0    │     │ 0    │  f = 2: EVENODD, w + 1 prime, >= k
    │ ...  │ │ ...  │     │ ...  │  |  │ ...  │     │ ...  │  f = 3: STAR, adds the other diagonals
    │ w-1  │ │ w-1  │     │ w-1  │  |  │ w-1  │     │ w-1  │  f > 3: Cauchy, as bit matrices
    └──────┘ └──────┘     └──────┘  |  └──────┘     └──────┘  k = 1: every parity is a copy

Invariants:
    - Any k of the k + f shards suffice to restore all data.
    - Parity 0 is the plain XOR of the data shards.
    - A program never writes its inputs, and writes each other register before it reads this
      register.

A program names registers, not memory. `run` is the only interpreter; it is given the operations
of numpy (here) or of torch (`reft.client.memory.xor`). Byte i of an output depends only on byte i
of the inputs. So packets may be coded slice by slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

SHARDS_MAX = 128  # limit of k + f; tables and the search for pivots grow with the cube of k + f
PROGRAMS_MAX = 64  # cached programs: those of the widest codes take megabytes each
CACHE_BYTES = 1 << 20  # outputs and scratch of a block of columns: a core's second-level cache
COLUMNS_MIN = 64 << 10  # below this the calls take a large part of the time
COLUMNS_MAX = 256 << 10
COLUMNS_UNIT = 64  # bytes: a cache line
PARITIES_XOR = 3  # up to this f, EVENODD and STAR need fewer operations than Cauchy

# Primitive polynomials by degree w: x generates all elements of GF(2^w) except 0.
_PRIMITIVE = {1: 0b11, 2: 0b111, 3: 0b1011, 4: 0b10011, 5: 0b100101, 6: 0b1000011, 7: 0b10000011}

Packet = tuple[int, int]  # shard, and packet within the shard; parity j is shard k + j
Terms = frozenset[Packet]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ErasureCode:
    """One erasure code.

    Attributes:
        kind: "copy" (k = 1, or no parity), "xor", "evenodd", "star" or "cauchy".
        k: number of data shards.
        f: number of parity shards.
        w: number of packets in a shard.
        parity: for each parity shard and each of its packets, the data packets that are XORed.
        common: for each parity shard, terms that all its packets contain (the adjuster of EVENODD
            and STAR). Their XOR is computed once.
    """

    kind: str
    k: int
    f: int
    w: int
    parity: tuple[tuple[Terms, ...], ...]
    common: tuple[Terms, ...]

    def __hash__(self) -> int:
        # Cached programs are looked up for each slice; the tables have thousands of terms.
        return hash((self.kind, self.k, self.f, self.w))


class XorOp(NamedTuple):
    """One operation: copies register `source` to `target`, or XORs `source` into `target`."""

    target: int
    source: int
    is_copy: bool


class XorStep(NamedTuple):
    """One pass over memory: `target = left ^ right`, or `target = left` if `right` is None.

    `target` and `left` may be the same register.
    """

    target: int
    left: int
    right: int | None


@dataclass(frozen=True)
class XorProgram:
    """A list of operations on registers.

    Registers are numbered consecutively: inputs, then outputs, then scratch.

    Attributes:
        inputs: for each input register, the packet that it contains.
        outputs: for each output register, the packet that the program writes to it.
        scratch: number of registers for intermediate sums.
        ops: the operations, in order.
    """

    inputs: tuple[Packet, ...]
    outputs: tuple[Packet, ...]
    scratch: int
    ops: tuple[XorOp, ...]

    @functools.cached_property
    def steps(self) -> tuple[XorStep, ...]:
        """The operations as `run` takes them.

        A copy and the first XOR into the copied register become one pass over memory.
        """
        steps: list[XorStep] = []
        deferred: dict[int, int] = {}  # target → the register to copy
        copies_of: dict[int, list[int]] = {}  # register → targets of copies that were deferred
        for target, source, is_copy in self.ops:
            # A deferred copy is made before its target is read or its source changes.
            due = [source, *(copied for copied in copies_of.pop(target, ()) if deferred.get(copied) == target)]
            steps += [XorStep(copied, deferred.pop(copied), None) for copied in due if copied in deferred]
            if is_copy:
                deferred[target] = source
                copies_of.setdefault(source, []).append(target)
            else:
                steps.append(XorStep(target, deferred.pop(target, target), source))
        steps += [XorStep(target, source, None) for target, source in deferred.items()]
        return tuple(steps)


# Codes


@functools.lru_cache(maxsize=256)
def code_for(k: int, f: int) -> ErasureCode:
    """Returns the code for k data shards and f parity shards.

    Raises:
        ValueError: k < 1, f < 0, or k + f > SHARDS_MAX.
    """
    if k < 1:
        raise ValueError(f"{k} data shards; at least 1 is needed")
    if f < 0:
        raise ValueError(f"{f} parity shards; at least 0 are needed")
    if k + f > SHARDS_MAX:
        raise ValueError(f"{k} data and {f} parity shards are {k + f}; the limit is {SHARDS_MAX}")
    if k == 1 or f == 0:
        return ErasureCode("copy", k, f, 1, ((frozenset({(0, 0)}),),) * f, (frozenset(),) * f)
    if f == 1:
        return ErasureCode("xor", k, f, 1, (_rows(k, 1),), (frozenset(),))
    return _diagonal(k, f) if f <= PARITIES_XOR else _cauchy(k, f)


def _rows(k: int, w: int) -> tuple[Terms, ...]:
    return tuple(frozenset((shard, packet) for shard in range(k)) for packet in range(w))


def _diagonal(k: int, f: int) -> ErasureCode:
    """Returns EVENODD (f = 2) or STAR (f = 3).

    The data shards are a table of p columns. The w = p - 1 packets of a shard are rows 0..p-2 of
    one column. Row p-1 and the columns from k on are zeros. Parity 0 is the XOR of each row. The
    other parities are the XOR of each diagonal, with slope 1 (or -1). Diagonal p-1 is not stored as
    a packet: it is the adjuster, which is XORed into all other diagonals.
    """
    p = max(k, 3)
    while any(p % divisor == 0 for divisor in range(2, p)):
        p += 1
    w = p - 1
    parity, common = [_rows(k, w)], [frozenset[Packet]()]
    for slope in (1, -1)[: f - 1]:
        cells = [[(shard, (d - slope * shard) % p) for shard in range(k)] for d in range(p)]
        diagonals = [frozenset(cell for cell in diagonal if cell[1] != w) for diagonal in cells]
        adjuster = diagonals.pop()
        parity.append(tuple(diagonal ^ adjuster for diagonal in diagonals))
        common.append(adjuster)
    return ErasureCode("evenodd" if f == 2 else "star", k, f, w, tuple(parity), tuple(common))


def _cauchy(k: int, f: int) -> ErasureCode:
    """Returns a Cauchy code: parity j is the sum of e(j, i) * data i over GF(2^w).

    e(j, i) = 1 / (x_j + y_i) for distinct x and y. So every square submatrix of e has an inverse.
    Scaling a row or a column by an element keeps this property. Columns are scaled so that parity 0
    is a plain XOR. The other rows are scaled so that their bit matrices have few ones. Elements are
    stored as logarithms to the base x.
    """
    w = (k + f - 1).bit_length()
    period = (1 << w) - 1
    powers, element = [], 1
    for _ in range(period):
        powers.append(element)
        element <<= 1
        element ^= _PRIMITIVE[w] if element >> w else 0
    logs = {element: power for power, element in enumerate(powers)}

    def columns(power: int) -> list[int]:  # the bit matrix of x^power: column s is x^(power + s)
        return [powers[(power + s) % period] for s in range(w)]

    ones = [sum(bin(column).count("1") for column in columns(power)) for power in range(period)]
    parity = []
    for j in range(f):
        row = [logs[k ^ i] - logs[(k + j) ^ i] for i in range(k)]
        scale = min(range(period), key=lambda scale: sum(ones[(power + scale) % period] for power in row))
        bits = [columns(power + (scale if j else 0)) for power in row]
        parity.append(
            tuple(frozenset((i, s) for i in range(k) for s in range(w) if bits[i][s] >> r & 1) for r in range(w))
        )
    return ErasureCode("cauchy", k, f, w, tuple(parity), (frozenset(),) * f)


# Programs


class _Recorder:
    """Collects the operations of a program.

    An unwritten register counts as zero. To add into such a register is a copy. To add such a
    register does nothing. A register that is a mere copy of an input is not read: the input is.
    """

    def __init__(self, inputs: int) -> None:
        self.ops: list[XorOp] = []
        self._filled = set(range(inputs))
        self._copied = {register: register for register in range(inputs)}  # register → the input that it equals

    def add(self, target: int, source: int) -> None:
        source = self._copied.get(source, source)
        if source not in self._filled:
            return
        is_copy = target not in self._filled
        self.ops.append(XorOp(target, source, is_copy))
        self._filled.add(target)
        self._copied.pop(target, None)
        if is_copy and source in self._copied:
            self._copied[target] = source

    def sums(self, inputs: Sequence[Packet], sums: Iterable[tuple[int, Collection[Packet]]]) -> None:
        """Adds to each target register the terms of its sum that are inputs.

        The operations are ordered by input: each input is read from memory once, while the few
            targets stay in the cache.

        Args:
            inputs: the packets of the input registers.
            sums: pairs of a target register and the terms of its sum.
        """
        targets: dict[Packet, list[int]] = {packet: [] for packet in inputs}
        for target, terms in sums:
            for packet in terms:
                if packet in targets:
                    targets[packet].append(target)
        for source, packet in enumerate(inputs):
            for target in targets[packet]:
                self.add(target, source)


def _terms(code: ErasureCode, parity: int) -> tuple[tuple[Terms, ...], Terms]:
    """Returns the terms of each packet of the parity without the adjuster, and the adjuster.

    If a separate adjuster saves no operation, the packets keep all terms and the adjuster is empty.
    """
    packets, adjuster = code.parity[parity], code.common[parity]
    if len(adjuster) < 2:
        return packets, frozenset()
    return tuple(packet ^ adjuster for packet in packets), adjuster


def encode_program(code: ErasureCode, parity: int) -> XorProgram:
    """Returns the program that computes parity shard `parity` from all data shards.

    The outputs are the packets of the parity shard, in order.

    Raises:
        ValueError: the code has no such parity.
    """
    if not 0 <= parity < code.f:
        raise ValueError(f"parity {parity} of a code with {code.f}; they are counted from 0")
    return _program(code, (), (), (code.k + parity,))


def make_program(code: ErasureCode, read: Collection[int], made: Collection[int]) -> XorProgram:
    """Returns the program that computes any shards of a stripe from k other shards.

    Parity j is shard k + j. The program may need lost data that is not wanted; it keeps this data
    in scratch registers.

    Args:
        code: the code.
        read: k shards, data or parity.
        made: the wanted shards, data or parity; none of them in `read`.

    Returns:
        A program whose outputs are the packets of the wanted shards, ascending by shard and packet.
        The inputs are those packets of `read` that are needed. The program is empty if no shard is
        wanted.

    Raises:
        ValueError: `read` has not k shards, a number is out of range, or a wanted shard is read.
    """
    shards_read, wanted, count = set(read), set(made), code.k + code.f
    invalid = sorted(shard for shard in shards_read | wanted if not 0 <= shard < count)
    if invalid:
        raise ValueError(f"shard {invalid[0]} of a code with {count}; they are counted from 0")
    if len(shards_read) != code.k:
        raise ValueError(f"{len(shards_read)} shards {sorted(shards_read)} are read; the code needs {code.k}")
    if shards_read & wanted:
        raise ValueError(f"shard {min(shards_read & wanted)} is read and wanted; leave it out of one of both")
    lost = tuple(shard for shard in range(code.k) if shard not in shards_read)
    parities = tuple(sorted(shard - code.k for shard in shards_read if shard >= code.k))
    return _program(code, lost, parities, tuple(sorted(wanted)))


@functools.lru_cache(maxsize=PROGRAMS_MAX)  # the only cache of a code's programs: callers keep none
def _program(code: ErasureCode, lost: tuple[int, ...], parities: tuple[int, ...], made: tuple[int, ...]) -> XorProgram:
    """Returns the program for sorted, valid arguments, by solving linear equations over GF(2).

    The program reads `parities` and all data that is not lost, and computes the shards `made`. Each
    parity packet, read or made, gives an equation: the sum of its lost terms, the unknowns, equals
    the sum of its other terms. A made parity packet is an unknown itself. An adjuster is one more
    unknown, with one more equation. So the equations stay sparse and need few operations. The known
    terms of an equation are summed in the register of the unknown that the equation yields.
    """
    outputs = tuple((shard, packet) for shard in made for packet in range(code.w))
    unknowns = [*outputs, *((shard, packet) for shard in lost if shard not in made for packet in range(code.w))]
    equations: list[set[Packet]] = []
    for parity in (*parities, *(shard - code.k for shard in made if shard >= code.k)):
        packets, adjuster = _terms(code, parity)
        shared: set[Packet] = set()
        if adjuster:
            shared = {(code.k + code.f + parity, 0)}  # stands for the adjuster; no packet has this index
            unknowns += shared
            equations.append({*adjuster, *shared})
        equations += [{*terms, *shared, (code.k + parity, packet)} for packet, terms in enumerate(packets)]
    inputs = tuple((shard, packet) for shard in range(code.k) if shard not in lost for packet in range(code.w))
    inputs += tuple((code.k + parity, packet) for parity in parities for packet in range(code.w))
    register = {unknown: len(inputs) + i for i, unknown in enumerate(unknowns)}
    solved, additions = _eliminate([equation.intersection(register) for equation in equations])
    targets = [register[unknown] for unknown in solved]
    recorder = _Recorder(len(inputs))
    recorder.sums(inputs, zip(targets, equations, strict=True))
    for target, source in additions:
        recorder.add(targets[target], targets[source])
    return _without_unused(XorProgram(inputs, outputs, len(unknowns) - len(outputs), tuple(recorder.ops)))


def join(parts: Iterable[tuple[XorProgram, Mapping[Packet, Packet]]], outputs: Sequence[Packet]) -> XorProgram:
    """Returns one program that runs several programs, one after the other.

    Packets that a part reads, and that no part before it has written, are inputs of the result.

    Args:
        parts: each with its packets → the packets of the result; each packet is written once.
        outputs: the wanted packets, which some parts write.
    """
    inputs: dict[Packet, None] = {}
    written: dict[Packet, None] = {}
    steps: list[tuple[Packet, Packet, bool]] = []
    for number, (program, names) in enumerate(parts):
        read = [names[packet] for packet in program.inputs]
        made = [names[packet] for packet in program.outputs]
        made += [(-1 - number, i) for i in range(program.scratch)]  # no packet has a negative shard
        inputs |= dict.fromkeys(packet for packet in read if packet not in written)
        written |= dict.fromkeys(made)
        registers = [*read, *made]
        steps += [(registers[target], registers[source], is_copy) for target, source, is_copy in program.ops]
    kept = dict.fromkeys(outputs)
    scratch = [packet for packet in written if packet not in kept]
    register = {packet: i for i, packet in enumerate([*inputs, *outputs, *scratch])}
    ops = tuple(XorOp(register[target], register[source], is_copy) for target, source, is_copy in steps)
    return _without_unused(XorProgram(tuple(inputs), tuple(outputs), len(scratch), ops))


def _without_unused(program: XorProgram) -> XorProgram:
    """Returns the program without operations and registers that no output depends on."""
    outputs = range(len(program.inputs), len(program.inputs) + len(program.outputs))
    needed, ops = set(outputs), []
    for op in reversed(program.ops):  # the copy into a register comes before all its other operations
        if op.target in needed:
            needed.add(op.source)
            ops.append(op)
    used = sorted(needed)
    register = {old: new for new, old in enumerate(used)}
    return XorProgram(
        tuple(program.inputs[old] for old in used if old < outputs.start),
        program.outputs,
        sum(old >= outputs.stop for old in used),
        tuple(XorOp(register[target], register[source], is_copy) for target, source, is_copy in reversed(ops)),
    )


def _eliminate(rows: list[set[Packet]]) -> tuple[list[Packet], list[tuple[int, int]]]:
    """Solves a square system of equations over GF(2).

    Eliminates forward, then substitutes backward, like LU: a dense inverse has many more terms.
    Each pivot is the one that can create the fewest new terms (Markowitz' rule).

    Args:
        rows: the unknowns of each equation. The function changes them.

    Returns:
        The unknown that each equation yields, and the additions that solve the system: pairs
        (equation, equation to add to the first one).

    Raises:
        ValueError: the system has no unique solution.
    """
    holders: dict[Packet, set[int]] = {}
    for number, row in enumerate(rows):
        for unknown in row:
            holders.setdefault(unknown, set()).add(number)
    additions: list[tuple[int, int]] = []
    pivots: list[tuple[int, Packet]] = []
    pivot_rows_with: dict[Packet, list[int]] = {}  # unknown → pivot rows that contain it
    unsolved = set(range(len(rows)))
    while unsolved:
        choices = (
            ((len(rows[number]) - 1) * (len(holders[unknown]) - 1), number, unknown)
            for number in unsolved
            for unknown in rows[number]
        )
        _, pivot, solved = min(choices, default=(0, -1, (0, 0)))
        if pivot < 0:
            raise ValueError(
                f"{len(unsolved)} packets can't be computed from the available parities; this code loses data"
            )
        unsolved.remove(pivot)
        for unknown in rows[pivot]:
            holders[unknown].remove(pivot)
            pivot_rows_with.setdefault(unknown, []).append(pivot)
        for other in sorted(holders[solved]):
            additions.append((other, pivot))
            for unknown in rows[pivot]:
                holders[unknown] ^= {other}
            rows[other] ^= rows[pivot]
        pivots.append((pivot, solved))
    for pivot, solved in reversed(pivots):
        additions += [(other, pivot) for other in pivot_rows_with[solved] if other != pivot]
    return [unknown for _, unknown in sorted(pivots)], additions


# Interpreter


class Array(Protocol):
    """The attributes that all libraries' arrays have."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


A = TypeVar("A", bound=Array)


class ArrayFunctions(NamedTuple):
    """What the interpreter calls: the operations of one array library.

    Attributes:
        xor: `xor(left, right, out=target)`.
        copy: `copy(target, source)`.
    """

    xor: Callable[..., object]
    copy: Callable[[Any, Any], object]


NUMPY = ArrayFunctions(np.bitwise_xor, np.copyto)


def run(
    program: XorProgram,
    inputs: Sequence[A],
    outputs: Sequence[A],
    scratch: Sequence[A],
    operations: ArrayFunctions = NUMPY,
) -> None:
    """Runs the program on arrays of one library, without temporary arrays.

    All arrays have one shape and one dtype of whole bytes: for example uint8, uint64 or int64.

    Args:
        program: the program to run.
        inputs: only read; may be read-only arrays.
        outputs: overwritten. They must not overlap any other register.
        scratch: overwritten, like outputs.
        operations: those of the arrays' library.

    Raises:
        ValueError: the registers do not fit the program.
    """
    arrays = _registers(program, inputs, outputs, scratch)
    xor, copy = operations
    for target, left, right in program.steps:
        if right is None:
            copy(arrays[target], arrays[left])
        else:
            xor(arrays[left], arrays[right], out=arrays[target])


def run_columns(program: XorProgram, inputs: Sequence[Bytes], outputs: Sequence[Bytes]) -> None:
    """Runs the program on rows of bytes, block of columns by block of columns.

    The outputs and the scratch of one block fit into CACHE_BYTES, unless the block would be
    narrower than COLUMNS_MIN. Inputs do not count: programs read nearly every input in one go.
    Scratch memory is allocated for one block only.

    Args:
        program: the program to run.
        inputs: rows of any one width; only read.
        outputs: rows of the same width; overwritten. They must not overlap any other row.

    Raises:
        ValueError: the rows do not fit the program.
    """
    _registers(program, inputs, outputs, [outputs[0]] * program.scratch if outputs else ())
    if not outputs:
        return
    width, hot = len(outputs[0]), len(outputs) + program.scratch
    block = min(max(CACHE_BYTES // hot, COLUMNS_MIN), COLUMNS_MAX) // COLUMNS_UNIT * COLUMNS_UNIT
    scratch = np.empty((program.scratch, min(block, width)), np.uint8)
    for begin in range(0, width, block):
        columns = slice(begin, begin + block)
        run(
            program,
            [row[columns] for row in inputs],
            [row[columns] for row in outputs],
            [row[: width - begin] for row in scratch],
        )


def _registers(program: XorProgram, inputs: Sequence[A], outputs: Sequence[A], scratch: Sequence[A]) -> list[A]:
    """Returns the program's registers, in order of their numbers.

    Raises:
        ValueError: there are too few or too many registers, or they differ in shape or dtype.
    """
    counts = (len(inputs), len(outputs), len(scratch))
    expected_counts = (len(program.inputs), len(program.outputs), program.scratch)
    if counts != expected_counts:
        raise ValueError(f"{counts} inputs, outputs and scratch registers; the program has {expected_counts}")
    arrays = [*inputs, *outputs, *scratch]
    kind = (arrays[0].shape, arrays[0].dtype) if arrays else None
    # Each attribute of each tensor is read once: reads are slow, compared with the microseconds of
    # one slice.
    for array in arrays:
        if (array.shape, array.dtype) != kind:
            raise ValueError(
                f"registers of {kind} and of {(array.shape, array.dtype)}; all must have one shape and dtype"
            )
    return arrays
