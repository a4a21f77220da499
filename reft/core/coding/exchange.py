"""The exchange's lanes: which blocks of unreplicated state each node keeps parity of.

    a lane: one rank of each failure domain             D = 4 members, one parity each (f = 1)

      source i's section, cut into k = D - f pieces      │ piece 0 │ piece 1 │ piece 2 │
      piece r of source i goes to holder j = i + 1 + r (mod D)

      holder       0          1          2          3
      source 0     .          piece 0    piece 1    piece 2
      source 1     piece 2    .          piece 0    piece 1
      source 2     piece 1    piece 2    .          piece 0
      source 3     piece 0    piece 1    piece 2    .
      parity z_j   the XOR of the holder's column

A source's *section* is the unreplicated section of its slot (core/coding/placement.py). A shorter
section counts as followed by zeros, which are not sent. If member i is lost, each other holder j
has z_j, and gives piece (j - i - 1) mod D of source i by the XOR with its own column.

With f > 1 a source has f - 1 coded pieces behind its k plain ones, D - 1 in all, and a holder keeps
f parities, end to end (core/coding/two_level.py). Offsets in a section go on behind it: piece r of
a source begins at r times the size of a piece, whether it is plain or coded.

    ranks, largest section first ─► lane 0: the largest, of as many domains │ lane 1: the next │ …

Ranks of like size share a lane, so a lane has little padding.

A *copy lane* has the same members, but no parity (protect="aor"). Member j keeps the sections of
the next f members, whole and end to end:

      member       0          1          2          3            D = 4, f = 2
      column 0     section 1  section 2  section 3  section 0    begins at 0
      column 1     section 2  section 3  section 0  section 1    begins at the size of a piece

So the node of member j can update what it keeps by itself, if it knows the members' gradients. Any
one of members i-1 … i-f gives back section i.

Invariants
  1. Each rank with unreplicated bytes is in exactly one lane, or is exposed by name. Such a rank
     has no partner: one domain has more of these ranks than all other domains together.
  2. A lane has at most one member in each failure domain.
  3. A turn sends (D - 1) / (D - f) of a source's section, and a holder keeps f / (D - f) of the
     longest section. In a copy lane both are f.
  4. Pieces are multiples of chunk_bytes, unless the section is too short for that. So a receiver
     can ask for ranges that end at chunk borders. With f > 1 a piece is a run of blocks of about a
     chunk, and ranges end with a block.
  5. The same sizes and domains give the same lanes on every rank and daemon. The numbers that name
     the domains do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

from reft.core.coding.erasure import ErasureCode, code_for
from reft.core.coding.two_level import units
from reft.core.layout.layout import ALIGNMENT, align

GUARD_WIDTH_MAX = 16  # members of a lane: a lost member is decoded from all the others
PARITY_BUFFERS = 2  # of each holder: one for the protected version, one for the turn under way
PIECE_UNIT = 4096  # bytes: pieces shorter than a chunk are multiples of this
BLOCK_MAX = 256 << 10  # bytes of a block before its packets are aligned: decoding reads a block of all pieces
RANGE_MAX = 4 << 20  # bytes that one request asks for


class PieceSizes(NamedTuple):
    """How a source's section is cut.

    Attributes:
        k: number of plain pieces.
        coded: number of coded pieces behind them.
        piece_bytes: size of a piece.
        block_bytes: size of a block of a piece.
    """

    k: int
    coded: int
    piece_bytes: int
    block_bytes: int


@dataclass(frozen=True)
class GuardLane:
    """The ranks that guard one another's unreplicated sections.

    Attributes:
        members: one rank of each failure domain, ascending.
        sizes: bytes of each member's section.
        code: how a holder's column becomes parity: D - 1 data shards, f parity shards.
        piece_bytes: size of a piece.
        blocks: number of blocks of a piece; each block is coded by itself.
        is_copies: whether members keep copies of whole sections, and no parity.
    """

    is_copies: ClassVar[bool] = False

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    code: ErasureCode
    piece_bytes: int
    blocks: int = 1

    @property
    def D(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def f(self) -> int:
        """The number of lost members that the lane survives."""
        return self.code.f

    @property
    def k(self) -> int:
        """The number of pieces of a section; f - 1 coded pieces follow them."""
        return self.D - self.f

    @property
    def inner(self) -> ErasureCode:
        """How a section's pieces become coded pieces."""
        return code_for(self.k, self.f - 1)

    @property
    def block_bytes(self) -> int:
        return self.piece_bytes // self.blocks

    @property
    def piece_sizes(self) -> PieceSizes | None:
        """How a section is cut; None if no piece is coded."""
        return PieceSizes(self.k, self.f - 1, self.piece_bytes, self.block_bytes) if self.f > 1 else None

    def copied_members(self, member: int) -> list[int]:
        """Returns the members whose sections a member's node keeps, in the order of the columns."""
        return self.sources_of(member) if self.is_copies else []

    def gives_back(self, rank: int, slots: Collection[int], parity: Collection[int]) -> bool:
        """Whether the lane gives back the section of a lost member.

        Args:
            rank: the lost member.
            slots: ranks whose slot is at hand.
            parity: ranks whose parity is at hand.
        """
        lost = sum(member not in slots for member in self.members)
        holders = sum(member in parity for member in self.members if member != rank)
        return lost <= self.f and holders >= self.k

    def is_without(self, ranks: Collection[int]) -> bool:
        """Whether none of these ranks is a member."""
        return all(member not in ranks for member in self.members)

    @property
    def parity_bytes(self) -> int:
        """Bytes of parity that each member's node keeps, in each of two buffers."""
        return self.code.f * self.piece_bytes

    @property
    def buffers_bytes(self) -> int:
        """Bytes of both buffers of parity that each member's node keeps."""
        return PARITY_BUFFERS * self.parity_bytes

    def sent_bytes(self, source: int) -> int:
        """Returns the bytes that a source sends in a turn: to each holder its piece."""
        ranges = (self.piece_range(source, self.piece_of(source, holder)) for holder in self.holders_of(source))
        return sum(end - begin for begin, end in ranges)

    @cached_property
    def digest(self) -> bytes:
        """Names the lane, 16 bytes: parity of another digest is not parity of this lane."""
        code = self.code
        facts = (self.members, self.sizes, self.D, code.kind, code.k, code.f, code.w, self.piece_bytes, self.blocks)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()

    def piece_of(self, source: int, holder: int) -> int:
        """Returns the number of a source's piece at a holder; coded from k on.

        Source and holder are indices of `members`.
        """
        return (holder - source - 1) % self.D

    def piece_range(self, source: int, piece: int) -> tuple[int, int]:
        """Returns begin and end of a piece in its source's section; behind it if coded.

        The zeros behind the section are left out. A block of a coded piece is left out if it is
        zeros, and the end of its last block if the piece is the plain XOR of the others.
        """
        begin, size = piece * self.piece_bytes, self.sizes[source]
        if not self.k <= piece < self.D - 1:
            return min(begin, size), min(begin + self.piece_bytes, size)
        is_plain = piece == self.k or self.inner.w == 1
        return begin, begin + min(size if is_plain else align(size, self.block_bytes), self.piece_bytes)

    @property
    def fold_code(self) -> tuple[int, int]:
        """Returns k and f of the code by which a holder folds what it receives."""
        return self.code.k, self.f

    def column_of(self, source: int, holder: int) -> int:
        """Returns the data shard of a source in `fold_code`."""
        return (source - holder - 1) % self.D

    def sources_of(self, holder: int) -> list[int]:
        """Returns the other members, in the order in which a holder asks them.

        The position of a source in this list is its data shard in the holder's code. Each holder
        begins with another source, so no source is asked by all holders at once.
        """
        return [(holder + i) % self.D for i in range(1, self.D)]

    def holders_of(self, source: int) -> list[int]:
        """Returns the members that keep something of a source."""
        return [(source - i) % self.D for i in range(1, self.D)]

    def requests(self, source: int, holder: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yields the ranges that a holder asks a source for: all bytes of its piece, in order.

        A range ends at a border of chunks or with the piece. Only where a chunk is longer than
        RANGE_MAX, ranges also end inside a chunk. With f > 1 a range ends with a block or with the
        bytes of the piece.

        Args:
            source: index of the source in `members`.
            holder: index of the holder in `members`.
            chunk_bytes: size of the chunks that the source's digests cover.

        Yields:
            Offset in the source's section, offset in the piece, and length; all in bytes. In a copy
            lane, the second is the offset in what the holder keeps.
        """
        begin, end = self.piece_range(source, self.piece_of(source, holder))
        unit, origin = (chunk_bytes, 0) if self.f == 1 else (self.block_bytes, begin)
        return _cut(begin, end, unit, origin)


class CopyLane(GuardLane):
    """The ranks whose nodes keep copies of one another's sections: each of the next f members.

    Its code makes f copies of one data shard, and its only piece is the whole section.
    """

    is_copies = True

    @property
    def k(self) -> int:
        """The number of pieces of a section."""
        return 1

    @property
    def piece_sizes(self) -> None:
        return None

    @cached_property
    def digest(self) -> bytes:
        facts = "copies", self.members, self.sizes, self.f, self.piece_bytes
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()

    def gives_back(self, rank: int, slots: Collection[int], parity: Collection[int]) -> bool:
        """Whether a copy of a lost member's section is at hand.

        It does not matter how many members are lost.
        """
        return any(self.members[holder] in parity for holder in self.holders_of(self.members.index(rank)))

    def piece_of(self, source: int, holder: int) -> int:
        return 0

    def piece_range(self, source: int, piece: int) -> tuple[int, int]:
        return 0, self.sizes[source]

    @property
    def fold_code(self) -> tuple[int, int]:
        """Returns a code that adds nothing: bytes are XORed into zeros, so they are copied."""
        return 1, 1

    def column_of(self, source: int, holder: int) -> int:
        return 0

    def sources_of(self, holder: int) -> list[int]:
        """Returns the members that a holder copies, in the order of its columns."""
        return super().sources_of(holder)[: self.f]

    def holders_of(self, source: int) -> list[int]:
        """Returns the members that copy a source, in the order of the source's columns there."""
        return super().holders_of(source)[: self.f]

    def requests(self, source: int, holder: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        column = self.sources_of(holder).index(source)
        for begin, at, length in _cut(0, self.sizes[source], chunk_bytes, 0):
            yield begin, column * self.piece_bytes + at, length


def _cut(begin: int, end: int, unit: int, origin: int) -> Iterator[tuple[int, int, int]]:
    """Yields ranges of begin..end that end at multiples of `unit` behind `origin`, if they can.

    Yields:
        Begin of the range, the same behind `begin`, and length.
    """
    at = begin
    while at < end:
        border = origin + (at - origin + RANGE_MAX) // unit * unit
        stop = min(border if border > at else at + RANGE_MAX, end)
        yield at, at - begin, stop - at
        at = stop


def requested_losses(D: int, tolerate: int | None) -> int:
    """Returns how many lost domains state in D domains should survive, possible or not."""
    if tolerate is not None:
        return tolerate
    return 0 if D == 1 else 1 if D < 6 else 2


def guard_lanes(
    sizes: Sequence[int], domains: Sequence[int], chunk_bytes: int, tolerate: int | None = 1, copies: bool = False
) -> tuple[GuardLane, ...]:
    """Returns the lanes of the ranks that have unreplicated bytes, the largest sections first.

    Args:
        sizes: bytes of each rank's section.
        domains: failure domain of each rank.
        chunk_bytes: size of a chunk of the slots.
        tolerate: lost domains to survive, at least 1. A lane of D members survives at most D - 1.
            None: 1, or 2 in lanes of six members or more.
        copies: whether members keep copies of whole sections, and no parity.
    """
    make = _copy_lane if copies else _lane
    return tuple(
        make(sorted(members), sizes, chunk_bytes, min(requested_losses(len(members), tolerate), len(members) - 1))
        for members in _deal(sizes, domains)
        if len(members) > 1
    )


def _copy_lane(members: Sequence[int], sizes: Sequence[int], chunk_bytes: int, f: int) -> CopyLane:
    sections = tuple(sizes[rank] for rank in members)
    return CopyLane(tuple(members), sections, code_for(1, f), _aligned_piece(max(sections), chunk_bytes))


def _aligned_piece(least: int, chunk_bytes: int) -> int:
    return align(least, chunk_bytes if least > chunk_bytes else min(PIECE_UNIT, chunk_bytes))


def _lane(members: Sequence[int], sizes: Sequence[int], chunk_bytes: int, f: int) -> GuardLane:
    D, sections = len(members), tuple(sizes[rank] for rank in members)
    least = -(-max(sections) // (D - f))
    if f == 1:
        return GuardLane(tuple(members), sections, code_for(D - 1, f), _aligned_piece(least, chunk_bytes))
    unit = ALIGNMENT * units(D, f)
    block = align(min(chunk_bytes, BLOCK_MAX), unit)
    if least <= block:
        block = align(align(least, min(PIECE_UNIT, chunk_bytes)), unit)
    blocks = -(-least // block)
    return GuardLane(tuple(members), sections, code_for(D - 1, f), blocks * block, blocks)


def _deal(sizes: Sequence[int], domains: Sequence[int]) -> Iterator[list[int]]:
    """Yields the members of each lane; a lane with one member has no partner.

    Each lane takes the largest ranks that remain, of different domains. A domain with as many
    remaining ranks as there are lanes must give one to each. All lanes are equally wide, but for
    one member. So a lane has one member only where all other domains together have too few.
    """
    ranks_of: dict[int, list[int]] = {}  # domain → its ranks, the next one last
    for rank in sorted((rank for rank, size in enumerate(sizes) if size), key=lambda rank: (sizes[rank], -rank)):
        ranks_of.setdefault(domains[rank], []).append(rank)
    count = sum(map(len, ranks_of.values()))
    domains_with: dict[int, set[int]] = {}  # number of remaining ranks → the domains that have so many
    for domain, ranks in ranks_of.items():
        domains_with.setdefault(len(ranks), set()).add(domain)
    most = max(domains_with, default=0)
    heads: list[tuple[int, int, int]] = []  # a heap: -size, rank and domain of each domain's next rank
    for domain, ranks in ranks_of.items():
        heappush(heads, (-sizes[ranks[-1]], ranks[-1], domain))
    for lanes in range(max(most, -(-count // GUARD_WIDTH_MAX)), 0, -1):
        width = -(-count // lanes)
        chosen = set(domains_with.get(lanes, ()))
        while len(chosen) < width:
            _, rank, domain = heappop(heads)
            if ranks_of[domain] and ranks_of[domain][-1] == rank:
                chosen.add(domain)
        yield [ranks_of[domain].pop() for domain in chosen]
        count -= width
        for domain in chosen:
            domains_with[len(ranks_of[domain]) + 1].remove(domain)
            domains_with.setdefault(len(ranks_of[domain]), set()).add(domain)
            if ranks_of[domain]:
                rank = ranks_of[domain][-1]
                heappush(heads, (-sizes[rank], rank, domain))
