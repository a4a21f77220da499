"""Erasure codes: k data shards and f parity shards, of which any f may be lost, as tables of XOR operations.

A shard is w packets of equal size; packet r of parity j is the XOR of the data packets in `parity[j][r]`:

    data 0   data 1   ...   data k-1  |  parity 0   ...   parity f-1
    ┌──────┐ ┌──────┐       ┌──────┐  |  ┌──────┐         ┌──────┐     f = 1: XOR
    │ 0    │ │ 0    │       │ 0    │  |  │ 0    │         │ 0    │     f = 2: EVENODD, w = p - 1 for a prime p >= k
    │ ...  │ │ ...  │       │ ...  │  |  │ ...  │         │ ...  │     f = 3: STAR, which adds the other diagonals
    │ w-1  │ │ w-1  │       │ w-1  │  |  │ w-1  │         │ w-1  │     f > 3: Cauchy over GF(2^w), as bit matrices
    └──────┘ └──────┘       └──────┘  |  └──────┘         └──────┘     k = 1: every parity is a copy

Invariants:
    - Any k of the k + f shards give all data back.
    - Parity 0 is the plain XOR of the data shards.
    - A program never writes its inputs, and reads no other register before it has written it.

A program names registers, not memory. So one table drives every executor: numpy here, torch in `reft.client.memory.xor`.
Byte i of an output depends on byte i of the inputs alone: packets may be coded slice by slice.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

SHARDS_MAX = 128  # k + f; tables and the search for pivots grow with its cube
PARITIES_XOR = 3  # up to here EVENODD and STAR need fewer operations than Cauchy

# Primitive polynomials by their degree w: x generates all elements but 0 of GF(2^w).
_PRIMITIVE = {1: 0b11, 2: 0b111, 3: 0b1011, 4: 0b10011, 5: 0b100101, 6: 0b1000011, 7: 0b10000011}

Packet = tuple[int, int]  # shard, packet in it; parity j is shard k + j
Terms = frozenset[Packet]


@dataclass(frozen=True)
class ErasureCode:
    """One code.

    Attributes:
        kind: "copy" (k = 1, or no parity), "xor", "evenodd", "star" or "cauchy".
        k: data shards.
        f: parity shards.
        w: packets of a shard.
        parity: for each parity, for each packet of it, the data packets whose XOR it is.
        common: for each parity, what all its packets share (the adjuster of EVENODD and STAR); encoded once.
    """

    kind: str
    k: int
    f: int
    w: int
    parity: tuple[tuple[Terms, ...], ...]
    common: tuple[Terms, ...]


class XorOp(NamedTuple):
    """Register `target` becomes a copy of `source`, or is XORed with it in place."""

    target: int
    source: int
    is_copy: bool


class XorStep(NamedTuple):
    """`target = left ^ right`, or `target = left` where right is None. The target may be left too."""

    target: int
    left: int
    right: int | None


@dataclass(frozen=True)
class XorProgram:
    """Operations on registers, which are numbered through: inputs, then outputs, then scratch.

    Attributes:
        inputs: the packet that each input register reads.
        outputs: the packet that each output register becomes.
        scratch: registers for intermediate sums.
        ops: in order.
    """

    inputs: tuple[Packet, ...]
    outputs: tuple[Packet, ...]
    scratch: int
    ops: tuple[XorOp, ...]

    @functools.cached_property
    def steps(self) -> tuple[XorStep, ...]:
        """The operations as an executor runs them: a copy and the first XOR onto it become one pass over memory."""
        made: list[XorStep] = []
        waiting: dict[int, int] = {}  # target -> the input that it will be a copy of
        for target, source, is_copy in self.ops:
            if source in waiting:
                made.append(XorStep(source, waiting.pop(source), None))
            if is_copy and source < len(self.inputs):  # an input stays as it is, so that the copy can wait
                waiting[target] = source
            elif is_copy:
                made.append(XorStep(target, source, None))
            else:
                made.append(XorStep(target, waiting.pop(target, target), source))
        made += [XorStep(target, source, None) for target, source in waiting.items()]
        return tuple(made)


# Codes


@functools.lru_cache(maxsize=256)
def code_for(k: int, f: int) -> ErasureCode:
    """The code for k data shards and f parity shards.

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
    """EVENODD (f = 2) and STAR (f = 3).

    The w = p - 1 packets of the data shards are rows 0..p-2 of p columns; row p-1 and the columns from k on are zeros.
    A parity has the diagonals of slope 1 (or -1). The diagonal that would be its packet p-1 is not stored: it is the
    adjuster, XORed into all others.
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
    """Parity j is the sum of e(j, i) * data i over GF(2^w), where every square submatrix of e has an inverse.

    e(j, i) = 1 / (x_j + y_i) for distinct x and y. Multiplying a row or a column by an element keeps the property:
    columns are scaled so that parity 0 is a plain XOR, the other rows so that their bit matrices have few ones.
    Elements are held as logarithms to the base x.
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
    """Collects operations. A register that holds nothing yet is zero: adding to it copies, adding it does nothing."""

    def __init__(self, inputs: int) -> None:
        self.ops: list[XorOp] = []
        self._filled = set(range(inputs))

    def add(self, target: int, source: int) -> None:
        if source in self._filled:
            self.ops.append(XorOp(target, source, target not in self._filled))
            self._filled.add(target)

    def sums(self, inputs: Sequence[Packet], sums: Iterable[tuple[int, Collection[Packet]]]) -> None:
        """Adds to each target those of its terms that are inputs.

        In the order of the inputs: the targets are few and stay in the cache, while the inputs come from memory once.
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
    """What each packet of the parity has beside the adjuster, and the adjuster: none where it would save nothing."""
    packets, adjuster = code.parity[parity], code.common[parity]
    if len(adjuster) < 2:
        return packets, frozenset()
    return tuple(packet ^ adjuster for packet in packets), adjuster


def encode_program(code: ErasureCode, parity: int) -> XorProgram:
    """Computes parity shard `parity` from all data shards; outputs are its packets, in order.

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
    """Computes the packets of lost data shards from the other data shards and as many parities, lowest first.

    Args:
        code: the code.
        lost: data shards to compute, 0..k-1.
        have: parities at hand, 0..f-1.

    Returns:
        A program whose outputs are the packets of the lost shards, both ascending. With nothing lost it is empty.

    Raises:
        ValueError: a number is out of range, or the parities at hand are too few.
    """
    gone, parities = tuple(sorted(set(lost))), tuple(sorted(set(have)))
    for what, numbers, count in (("data shard", gone, code.k), ("parity", parities, code.f)):
        wrong = [number for number in numbers if not 0 <= number < count]
        if wrong:
            raise ValueError(f"{what} {wrong[0]} of a code with {count}; they are counted from 0")
    if len(parities) < len(gone):
        raise ValueError(f"{len(gone)} data shards are lost and {len(parities)} parities at hand; as many are needed")
    return _decode(code, gone, parities[: len(gone)])


@functools.lru_cache(maxsize=64)  # the stripes of a lane ask for the same few patterns
def _decode(code: ErasureCode, lost: tuple[int, ...], parities: tuple[int, ...]) -> XorProgram:
    """Each parity packet is an equation: its lost terms, the unknowns, have the sum of its other terms.

    An adjuster is an unknown too, with an equation of its own. So the equations stay as sparse as the code, and what
    solves them are few operations. Each equation is summed up in the register of the unknown that it will yield.
    """
    equations: list[set[Packet]] = []
    outputs = tuple((shard, packet) for shard in lost for packet in range(code.w))
    unknowns = list(outputs)
    for parity in parities:
        packets, adjuster = _terms(code, parity)
        shared: set[Packet] = set()
        if adjuster:
            shared = {(code.k + code.f + parity, 0)}  # a name that no packet has
            unknowns += shared
            equations.append({*adjuster, *shared})
        equations += [{*terms, *shared, (code.k + parity, packet)} for packet, terms in enumerate(packets)]
    survivors = [(shard, packet) for shard in range(code.k) if shard not in lost for packet in range(code.w)]
    survivors += [(code.k + parity, packet) for parity in parities for packet in range(code.w)]
    used = set().union(*equations)
    inputs = tuple(packet for packet in survivors if packet in used)
    register = {unknown: len(inputs) + i for i, unknown in enumerate(unknowns)}
    solved, additions = _eliminate([equation.intersection(register) for equation in equations])
    home = [register[unknown] for unknown in solved]
    recorder = _Recorder(len(inputs))
    recorder.sums(inputs, zip(home, equations, strict=True))
    for target, source in additions:
        recorder.add(home[target], home[source])
    return XorProgram(inputs, outputs, len(unknowns) - len(outputs), tuple(recorder.ops))


def _eliminate(rows: list[set[Packet]]) -> tuple[list[Packet], list[tuple[int, int]]]:
    """Solves a square system over GF(2), given by the unknowns of each equation; `rows` are changed.

    Forward, then back, as LU does: dense inverses have many more terms. The pivot is the one that can make the fewest
    new terms (Markowitz' rule).

    Returns:
        The unknown that each equation yields, and the additions (equation, equation added to it) that lead there.

    Raises:
        ValueError: the system has no single solution.
    """
    holders: dict[Packet, set[int]] = {}
    for number, row in enumerate(rows):
        for unknown in row:
            holders.setdefault(unknown, set()).add(number)
    additions: list[tuple[int, int]] = []
    pivots: list[tuple[int, Packet]] = []
    earlier: dict[Packet, list[int]] = {}  # pivot rows that still have this unknown
    waiting = set(range(len(rows)))
    while waiting:
        choices = (
            ((len(rows[number]) - 1) * (len(holders[unknown]) - 1), number, unknown)
            for number in waiting
            for unknown in rows[number]
        )
        _, pivot, solved = min(choices, default=(0, -1, (0, 0)))
        if pivot < 0:
            raise ValueError(f"{len(waiting)} packets depend on no parity at hand; this code loses data")
        waiting.remove(pivot)
        for unknown in rows[pivot]:
            holders[unknown].remove(pivot)
            earlier.setdefault(unknown, []).append(pivot)
        for other in sorted(holders[solved]):
            additions.append((other, pivot))
            for unknown in rows[pivot]:
                holders[unknown] ^= {other}
            rows[other] ^= rows[pivot]
        pivots.append((pivot, solved))
    for pivot, solved in reversed(pivots):
        additions += [(other, pivot) for other in earlier[solved] if other != pivot]
    return [unknown for _, unknown in sorted(pivots)], additions


# Executors


class Array(Protocol):
    """What the executors' arrays have in common."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


A = TypeVar("A", bound=Array)


def registers(program: XorProgram, inputs: Sequence[A], outputs: Sequence[A], scratch: Sequence[A]) -> list[A]:
    """The program's registers in order.

    Raises:
        ValueError: there are too few or too many, or they differ in shape or dtype.
    """
    counts = (len(inputs), len(outputs), len(scratch))
    wanted = (len(program.inputs), len(program.outputs), program.scratch)
    if counts != wanted:
        raise ValueError(f"{counts} inputs, outputs and scratch registers; the program has {wanted}")
    found = [*inputs, *outputs, *scratch]
    kind = (found[0].shape, found[0].dtype) if found else None
    for each in found:  # attributes of tensors are slow to get, and a slice takes but microseconds
        if (each.shape, each.dtype) != kind:
            raise ValueError(
                f"registers of {kind} and of {(each.shape, each.dtype)}; all must have one shape and dtype"
            )
    return found


def run(
    program: XorProgram,
    inputs: Sequence[npt.NDArray[Any]],
    outputs: Sequence[npt.NDArray[Any]],
    scratch: Sequence[npt.NDArray[Any]],
) -> None:
    """Runs the program on numpy arrays: uint8 or uint64, all of one shape. Makes no temporaries.

    Args:
        program: what to run.
        inputs: read; any of them may be read-only.
        outputs: written; what they hold before is ignored. They must not overlap any other register.
        scratch: written, like outputs.

    Raises:
        ValueError: the registers do not fit the program.
    """
    found = registers(program, inputs, outputs, scratch)
    for target, left, right in program.steps:
        if right is None:
            np.copyto(found[target], found[left])
        else:
            np.bitwise_xor(found[left], found[right], out=found[target])
