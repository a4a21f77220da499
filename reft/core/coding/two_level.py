"""The code of a guard lane that survives f lost members: one code inside another.

    source i    | piece 0 | … | piece k-1 | coded piece k | … | coded piece D-2 |
                k = D - f pieces of its section │ f - 1 pieces by the inner code, code_for(k, f - 1)
                any k of these D - 1 pieces give the section
                piece r goes to holder i + 1 + r (mod D)

    holder j    one piece of each other member ─► f parities by the outer code, code_for(D - 1, f)

    a piece     | block | block | … |        each block is coded by itself
    a block     | unit 0 | … | unit w-1 |    w = lcm of both codes' packets, so a packet of either
                                             code is a run of units

    members in F are lost      a holder j at hand ─► outer code: piece j - i - 1 of each i in F
                               k such pieces of i ─► inner code: the section of i

With f = 1 the inner code adds nothing, and the outer one is a plain XOR.

Invariants
  1. Any f lost members are decoded, if k holders with parity are left for each of them.
  2. Byte n of a block of parity, or of a coded piece, depends on the same block of pieces only.
     So a range of whole blocks can be coded without the rest.
  3. Sources are folded into parity in any order; each source's bytes are folded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence

import numpy as np

from reft.core.coding.erasure import (
    Bytes,
    ErasureCode,
    Packet,
    XorProgram,
    code_for,
    encode_program,
    join,
    make_program,
    run,
)

SECTION_PROGRAMS_MAX = 8  # cached: the widest take megabytes each


def units(D: int, f: int) -> int:
    """Returns the units of a block: packets of both codes are runs of units."""
    return math.lcm(code_for(D - f, f - 1).w, code_for(D - 1, f).w)


def piece_shard(D: int, member: int, piece: int) -> int:
    """Returns the shard number of a member's piece, plain or coded, in `section_program`."""
    return member * (D - 1) + piece


def parity_shard(D: int, f: int, holder: int, parity: int) -> int:
    """Returns the shard number of a holder's parity in `section_program`."""
    return D * (D - 1) + holder * f + parity


def encode_piece(inner: ErasureCode, parity: int, pieces: Sequence[Bytes], coded: Bytes, block_bytes: int) -> None:
    """Computes blocks of a coded piece from the same blocks of all plain pieces.

    Args:
        inner: the inner code.
        parity: the coded piece is piece k + `parity`.
        pieces: k arrays uint8 [n], whole blocks; only read.
        coded: uint8 [n], overwritten.
        block_bytes: size of a block.
    """
    program = encode_program(inner, parity)
    rows = [_packets(each, inner.w, block_bytes) for each in (*pieces, coded)]
    outputs = [rows[-1][:, packet] for _, packet in program.outputs]
    scratch = list(np.empty((program.scratch, *outputs[0].shape), np.uint8))
    run(program, [rows[shard][:, packet] for shard, packet in program.inputs], outputs, scratch)


def fold_piece(outer: ErasureCode, column: int, frame: Bytes, parity: Bytes, at: int, block_bytes: int) -> None:
    """XORs bytes of one source's piece into all parities of a holder.

    Args:
        outer: the outer code.
        column: the source's data shard in the outer code.
        frame: uint8 [n]; whole blocks, unless the code has one packet.
        parity: the f parities, end to end.
        at: where the frame begins in the piece, a multiple of block_bytes.
        block_bytes: size of a block.
    """
    source = _packets(frame, outer.w, block_bytes)
    piece_bytes = parity.nbytes // outer.f
    for number, targets in enumerate(_targets(outer, column)):
        begin = number * piece_bytes + at
        target = _packets(parity[begin : begin + frame.nbytes], outer.w, block_bytes)
        for packet, into in targets:
            np.bitwise_xor(target[:, into], source[:, packet], out=target[:, into])


def _packets(data: Bytes, w: int, block_bytes: int) -> Bytes:
    """Returns a view [blocks, w, bytes of a packet]; one packet needs no blocks."""
    return data.reshape(1, 1, -1) if w == 1 else data.reshape(-1, w, block_bytes // w)


@functools.lru_cache(maxsize=256)
def _targets(outer: ErasureCode, column: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns, for each parity, pairs of packets: of the column, of the parity."""
    return tuple(
        tuple((packet, into) for into, terms in enumerate(table) for shard, packet in sorted(terms) if shard == column)
        for table in outer.parity
    )


@functools.lru_cache(maxsize=SECTION_PROGRAMS_MAX)
def section_program(
    D: int, f: int, lost: tuple[int, ...], holders: tuple[int, ...], made: tuple[tuple[int, int], ...]
) -> XorProgram:
    """Returns the program that makes pieces of lost members from what is left.

    Its packets are (`piece_shard` or `parity_shard`, unit). The inputs are plain pieces of members
    that are not lost, and parity of `holders`.

    Args:
        D: the number of members.
        f: the lost members that the lane survives.
        lost: the lost members, ascending.
        holders: members whose parity is at hand, ascending; a lost one may be among them.
        made: (lost member, plain piece) to make, ascending.

    Raises:
        ValueError: more than f members are lost, or fewer than D - f holders are left for one.
    """
    inner, outer, w = code_for(D - f, f - 1), code_for(D - 1, f), units(D, f)
    chosen = {member: _holders_of(member, D, f, holders) for member in lost}
    if len(lost) > f or any(len(each) < inner.k for each in chosen.values()):
        raise ValueError(f"members {lost} of {D} are lost, and parity of {holders} is at hand; f is {f}")
    parts: list[tuple[XorProgram, dict[Packet, Packet]]] = []

    def add(program: XorProgram, code: ErasureCode, shards: Sequence[int]) -> None:
        run_of = w // code.w
        for unit in range(run_of):
            names = (*program.inputs, *program.outputs)
            parts.append((program, {(s, p): (shards[s], p * run_of + unit) for s, p in names}))

    def own_shards(member: int) -> list[int]:
        return [piece_shard(D, member, piece) for piece in range(D - 1)]

    for holder in sorted({holder for each in chosen.values() for holder in each}):
        sources = [(holder + 1 + column) % D for column in range(D - 1)]
        pieces = [D - 2 - column for column in range(D - 1)]  # of each source, the holder's
        gone = [column for column, source in enumerate(sources) if source in lost]
        for source, piece in zip(sources, pieces, strict=True):
            if piece >= inner.k and source not in lost:
                add(encode_program(inner, piece - inner.k), inner, own_shards(source))
        read = [column for column in range(D - 1) if column not in gone] + [outer.k + i for i in range(len(gone))]
        shards = [piece_shard(D, source, piece) for source, piece in zip(sources, pieces, strict=True)]
        shards += [parity_shard(D, f, holder, parity) for parity in range(f)]
        add(make_program(outer, read, gone), outer, shards)
    for member in lost:
        known = [(holder - member - 1) % D for holder in chosen[member]]
        add(make_program(inner, known, set(range(inner.k)).difference(known)), inner, own_shards(member))
    return join(parts, [(piece_shard(D, member, piece), unit) for member, piece in made for unit in range(w)])


def _holders_of(member: int, D: int, f: int, holders: Collection[int]) -> list[int]:
    """Returns D - f holders that give a lost member's pieces; plain pieces come first."""
    others = [holder for holder in holders if holder != member]
    return sorted(others, key=lambda holder: (holder - member - 1) % D)[: D - f]
