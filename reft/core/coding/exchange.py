"""The exchange's lanes: which blocks of unreplicated state each node keeps parity of.

    a lane: one rank of each failure domain             D = 4 members, one parity each (f = 1)

      source i's section, cut into k = D - 1 pieces      │ piece 0 │ piece 1 │ piece 2 │
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

Invariants
  1. Each rank with unreplicated bytes is in exactly one lane, or is exposed by name.
  2. A lane has at most one member in each failure domain.
  3. A turn sends (D - 1) / (D - f) of a source's section, and a holder keeps f / (D - f) of the
     longest section.
  4. Pieces are multiples of chunk_bytes, unless the section is too short for that. So a receiver
     can ask for ranges that end at chunk borders.
"""

from __future__ import annotations

from dataclasses import dataclass

from reft.core.coding.erasure import ErasureCode


@dataclass(frozen=True)
class GuardLane:
    """The ranks that guard one another's unreplicated sections.

    Attributes:
        members: one rank of each failure domain.
        sizes: bytes of each member's section.
        code: how a holder's column becomes parity: D - 1 data shards, f parity shards.
        piece_bytes: size of a piece.
    """

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    code: ErasureCode
    piece_bytes: int

    @property
    def D(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def parity_bytes(self) -> int:
        """Bytes of parity that each member's node keeps, in each of two buffers."""
        return self.code.f * self.piece_bytes

    def piece_of(self, source: int, holder: int) -> int:
        """Returns the number of the piece of a source that a holder keeps; both index `members`."""
        return (holder - source - 1) % self.D

    def piece_range(self, source: int, piece: int) -> tuple[int, int]:
        """Returns begin and end of a piece in its source's section, without the zeros behind it."""
        begin, size = piece * self.piece_bytes, self.sizes[source]
        return min(begin, size), min(begin + self.piece_bytes, size)
