"""Placement: which bytes of a cell each rank writes into its slot, and which parity it computes for the others.

    cell     | lane 0: first holder of each domain | lane 1: second holder of each domain | …        cut at multiples of 64
    lane     | stripe 0 | stripe 1 | … | stripe D-1 |                    D members, one in each domain; then zeros
    stripe   | data shard 0 | … | data shard k-1 | and beside it parity shards k … k+f-1
    shard    | w packets of packet_bytes |
    Shard c of stripe t lies with member (c + t) mod D, so each member has one shard of k + f of the D stripes:

        member       0    1    2    3         D = 4, k = 2, f = 2
        stripe 0     0    1   P0   P1
        stripe 1    P1    0    1   P0
        stripe 2    P0   P1    0    1
        stripe 3     1   P0   P1    0

    a rank's slot data    | data shards | parity shards | kept leaves |      each section at a multiple of chunk_bytes

Invariants
  1. Every byte of a cell lies in exactly one data shard of one lane.
  2. No two shards of a stripe lie in one domain: the loss of any f domains leaves k shards or more of each stripe.
  3. All members of a lane store the same number of bytes, (k + f) / (D k) of the padded lane: no code stores less.
  4. The same division and domains give the same placement on every rank; what the domains are called does not matter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from reft.core.budget import size
from reft.core.coding.erasure import ErasureCode, code_for
from reft.core.layout.cells import Cell, Division
from reft.core.layout.layout import ALIGNMENT, Layout, align
from reft.core.text import counted

WIDTH_MAX = 64  # shards of a stripe: bounds from how many members a lost one is decoded
PACKET_ALIGNMENT = 8  # bytes: packets are XORed as 64-bit words
PADDING_MAX = 16  # "auto" codes a lane only if its padding is at most 1/16 of it

Scheme = Literal["auto", "aec", "arc", "none"]
Reason = Literal["settings", "one domain", "few domains", "kept"]


class PaddedRange(NamedTuple):
    """Bytes begin..end of a cell, followed by `zeros` zero bytes of padding."""

    begin: int
    end: int
    zeros: int


@dataclass(frozen=True)
class Lane:
    """A contiguous part of a cell that is coded on its own among one rank of each domain.

    Attributes:
        cell: index of the cell in the division.
        begin: where the lane begins in the cell, in bytes.
        nbytes: size of the lane without padding, at least 1.
        members: one holder in each domain.
        code: how a stripe is coded.
        packet_bytes: size of a packet, a multiple of 8.
    """

    cell: int
    begin: int
    nbytes: int
    members: tuple[int, ...]
    code: ErasureCode
    packet_bytes: int

    @property
    def D(self) -> int:
        """How many members, and how many stripes."""
        return len(self.members)

    def is_without(self, ranks: Collection[int]) -> bool:
        """Whether none of these ranks is a member."""
        return all(member not in ranks for member in self.members)

    @property
    def shard_bytes(self) -> int:
        return self.code.w * self.packet_bytes

    def member_of(self, stripe: int, shard: int) -> int:
        """Index in `members` of who stores the shard; shards from k on are parity."""
        return (shard + stripe) % self.D

    def shards_of(self, member: int) -> list[tuple[int, int]]:
        """The (stripe, shard) that a member stores, by stripe."""
        return sorted(((member - shard) % self.D, shard) for shard in range(self.code.k + self.code.f))

    def data_range(self, stripe: int, shard: int) -> tuple[int, int]:
        """Begin and end of a data shard in the cell, before they are clipped to the lane's end."""
        begin = self.begin + (stripe * self.code.k + shard) * self.shard_bytes
        return begin, begin + self.shard_bytes


@dataclass(frozen=True)
class ShardBlock:
    """One shard in a rank's slot: `nbytes` at `offset` of the slot's data. `lane` is an index in the placement."""

    lane: int
    stripe: int
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RankPlacement:
    """One rank's share: what its slot's data holds. All offsets and sizes in bytes.

    Attributes:
        blocks: without gaps, data shards in the order of the cells' bytes, then parity shards from `parity_offset` on.
        data_blocks: how many of the blocks are data shards.
        parity_offset: where the parity section begins, a multiple of chunk_bytes.
        unreplicated: the kept leaves; their offsets count from `kept_offset`.
        unreplicated_offset: where the kept section begins, a multiple of chunk_bytes.
        data_bytes: size of the slot's data: the end of the kept section.
    """

    blocks: tuple[ShardBlock, ...]
    data_blocks: int
    parity_offset: int
    unreplicated: Layout
    unreplicated_offset: int
    data_bytes: int


@dataclass(frozen=True)
class Placement:
    """Where every byte of every cell lies.

    Attributes:
        division: the cells, riders and kept leaves.
        lanes: in the order of their cells, then of their begin.
        domains: failure domain of each rank.
        scheme: as asked for.
        tolerate: lost domains to survive, as asked for; None chooses by the number of domains.
        chunk_bytes: what sections are aligned to.
    """

    division: Division
    lanes: tuple[Lane, ...]
    domains: tuple[int, ...]
    scheme: Scheme
    tolerate: int | None
    chunk_bytes: int

    def lanes_of(self, cell: int) -> range:
        """Indices of the lanes of a cell."""
        begin = bisect_left(self.lanes, cell, key=lambda lane: lane.cell)
        return range(begin, bisect_right(self.lanes, cell, lo=begin, key=lambda lane: lane.cell))

    def part(self, rank: int) -> RankPlacement:
        """The share of one rank, made on demand: planning for thousands of ranks must not build them all."""
        digest = self.division.layout_of[rank]
        lanes = [lane for cell in self.division.cells_of[digest] for lane in self.lanes_of(cell)]
        data: list[tuple[int, int, int]] = []
        parity: list[tuple[int, int, int]] = []
        for number in lanes:
            lane = self.lanes[number]
            if rank in lane.members:
                for stripe, shard in lane.shards_of(lane.members.index(rank)):
                    (data if shard < lane.code.k else parity).append((number, stripe, shard))
        data_blocks, end = self._laid(data, 0)
        parity_offset = align(end, self.chunk_bytes)
        parity_blocks, end = self._laid(parity, parity_offset)
        kept, unreplicated_offset = self.division.unreplicated[digest], align(end, self.chunk_bytes)
        blocks = (*data_blocks, *parity_blocks)
        return RankPlacement(
            blocks, len(data), parity_offset, kept, unreplicated_offset, unreplicated_offset + kept.data_bytes
        )

    def _laid(self, shards: Sequence[tuple[int, int, int]], offset: int) -> tuple[list[ShardBlock], int]:
        """Blocks of (lane, stripe, shard) one after the other, and where they end."""
        blocks = []
        for number, stripe, shard in shards:
            blocks.append(ShardBlock(number, stripe, shard, offset, self.lanes[number].shard_bytes))
            offset += self.lanes[number].shard_bytes
        return blocks, offset


@dataclass(frozen=True)
class Exposure:
    """State that fewer lost domains than asked for destroy.

    Attributes:
        what: a sentence for a person.
        ranks: who holds it, ascending.
        nbytes: its size, each copy of a cell counted once.
        reason: what a program may ask.
    """

    what: str
    ranks: tuple[int, ...]
    nbytes: int
    reason: Reason


def place(
    division: Division, domains: Sequence[int], scheme: Scheme, tolerate: int | None, chunk_bytes: int
) -> Placement:
    """Gives every rank its share of the cells.

    Args:
        division: what there is, and who holds it.
        domains: failure domain of each rank.
        scheme: "aec" codes, "arc" copies, "auto" chooses for each lane, "none" stores every byte once.
        tolerate: lost domains to survive; a cell in D domains survives at most D - 1. None: 1 from two domains on, 2 from six on.
        chunk_bytes: where sections may begin, a multiple of 64.

    Raises:
        ValueError: an argument is out of its range, or there is not one domain for each rank.
    """
    if len(domains) != len(division.layout_of):
        raise ValueError(f"{len(domains)} domains for {len(division.layout_of)} ranks; give each rank's domain")
    if scheme not in get_args(Scheme):
        raise ValueError(f"scheme {scheme!r}; it must be one of {', '.join(get_args(Scheme))}")
    if tolerate is not None and not 0 <= tolerate < WIDTH_MAX:
        raise ValueError(f"tolerate {tolerate}; it must be 0 to {WIDTH_MAX - 1}")
    if chunk_bytes < 1 or chunk_bytes % ALIGNMENT:
        raise ValueError(f"chunk_bytes {chunk_bytes}; it must be a positive multiple of {ALIGNMENT}")
    one: dict[tuple[int, ...], tuple[int, ...]] = {}  # lanes of cells with overlapping holders share their members
    lanes = [
        Lane(number, begin, nbytes, one.setdefault(members, members), *_choose(len(members), nbytes, scheme, tolerate))
        for number, cell in enumerate(division.cells)
        for begin, nbytes, members in _cut(cell, domains)
    ]
    return Placement(division, tuple(lanes), tuple(domains), scheme, tolerate, chunk_bytes)


def _cut(cell: Cell, domains: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Begin, size and members of each lane. Domains stand in the order of their first holders, whatever their names."""
    if len({domains[rank] for rank in cell.holders}) == len(cell.holders):  # the usual case, and the loops below cost
        yield 0, cell.nbytes, cell.holders
        return
    ranks_of: dict[int, list[int]] = {}
    for rank in cell.holders:
        ranks_of.setdefault(domains[rank], []).append(rank)
    count = max(len(ranks) for ranks in ranks_of.values())
    units = -(-cell.nbytes // ALIGNMENT)
    for lane in range(count):
        begin = units * lane // count * ALIGNMENT
        end = min(units * (lane + 1) // count * ALIGNMENT, cell.nbytes)
        if begin < end:
            yield begin, end - begin, tuple(ranks[lane % len(ranks)] for ranks in ranks_of.values())


def _choose(D: int, nbytes: int, scheme: Scheme, tolerate: int | None) -> tuple[ErasureCode, int]:
    """The code of a lane of `nbytes` among D members, and the size of its packets."""
    width = min(D, WIDTH_MAX)
    f = 0 if scheme == "none" else min(_asked(D, tolerate), width - 1)
    if f and scheme != "arc":
        code = code_for(width - f, f)
        packet_bytes = _packet_bytes(D, code, nbytes)
        padding = D * code.k * code.w * packet_bytes - nbytes
        if scheme == "aec" or padding * PADDING_MAX <= nbytes:
            return code, packet_bytes
    code = code_for(1, f)
    return code, _packet_bytes(D, code, nbytes)


def _asked(D: int, tolerate: int | None) -> int:
    """How many lost domains a cell in D domains is to survive, possible or not."""
    if tolerate is not None:
        return tolerate
    return 0 if D == 1 else 1 if D < 6 else 2


def _packet_bytes(D: int, code: ErasureCode, nbytes: int) -> int:
    return align(-(-nbytes // (D * code.k * code.w)), PACKET_ALIGNMENT)


def ranges(lane: Lane, stripe: int, shard: int) -> PaddedRange:
    """The bytes of the cell in a data shard, and the zeros after them."""
    begin, end = lane.data_range(stripe, shard)
    last = lane.begin + lane.nbytes
    return PaddedRange(min(begin, last), min(end, last), end - begin - (min(end, last) - min(begin, last)))


def capsule_holders(node: int, domains_of_nodes: Sequence[int], f: int) -> tuple[int, ...]:
    """The nodes that hold a node's capsules besides itself, in distinct other domains; fewer than f if there are fewer.

    Every node holds the capsules of exactly f others, if no domain has more than 1/(f + 1) of the nodes.

    Args:
        node: index of the node.
        domains_of_nodes: failure domain of each node.
        f: how many holders to find.
    """
    nodes_of: dict[int, list[int]] = {}
    for index, domain in enumerate(domains_of_nodes):
        nodes_of.setdefault(domain, []).append(index)
    ring = [index for nodes in nodes_of.values() for index in nodes]
    at = ring.index(node)
    # Steps as long as the largest domain leave each domain for the next, and are the same for all, so the load is even.
    step = max(len(nodes) for nodes in nodes_of.values())
    candidates = [ring[(at + i * step) % len(ring)] for i in range(1, f + 1)] + ring[at + 1 :] + ring[:at]
    holders: dict[int, int] = {domains_of_nodes[node]: node}
    for candidate in candidates:
        if len(holders) <= f:
            holders.setdefault(domains_of_nodes[candidate], candidate)
    return tuple(holders.values())[1:]


def capsules_among(placement: Placement, nodes: Sequence[Collection[int]], node: int) -> tuple[Lane | None, list[int]]:
    """The narrowest lane that a node shares with others, and the nodes that share it; None and nobody if there is none.

    A capsule that lies on as many of them as the lane survives is lost only with more of them than that: then the lane is
    lost too. So whatever all lanes survive, capsules survive, also where nodes of several sharding groups are lost.

    Args:
        nodes: the ranks of each node.
        node: index of the node.
    """
    own = nodes[node]
    shared = (lane for lane in placement.lanes if lane.code.f and not lane.is_without(own))
    lane = min(shared, key=lambda lane: lane.D, default=None)
    among = [] if lane is None else [i for i, ranks in enumerate(nodes) if not lane.is_without(ranks)]
    return lane, among


def holders_among(
    placement: Placement, nodes: Sequence[Collection[int]], domains_of_nodes: Sequence[int], node: int
) -> tuple[int, ...]:
    """The nodes that hold a node's capsules besides itself: as many as the most tolerant lane of the job survives losses.

    First those that share its narrowest lane, then those that follow in the ring of all; in distinct other domains.

    Args:
        nodes: the ranks of each node.
        domains_of_nodes: failure domain of each node.
        node: index of the node.
    """
    f = max((lane.code.f for lane in placement.lanes), default=0)
    lane, among = capsules_among(placement, nodes, node)
    near: tuple[int, ...] = ()
    if lane is not None:
        domains = [domains_of_nodes[i] for i in among]
        near = tuple(among[i] for i in capsule_holders(among.index(node), domains, lane.code.f))
    found = {domains_of_nodes[i]: i for i in (node, *near)}
    for i in capsule_holders(node, domains_of_nodes, len(set(domains_of_nodes)) - 1):
        if len(found) <= f:
            found.setdefault(domains_of_nodes[i], i)
    return tuple(found.values())[1:]


def exposed(placement: Placement) -> tuple[Exposure, ...]:
    """What fewer lost domains than asked for destroy, one entry for each reason and degree; empty if nothing."""
    ranks: dict[tuple[Reason, int, int], set[int]] = {}
    nbytes: dict[tuple[Reason, int, int], int] = {}
    for lane in placement.lanes:
        key = _weakness(lane, placement)
        if key is not None:
            ranks.setdefault(key, set()).update(lane.members)
            nbytes[key] = nbytes.get(key, 0) + lane.nbytes
    found = [
        Exposure(_sentence(*key, nbytes[key]), tuple(sorted(ranks[key])), nbytes[key], key[0]) for key in sorted(ranks)
    ]
    kept = {digest: nbytes for digest, nbytes in placement.division.unreplicated_bytes.items() if nbytes}
    owners = tuple(rank for rank, digest in enumerate(placement.division.layout_of) if digest in kept)
    if owners:
        total = sum(kept[placement.division.layout_of[rank]] for rank in owners)
        found.append(Exposure(_sentence("kept", 0, 0, total), owners, total, "kept"))
    return tuple(found)


def _weakness(lane: Lane, placement: Placement) -> tuple[Reason, int, int] | None:
    """Why a lane survives less than it should, how many lost domains it survives, and how many were asked for."""
    f, asked = lane.code.f, _asked(lane.D, placement.tolerate)
    if placement.scheme == "none" or placement.tolerate == 0:
        return "settings", 0, 0
    if lane.D == 1:
        return "one domain", 0, asked
    return ("few domains", f, asked) if f < asked else None


def _sentence(reason: Reason, f: int, asked: int, nbytes: int) -> str:
    if reason == "settings":
        return f"{size(nbytes)} are stored once, as the settings say: the loss of any domain loses them."
    if reason == "one domain":
        return f"{size(nbytes)} have all their holders in one failure domain and are lost with it."
    if reason == "few domains":
        return (
            f"{size(nbytes)} survive {counted(f, 'lost domain')} and not {asked}: their holders lie in {f + 1} domains."
        )
    return f"{size(nbytes)} have one holder each (unreplicated shards, or what differs by rank): lost with their node."
