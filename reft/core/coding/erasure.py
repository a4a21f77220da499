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

A program names registers, not memory. So one table serves every executor: numpy here, torch in
`reft.client.memory.xor`. Byte i of an output depends only on byte i of the inputs. So packets may
be coded slice by slice.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

SHARDS_MAX = 128  # limit of k + f; tables and the search for pivots grow with the cube of k + f
PARITIES_XOR = 3  # up to this f, EVENODD and STAR need fewer operations than Cauchy

# Primitive polynomials by degree w: x generates all elements of GF(2^w) except 0.
_PRIMITIVE = {1: 0b11, 2: 0b111, 3: 0b1011, 4: 0b10011, 5: 0b100101, 6: 0b1000011, 7: 0b10000011}

Packet = tuple[int, int]  # shard, and packet within the shard; parity j is shard k + j
Terms = frozenset[Packet]


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
        """The operations as an executor runs them.

        A copy and the first XOR into the copied register become one pass over memory.
        """
        steps: list[XorStep] = []
        deferred_copies: dict[int, int] = {}  # target → the input register to copy
        for target, source, is_copy in self.ops:
            if source in deferred_copies:
                steps.append(XorStep(source, deferred_copies.pop(source), None))
            if is_copy and source < len(self.inputs):  # inputs never change, so their copies can be deferred
                deferred_copies[target] = source
            elif is_copy:
                steps.append(XorStep(target, source, None))
            else:
                steps.append(XorStep(target, deferred_copies.pop(target, target), source))
        steps += [XorStep(target, source, None) for target, source in deferred_copies.items()]
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
    register does nothing.
    """

    def __init__(self, inputs: int) -> None:
        self.ops: list[XorOp] = []
        self._filled = set(range(inputs))

    def add(self, target: int, source: int) -> None:
        if source in self._filled:
            self.ops.append(XorOp(target, source, target not in self._filled))
            self._filled.add(target)

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
    packets, adjuster = _terms(code, parity)
    inputs = tuple((shard, packet) for shard in range(code.k) for packet in range(code.w))
    outputs = tuple((code.k + parity, packet) for packet in range(code.w))
    registers = range(len(inputs), len(inputs) + len(outputs))
    recorder = _Recorder(len(inputs))
    recorder.sums(inputs, [*zip(registers, packets, strict=True), (registers.stop, adjuster)])
    for register in registers:
        recorder.add(register, registers.stop)
    return XorProgram(inputs, outputs, 1 if adjuster else 0, tuple(recorder.ops))


def decode_program(code: ErasureCode, lost: Collection[int], have: Collection[int]) -> XorProgram:
    """Returns the program that computes lost data shards.

    The program reads the other data shards, and one parity for each lost shard: the lowest
        available ones.

    Args:
        code: the code.
        lost: data shards to compute, 0..k-1.
        have: available parities, 0..f-1.

    Returns:
        A program whose outputs are the packets of the lost shards, ascending by shard and packet.
        The program is empty if no shard is lost.

    Raises:
        ValueError: a number is out of range, or there are fewer available parities than lost
            shards.
    """
    lost_shards, parities = tuple(sorted(set(lost))), tuple(sorted(set(have)))
    for noun, numbers, count in (("data shard", lost_shards, code.k), ("parity", parities, code.f)):
        invalid = [number for number in numbers if not 0 <= number < count]
        if invalid:
            raise ValueError(f"{noun} {invalid[0]} of a code with {count}; they are counted from 0")
    if len(parities) < len(lost_shards):
        raise ValueError(
            f"{len(lost_shards)} data shards are lost and only {len(parities)} parities are available; "
            "one parity per lost shard is needed"
        )
    return _decode(code, lost_shards, parities[: len(lost_shards)])


@functools.lru_cache(maxsize=64)  # the stripes of a lane need the same few programs
def _decode(code: ErasureCode, lost: tuple[int, ...], parities: tuple[int, ...]) -> XorProgram:
    """Returns the program for sorted, valid arguments, by solving linear equations over GF(2).

    Each parity packet gives an equation: the sum of its lost terms, the unknowns, equals the sum of
    its other terms. An adjuster is one more unknown, with one more equation. So the equations stay
    sparse and need few operations. The known terms of an equation are summed in the register of the
    unknown that the equation yields.
    """
    equations: list[set[Packet]] = []
    outputs = tuple((shard, packet) for shard in lost for packet in range(code.w))
    unknowns = list(outputs)
    for parity in parities:
        packets, adjuster = _terms(code, parity)
        shared: set[Packet] = set()
        if adjuster:
            shared = {(code.k + code.f + parity, 0)}  # stands for the adjuster; no packet has this index
            unknowns += shared
            equations.append({*adjuster, *shared})
        equations += [{*terms, *shared, (code.k + parity, packet)} for packet, terms in enumerate(packets)]
    survivors = [(shard, packet) for shard in range(code.k) if shard not in lost for packet in range(code.w)]
    survivors += [(code.k + parity, packet) for parity in parities for packet in range(code.w)]
    used = set().union(*equations)
    inputs = tuple(packet for packet in survivors if packet in used)
    register = {unknown: len(inputs) + i for i, unknown in enumerate(unknowns)}
    solved, additions = _eliminate([equation.intersection(register) for equation in equations])
    targets = [register[unknown] for unknown in solved]
    recorder = _Recorder(len(inputs))
    recorder.sums(inputs, zip(targets, equations, strict=True))
    for target, source in additions:
        recorder.add(targets[target], targets[source])
    return XorProgram(inputs, outputs, len(unknowns) - len(outputs), tuple(recorder.ops))


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


# Executors


class Array(Protocol):
    """The attributes that all executors' arrays have."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


A = TypeVar("A", bound=Array)


def registers(program: XorProgram, inputs: Sequence[A], outputs: Sequence[A], scratch: Sequence[A]) -> list[A]:
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


def run(
    program: XorProgram,
    inputs: Sequence[npt.NDArray[Any]],
    outputs: Sequence[npt.NDArray[Any]],
    scratch: Sequence[npt.NDArray[Any]],
) -> None:
    """Runs the program on numpy arrays, without temporary arrays.

    All arrays are uint8 or all are uint64, and all have the same shape.

    Args:
        program: the program to run.
        inputs: only read; may be read-only arrays.
        outputs: overwritten. They must not overlap any other register.
        scratch: overwritten, like outputs.

    Raises:
        ValueError: the registers do not fit the program.
    """
    arrays = registers(program, inputs, outputs, scratch)
    for target, left, right in program.steps:
        if right is None:
            np.copyto(arrays[target], arrays[left])
        else:
            np.bitwise_xor(arrays[left], arrays[right], out=arrays[target])
