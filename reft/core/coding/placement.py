"""Placement: the data shards that each rank writes, and the parity shards that it computes.

    cell     | lane 0: first holder of each domain | lane 1: second holder … | …   64-byte aligned
    lane     | stripe 0 | stripe 1 | … | stripe D-1 | padding: zeros     one member in each domain
    stripe   | data shard 0 | … | data shard k-1 | and parity shards k … k+f-1
    shard    | w packets of packet_bytes |
    A lane has D members and D stripes. Member (c + t) mod D stores shard c of stripe t. So each
    member stores one shard of k + f of the D stripes:

        member       0    1    2    3         D = 4, k = 2, f = 2
        stripe 0     0    1   P0   P1
        stripe 1    P1    0    1   P0
        stripe 2    P0   P1    0    1
        stripe 3     1   P0   P1    0

    a rank's slot data    | data shards | parity shards | unreplicated leaves |
                          each section begins at a multiple of chunk_bytes

Unreplicated leaves are in no lane. Daemons exchange parity or copies of them after the step, in
lanes of their own (core/coding/exchange.py).

Invariants
  1. Every byte of a cell lies in exactly one data shard of one lane.
  2. Two shards of a stripe never lie in the same domain. So the loss of any f domains leaves at
     least k shards of each stripe.
  3. All members of a lane store the same number of bytes: (k + f) / (D k) of the padded lane. No
     code stores less.
  4. The same division and domains give the same placement on every rank. The numbers that name the
     domains do not matter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from reft.core.budget import SLOTS_EXCHANGE, format_bytes
from reft.core.coding.erasure import ErasureCode, code_for
from reft.core.coding.exchange import GuardLane, guard_lanes, requested_losses
from reft.core.layout.cells import HOLDERS_MAX, Cell, Division
from reft.core.layout.layout import ALIGNMENT, Layout, align
from reft.core.text import counted

WIDTH_MAX = 64  # shards of a stripe; limits the number of members from which a lost shard is decoded
PACKET_ALIGNMENT = 8  # bytes: packets are XORed as 64-bit words
PADDING_MAX = 16  # "auto" codes a lane only if the padding is at most 1/16 of the lane

Scheme = Literal["auto", "aec", "arc", "aor", "none"]
Reason = Literal["settings", "one domain", "few domains", "exchange", "slots", "kept"]


class PaddedRange(NamedTuple):
    """Bytes begin..end of a cell, followed by `zeros` bytes of zero padding."""

    begin: int
    end: int
    zeros: int


@dataclass(frozen=True)
class Lane:
    """A contiguous part of a cell, coded by itself among one rank of each domain.

    Attributes:
        cell: index of the cell in the division.
        begin: begin of the lane in the cell, in bytes.
        nbytes: size of the lane in bytes, without padding, at least 1.
        members: one holder in each domain.
        code: the code of each stripe.
        packet_bytes: size of a packet in bytes, a multiple of 8.
    """

    cell: int
    begin: int
    nbytes: int
    members: tuple[int, ...]
    code: ErasureCode
    packet_bytes: int

    @property
    def D(self) -> int:
        """The number of members, which is also the number of stripes."""
        return len(self.members)

    def is_without(self, ranks: Collection[int]) -> bool:
        """Whether none of these ranks is a member."""
        return all(member not in ranks for member in self.members)

    @property
    def shard_bytes(self) -> int:
        return self.code.w * self.packet_bytes

    def member_of(self, stripe: int, shard: int) -> int:
        """Returns the member that stores the shard, as an index into `members`.

        Shards from k on are parity.
        """
        return (shard + stripe) % self.D

    def shards_of(self, member: int) -> list[tuple[int, int]]:
        """Returns the (stripe, shard) that a member stores, sorted by stripe."""
        return sorted(((member - shard) % self.D, shard) for shard in range(self.code.k + self.code.f))

    def stripe_runs(self, member: int, is_parity: bool) -> list[range]:
        """Returns the stripes of which a member stores a data (or parity) shard.

        They are at most two runs. From one stripe of a run to the next, the number of the shard
        falls by one.
        """
        begin, end = (self.code.k, self.code.k + self.code.f) if is_parity else (0, self.code.k)
        runs = (
            range(max(0, member - end + 1), member - begin + 1),
            range(max(member + 1, self.D + member - end + 1), min(self.D, self.D + member - begin + 1)),
        )
        return [run for run in runs if run]

    def data_range(self, stripe: int, shard: int) -> tuple[int, int]:
        """Returns begin and end of a data shard in the cell.

        They are not clipped to the lane's end.
        """
        begin = self.begin + (stripe * self.code.k + shard) * self.shard_bytes
        return begin, begin + self.shard_bytes


@dataclass(frozen=True)
class ShardBlock:
    """One shard in a rank's slot.

    Attributes:
        lane: index of the lane in the placement.
        stripe: the stripe of the lane.
        shard: the shard of the stripe; from k on parity.
        offset: begin of the shard in the slot's data, in bytes.
        nbytes: size of the shard in bytes.
    """

    lane: int
    stripe: int
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RankPlacement:
    """The content of one rank's slot data. All offsets and sizes are in bytes.

    Attributes:
        blocks: data shards without gaps, in the order of the cells' bytes; then parity shards
            without gaps, from `parity_offset` on.
        data_blocks: number of blocks that are data shards.
        parity_offset: begin of the parity section, a multiple of chunk_bytes.
        unreplicated: the unreplicated leaves; their offsets count from `unreplicated_offset`.
        unreplicated_offset: begin of the unreplicated section, a multiple of chunk_bytes.
        data_bytes: size of the slot's data: the end of the unreplicated section.
        unplanned_offset: begin of leaves that the placement does not foresee. If the unreplicated
            leaves are exchanged, it is a multiple of chunk_bytes: a decoded chunk is compared with
            its digest, and unforeseen leaves can't be decoded.
    """

    blocks: tuple[ShardBlock, ...]
    data_blocks: int
    parity_offset: int
    unreplicated: Layout
    unreplicated_offset: int
    data_bytes: int
    unplanned_offset: int


@dataclass(frozen=True)
class Placement:
    """The placement of every byte of every cell.

    Attributes:
        division: the cells, inline leaves and unreplicated leaves.
        lanes: sorted by cell, then by begin.
        domains: failure domain of each rank.
        scheme: as set by the user.
        tolerate: lost domains to survive, as set by the user; None: chosen by the number of
            domains.
        chunk_bytes: alignment of the sections.
        slots: number of slots of each rank; 0: unknown.
    """

    division: Division
    lanes: tuple[Lane, ...]
    domains: tuple[int, ...]
    scheme: Scheme
    tolerate: int | None
    chunk_bytes: int
    slots: int = 0

    @cached_property
    def guard_lanes(self) -> tuple[GuardLane, ...]:
        """The lanes in which daemons exchange parity, or copies, of unreplicated leaves.

        There are none with fewer than SLOTS_EXCHANGE slots, or without `needs_exchange`.
        """
        return self._possible_guard_lanes if self.slots >= SLOTS_EXCHANGE else ()

    @property
    def all_lanes(self) -> tuple[Lane | GuardLane, ...]:
        """The lanes of the cells and those of the exchange."""
        return *self.lanes, *self.guard_lanes

    @property
    def needs_exchange(self) -> bool:
        """Whether there are guard lanes if ranks have enough slots.

        That is: the settings ask for protection, and ranks of several domains have unreplicated
        leaves.
        """
        return bool(self._possible_guard_lanes)

    @cached_property
    def _possible_guard_lanes(self) -> tuple[GuardLane, ...]:
        if self.scheme == "none" or self.tolerate == 0:
            return ()
        sizes = {digest: self.division.section_bytes[digest] for digest in dict.fromkeys(self.division.layout_of)}
        section_bytes = [sizes[digest] for digest in self.division.layout_of]
        return guard_lanes(section_bytes, self.domains, self.chunk_bytes, self.tolerate, self.scheme == "aor")

    def guard_lane_of(self, rank: int) -> tuple[int, int] | None:
        """Returns the guard lane of a rank, and the rank's place in this lane.

        None if the rank has no guard lane.
        Both are indices: of `guard_lanes`, and of the lane's `members`.
        """
        return self._guard_lane_of.get(rank)

    @cached_property
    def _guard_lane_of(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (number, member)
            for number, lane in enumerate(self.guard_lanes)
            for member, rank in enumerate(lane.members)
        }

    def parity_buffers_bytes(self, ranks: Collection[int]) -> int:
        """Returns the bytes of parity that the node of these ranks keeps for other nodes."""
        places = [place for rank in ranks if (place := self.guard_lane_of(rank))]
        return sum(self.guard_lanes[number].buffers_bytes for number, _ in places)

    def lanes_of(self, cell: int) -> range:
        """Returns the indices of the lanes of a cell."""
        begin = bisect_left(self.lanes, cell, key=lambda lane: lane.cell)
        return range(begin, bisect_right(self.lanes, cell, lo=begin, key=lambda lane: lane.cell))

    def rank_placement(self, rank: int) -> RankPlacement:
        """Returns the content of one rank's slot data.

        Computed on demand: a plan for thousands of ranks must not compute all of them.
        """
        digest, chunk_bytes = self.division.layout_of[rank], self.chunk_bytes
        sections: tuple[list[ShardBlock], list[ShardBlock]] = ([], [])
        for number, begins in self.lane_offsets(rank).items():
            lane, ends = self.lanes[number], list(begins)
            for stripe, shard in lane.shards_of(lane.members.index(rank)):
                is_parity = shard >= lane.code.k
                sections[is_parity].append(ShardBlock(number, stripe, shard, ends[is_parity], lane.shard_bytes))
                ends[is_parity] += lane.shard_bytes
        data, parity = sections
        parity_offset = align(data[-1].offset + data[-1].nbytes, chunk_bytes) if data else 0
        end = parity[-1].offset + parity[-1].nbytes if parity else parity_offset
        unreplicated, unreplicated_offset = self.division.unreplicated[digest], align(end, chunk_bytes)
        data_bytes = unreplicated_offset + unreplicated.data_bytes
        return RankPlacement(
            (*data, *parity),
            len(data),
            parity_offset,
            unreplicated,
            unreplicated_offset,
            data_bytes,
            align(data_bytes, chunk_bytes if self.guard_lane_of(rank) else ALIGNMENT),
        )

    def lane_offsets(self, rank: int) -> dict[int, tuple[int, int]]:
        """Returns lane → begin of a rank's data shards, and of its parity shards.

        Offsets count bytes in the data of the rank's slot. The shards of a lane lie there without
        gaps, in the order of their stripes.
        """
        cells = self.division.cells_of[self.division.layout_of[rank]]
        numbers = [number for cell in cells for number in self.lanes_of(cell) if rank in self.lanes[number].members]
        lanes = [self.lanes[number] for number in numbers]
        data = list(accumulate((lane.code.k * lane.shard_bytes for lane in lanes), initial=0))
        parity_offset = align(data[-1], self.chunk_bytes)
        parity = accumulate((lane.code.f * lane.shard_bytes for lane in lanes), initial=parity_offset)
        return dict(zip(numbers, zip(data, parity, strict=False), strict=False))


@dataclass(frozen=True)
class Exposure:
    """State that does not survive as many lost domains as requested.

    Attributes:
        what: a sentence for the user.
        ranks: the ranks that hold this state, ascending.
        nbytes: size of the state in bytes; replicas of a cell count once.
        reason: the same as `what`, for programs.
    """

    what: str
    ranks: tuple[int, ...]
    nbytes: int
    reason: Reason


@dataclass(frozen=True)
class ExchangeCost:
    """What the exchange protects, and what it takes.

    Attributes:
        nbytes: bytes that are exchanged, of all ranks together.
        nodes: number of nodes that exchange.
        turn_bytes: the most that one node sends in a turn.
        parity_bytes: the most that one node keeps of other nodes, in both buffers.
    """

    nbytes: int
    nodes: int
    turn_bytes: int
    parity_bytes: int


def exchange_cost(placement: Placement, nodes: Sequence[Collection[int]]) -> ExchangeCost | None:
    """Returns the cost of the exchange; None if nothing is exchanged.

    Args:
        placement: the placement of the job.
        nodes: the ranks of each node.
    """
    sent = []
    for ranks in nodes:
        places = [place for rank in ranks if (place := placement.guard_lane_of(rank))]
        sent.append(sum(placement.guard_lanes[number].sent_bytes(member) for number, member in places))
    if not any(sent):
        return None
    nbytes = sum(size for lane in placement.guard_lanes for size in lane.sizes)
    parity_bytes = max(placement.parity_buffers_bytes(ranks) for ranks in nodes)
    return ExchangeCost(nbytes, sum(map(bool, sent)), max(sent), parity_bytes)


def place(
    division: Division, domains: Sequence[int], scheme: Scheme, tolerate: int | None, chunk_bytes: int, slots: int = 0
) -> Placement:
    """Decides which shards of the cells each rank stores.

    Args:
        division: the cells and their holders.
        domains: failure domain of each rank.
        scheme: "aec" stores coded shards, "arc" stores copies, "auto" chooses for each lane, "none"
            stores every byte once. "aor" chooses as "auto" does, and keeps copies, not parity, of
            unreplicated leaves.
        tolerate: lost domains to survive. A cell in D domains survives at most D - 1. None: 1 for
            two domains or more, 2 for six or more.
        chunk_bytes: alignment of the sections of a slot, a multiple of 64.
        slots: number of slots of each rank. With fewer than four nothing is exchanged.

    Raises:
        ValueError: an argument is out of range, `domains` does not have one entry for each rank, or
            the lanes have more than HOLDERS_MAX members.
    """
    if len(domains) != len(division.layout_of):
        raise ValueError(f"{len(domains)} domains for {len(division.layout_of)} ranks; give each rank's domain")
    if scheme not in get_args(Scheme):
        raise ValueError(f"scheme {scheme!r}; it must be one of {', '.join(get_args(Scheme))}")
    if tolerate is not None and not 0 <= tolerate < WIDTH_MAX:
        raise ValueError(f"tolerate {tolerate}; it must be 0 to {WIDTH_MAX - 1}")
    if chunk_bytes < 1 or chunk_bytes % ALIGNMENT:
        raise ValueError(f"chunk_bytes {chunk_bytes}; it must be a positive multiple of {ALIGNMENT}")
    if (members := sum(_lane_members(cell, domains) for cell in division.cells)) > HOLDERS_MAX:
        raise ValueError(f"{members} members of lanes; the limit is {HOLDERS_MAX}")
    interned: dict[tuple[int, ...], tuple[int, ...]] = {}  # lanes with equal members share one tuple, to save memory
    lanes = [
        Lane(
            number,
            begin,
            nbytes,
            interned.setdefault(members, members),
            *_choose_code(len(members), nbytes, scheme, tolerate),
        )
        for number, cell in enumerate(division.cells)
        for begin, nbytes, members in _cut_into_lanes(cell, domains)
    ]
    return Placement(division, tuple(lanes), tuple(domains), scheme, tolerate, chunk_bytes, slots)


def _lane_members(cell: Cell, domains: Sequence[int]) -> int:
    """Returns how many members all lanes of a cell have together."""
    counts = Counter(domains[rank] for rank in cell.holders)
    return len(counts) * max(counts.values())


def _cut_into_lanes(cell: Cell, domains: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yields begin, size and members of each lane of a cell.

    Members are ordered by the first holder of their domain, not by the number of the domain.
    """
    # A shortcut for the usual case: one holder in each domain.
    if len({domains[rank] for rank in cell.holders}) == len(cell.holders):
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


def _choose_code(D: int, nbytes: int, scheme: Scheme, tolerate: int | None) -> tuple[ErasureCode, int]:
    """Returns the code of a lane of `nbytes` with D members.

    The second value is the bytes of a packet.
    """
    width = min(D, WIDTH_MAX)
    f = 0 if scheme == "none" else min(requested_losses(D, tolerate), width - 1)
    if f and scheme != "arc":
        code = code_for(width - f, f)
        packet_bytes = _packet_bytes(D, code, nbytes)
        padding = D * code.k * code.w * packet_bytes - nbytes
        if scheme == "aec" or padding * PADDING_MAX <= nbytes:
            return code, packet_bytes
    code = code_for(1, f)
    return code, _packet_bytes(D, code, nbytes)


def _packet_bytes(D: int, code: ErasureCode, nbytes: int) -> int:
    return align(-(-nbytes // (D * code.k * code.w)), PACKET_ALIGNMENT)


def ranges(lane: Lane, stripe: int, shard: int) -> PaddedRange:
    """Returns the bytes of the cell that a data shard contains, and its padding."""
    begin, end = lane.data_range(stripe, shard)
    last = lane.begin + lane.nbytes
    return PaddedRange(min(begin, last), min(end, last), end - begin - (min(end, last) - min(begin, last)))


def capsule_holders(node: int, domains_of_nodes: Sequence[int], f: int) -> tuple[int, ...]:
    """Returns f other nodes, in distinct other domains, that hold a node's capsules.

    The result has fewer nodes if there are fewer other domains. If no domain has more than 1/(f +
    1) of the nodes, then every node holds the capsules of exactly f other nodes.

    Args:
        node: index of the node.
        domains_of_nodes: failure domain of each node.
        f: number of holders to find.
    """
    nodes_of: dict[int, list[int]] = {}
    for index, domain in enumerate(domains_of_nodes):
        nodes_of.setdefault(domain, []).append(index)
    ring = [index for nodes in nodes_of.values() for index in nodes]
    position = ring.index(node)
    # A stride of the size of the largest domain always leaves a domain. All nodes use the same
    # stride, so the load is even.
    stride = max(len(nodes) for nodes in nodes_of.values())
    strided = [ring[(position + i * stride) % len(ring)] for i in range(1, f + 1)]
    candidates = strided + ring[position + 1 :] + ring[:position]
    holders: dict[int, int] = {domains_of_nodes[node]: node}
    for candidate in candidates:
        if len(holders) <= f:
            holders.setdefault(domains_of_nodes[candidate], candidate)
    return tuple(holders.values())[1:]


def capsules_among(
    placement: Placement, nodes: Sequence[Collection[int]], node: int
) -> tuple[Lane | GuardLane | None, list[int]]:
    """Returns a node's narrowest lane with parity, and the nodes of this lane.

    (None, []) if the node has no lane with parity.

    Suppose the lane survives f lost nodes, and f other nodes of the lane hold the capsule. If the
    capsule is lost, then more than f nodes of the lane are lost, so the lane is lost, too. So
    capsules survive everything that all lanes survive, also if nodes of several sharding groups are
    lost. Lanes of the exchange count like any other.

    Args:
        placement: the placement of the job.
        nodes: the ranks of each node.
        node: index of the node.
    """
    own_ranks = nodes[node]
    lanes_of_node = (lane for lane in placement.all_lanes if lane.code.f and not lane.is_without(own_ranks))
    lane = min(lanes_of_node, key=lambda lane: lane.D, default=None)
    if lane is None:
        return None, []
    members = frozenset(lane.members)
    return lane, [i for i, ranks in enumerate(nodes) if not members.isdisjoint(ranks)]


def holders_among(
    placement: Placement, nodes: Sequence[Collection[int]], domains_of_nodes: Sequence[int], node: int
) -> tuple[int, ...]:
    """Returns the other nodes that hold a node's capsules, in distinct other domains.

    Their number is the number of losses that the most tolerant lane of the job survives. Without
    any lane it is what was requested, if capsules hold all state. Nodes of the node's narrowest
    lane come first, then the next nodes in the ring of all nodes.

    Nodes that copy the sections of this node's ranks come before all others, and each of them is a
    holder: it compares what it keeps with the digests in the capsules. So there may be more.

    Args:
        placement: the placement of the job.
        nodes: the ranks of each node.
        domains_of_nodes: failure domain of each node.
        node: index of the node.
    """
    f = _losses_of_capsules(placement, domains_of_nodes)
    copiers = _copiers(placement, nodes, node)
    lane, nodes_of_lane = capsules_among(placement, nodes, node)
    lane_holders: tuple[int, ...] = ()
    if lane is not None and not copiers:
        domains = [domains_of_nodes[i] for i in nodes_of_lane]
        indices = capsule_holders(nodes_of_lane.index(node), domains, lane.code.f)
        lane_holders = tuple(nodes_of_lane[i] for i in indices)
    holder_in_domain = {domains_of_nodes[i]: i for i in (node, *lane_holders, *copiers)}
    for i in capsule_holders(node, domains_of_nodes, len(set(domains_of_nodes)) - 1):
        if len(holder_in_domain) <= f:
            holder_in_domain.setdefault(domains_of_nodes[i], i)
    others = [i for i in holder_in_domain.values() if i not in (node, *copiers)]
    return *copiers, *others


def _losses_of_capsules(placement: Placement, domains_of_nodes: Sequence[int]) -> int:
    """Returns how many lost domains the capsules survive.

    A small job whose ranks share no leaf has inline leaves only, and no lane.
    """
    if placement.all_lanes:
        return max(lane.code.f for lane in placement.all_lanes)
    if placement.scheme == "none" or any(placement.division.unreplicated_bytes.values()):
        return 0
    domains = len(set(domains_of_nodes))
    return min(requested_losses(domains, placement.tolerate), domains - 1)


def _copiers(placement: Placement, nodes: Sequence[Collection[int]], node: int) -> tuple[int, ...]:
    """Returns the nodes that copy the sections of a node's ranks."""
    node_of = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    places = [place for rank in nodes[node] if (place := placement.guard_lane_of(rank))]
    lanes = [(placement.guard_lanes[number], member) for number, member in places]
    copying = (lane.members[holder] for lane, member in lanes if lane.is_copies for holder in lane.holders_of(member))
    return tuple(dict.fromkeys(node_of[rank] for rank in copying))


def exposures(placement: Placement) -> tuple[Exposure, ...]:
    """Returns the state that does not survive as many lost domains as requested.

    One entry for each combination of reason, survived losses and requested losses. Empty if all
    state is protected.
    """
    ranks: dict[tuple[Reason, int, int], set[int]] = {}
    nbytes: dict[tuple[Reason, int, int], int] = {}
    for lane in placement.lanes:
        key = _weakness(lane, placement)
        if key is not None:
            ranks.setdefault(key, set()).update(lane.members)
            nbytes[key] = nbytes.get(key, 0) + lane.nbytes
    entries = [
        Exposure(_sentence(*key, nbytes[key]), tuple(sorted(ranks[key])), nbytes[key], key[0]) for key in sorted(ranks)
    ]
    return (*entries, *_exposures_of_unreplicated(placement))


def _exposures_of_unreplicated(placement: Placement) -> Iterator[Exposure]:
    """Yields the unreplicated leaves that do not survive as many lost domains as requested."""
    unreplicated = {digest: nbytes for digest, nbytes in placement.division.unreplicated_bytes.items() if nbytes}
    lacks_slots = placement.needs_exchange and 0 < placement.slots < SLOTS_EXCHANGE
    ranks: dict[tuple[Reason, int, int], list[int]] = {}
    for rank, digest in enumerate(placement.division.layout_of):
        if digest not in unreplicated:
            continue
        where = placement.guard_lane_of(rank)
        if where is None:
            ranks.setdefault(("slots" if lacks_slots else "kept", 0, 0), []).append(rank)
            continue
        lane = placement.guard_lanes[where[0]]
        if (requested := requested_losses(lane.D, placement.tolerate)) > lane.f:
            ranks.setdefault(("exchange", lane.f, requested), []).append(rank)
    for (reason, f, requested), owners in sorted(ranks.items()):
        total = sum(unreplicated[placement.division.layout_of[rank]] for rank in owners)
        yield Exposure(_sentence(reason, f, requested, total), tuple(owners), total, reason)


def _weakness(lane: Lane, placement: Placement) -> tuple[Reason, int, int] | None:
    """Returns (reason, survived losses, requested losses) of a lane; None if protected."""
    f, requested = lane.code.f, requested_losses(lane.D, placement.tolerate)
    if placement.scheme == "none" or placement.tolerate == 0:
        return "settings", 0, 0
    if lane.D == 1:
        return "one domain", 0, requested
    return ("few domains", f, requested) if f < requested else None


def _sentence(reason: Reason, f: int, requested: int, nbytes: int) -> str:
    if reason == "settings":
        return (
            f"{format_bytes(nbytes)} are stored only once, because of the settings: the loss of any domain loses them."
        )
    if reason == "one domain":
        return f"{format_bytes(nbytes)} have all their holders in one failure domain and are lost with it."
    if reason == "few domains":
        return (
            f"{format_bytes(nbytes)} survive {counted(f, 'lost domain')} and not {requested}: "
            f"their holders lie in {f + 1} domains."
        )
    if reason == "exchange":
        return (
            f"{format_bytes(nbytes)} have only one holder and are exchanged between nodes: they survive "
            f"{counted(f, 'lost domain')} and not {requested}."
        )
    if reason == "slots":
        return (
            f"{format_bytes(nbytes)} have only one holder: lost with its node. Ranks with fewer than {SLOTS_EXCHANGE} slots "
            "exchange nothing."
        )
    return (
        f"{format_bytes(nbytes)} have only one holder (unreplicated shards, or state that differs by rank): "
        "lost with its node."
    )
