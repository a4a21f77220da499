"""Jobs of one shape that are loaded into another shape, in threads of one process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reft.client.restore.decode import StripeDecoder
from reft.client.restore.executor import LoadReport, TransferExecutor
from reft.client.restore.opened import OldRank, RestoreMatch
from reft.client.restore.restore import inline_leaves, slot_bytes
from reft.client.restore.slot_reader import SlotReader
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.verify import PeerMessages, chunk_verifier
from reft.core.layout.cells import INLINE_BYTES_MAX
from reft.core.layout.layout import pack
from reft.core.recovery.gather import group_lanes, undecodable
from reft.core.recovery.plan import SlotReaders, TransferPlan, TransferSizes, is_made
from reft.core.recovery.shard_matching import ShardMatch, UnforeseenLeaves, match, pieces_of, wanted_leaves
from reft.core.recovery.stripes import parity_number
from tests.support.shapes import Shape, placement_for
from tests.support.shards import Postbox, Tensors, make_parity, make_slot, on_all, plain_bytes

CHUNK = 4096
SMALL = TransferSizes(piece=8 << 10, band=32 << 10, window=32 << 10, ahead=16 << 10)


class Move:
    """The state of a job of one shape, to restore into another shape."""

    def __init__(self, whole: Tensors, old: Shape, new: Shape, domains: Sequence[int], scheme: str = "auto",
                 tolerate: int | None = 1, own: Sequence[str] = (), slots: int = 0,
                 inline_bytes_max: int = INLINE_BYTES_MAX) -> None:  # fmt: skip
        self.whole, self.old, self.new, self.domains = whole, old, new, domains
        self.before, tensors = old.states(whole)
        self.placement = placement_for(self.before, domains, scheme, tolerate, CHUNK, own, slots, inline_bytes_max)
        self.slots = [make_slot(self.placement, rank, tensors[rank]) for rank in range(old.world)]
        guarded = [rank for lane in self.placement.guard_lanes for rank in lane.members]
        self.parity = {rank: make_parity(self.placement, rank, self.slots) for rank in guarded}
        division = self.placement.division
        self.inline_leaves = [
            {
                name: plain_bytes(tensors[rank][name]).tobytes()
                for name in division.inline_leaves[division.layout_of[rank]]
            }
            for rank in range(old.world)
        ]
        self.tensors = tensors

    def match(self, mismatched: Collection[str] = ()) -> ShardMatch:
        tables = [{leaf.name: leaf for leaf in leaves} for leaves in self.before]
        owns = {rank: UnforeseenLeaves() for rank in range(self.old.world)}
        pieces, problems = pieces_of(self.placement, lambda rank: tables[rank], owns)
        assert not problems
        after, _ = self.new.states(self.whole)
        return match(pieces, wanted_leaves(after, pieces), mismatched)

    def can_lose(self, ranks: Collection[int]) -> bool:
        """Returns whether the state is complete without these ranks' slots."""
        have = np.ones(self.old.world, np.bool_)
        have[list(ranks)] = False
        sections = self.sections(ranks)
        lost = Counter(place[0] for rank in ranks if (place := self.placement.guard_lane_of(rank)))
        lanes = self.placement.guard_lanes
        is_guarded = all(
            place and lost[place[0]] <= lanes[place[0]].f for place in map(self.placement.guard_lane_of, sections)
        )
        return is_guarded and not undecodable(group_lanes(self.placement.lanes), have)

    def sections(self, lost: Collection[int]) -> list[int]:
        """Returns the lost ranks with unreplicated leaves."""
        return [rank for rank in lost if self.placement.rank_placement(rank).unreplicated.leaves]

    def plan(self, lost: Collection[int] = (), nodes: Mapping[str, Sequence[int]] | None = None,
             sizes: TransferSizes = SMALL) -> TransferPlan:  # fmt: skip
        shard_match = self.match()
        assert not shard_match.problems, shard_match.problems
        have = {rank: f"node{self.domains[rank]}" for rank in range(self.old.world) if rank not in lost}
        sections = self.sections(lost)
        lanes = {place[0] for rank in sections if (place := self.placement.guard_lane_of(rank))}
        for rank in (rank for lane in lanes for rank in self.placement.guard_lanes[lane].members if rank not in lost):
            have[parity_number(self.placement, rank)] = f"node{self.domains[rank]}"
        where = nodes or {f"node{rank}": [rank] for rank in range(self.new.world)}
        readers = SlotReaders.of(have, where, self.old.world)
        made = [old for old in lost if is_made(self.placement, old)]
        return TransferPlan(shard_match.needs, self.placement, readers, made, sizes=sizes, sections=sections)

    def load(self, lost: Collection[int] = (), nodes: Mapping[str, Sequence[int]] | None = None, sizes: TransferSizes = SMALL,
             box: Postbox | None = None, decoder: StripeDecoder | None = None) -> list[Any]:  # fmt: skip
        """Loads on all new ranks, each in a thread; returns each rank's report or error."""
        plan, box = self.plan(lost, nodes, sizes), box or Postbox()
        self.live: list[Tensors] = [{}] * self.new.world

        def one(rank: int) -> LoadReport:
            leaves, tensors = self.new.state(self.whole, rank)
            self.live[rank] = {name: blank(tensor) for name, tensor in tensors.items()}
            layout = pack(leaves)
            offsets = {leaf.name: at for leaf, at in zip(layout.leaves, layout.offsets, strict=True)}
            live = FlatTensorView(layout.leaves, layout.offsets, self.live[rank])
            parity = {parity_number(self.placement, old): slot for old, slot in self.parity.items()}
            slots = {
                number: SlotReader(slot, slot_bytes(self.placement, number), lambda _: None)
                for number, slot in {**dict(enumerate(self.slots)), **parity}.items()
                if number in plan.slots_read and number in plan.readers.reader_of and plan.readers.is_near(number, rank)
            }
            kept = [old for old, keeper in plan.readers.keeper_of.items() if keeper == rank]
            capsules = {old: OldRank({"riders": self.inline_leaves[old]}, ()) for old in kept}
            inline = inline_leaves(RestoreMatch(capsules, (), (plan,), layout, {}, {}))
            digests = {old: self.slots[old].digests[: self.slots[old].chunks].tobytes() for old in kept}
            verifiers = {
                old: chunk_verifier(self.placement, old, digests[old], old in plan.made, old in plan.sections)
                for old in kept
                if old in plan.made or old in plan.sections
            }
            peers = PeerMessages(box.of(rank), rank, self.old.world)
            made = decoder or StripeDecoder()
            executor = TransferExecutor(sizes, CHUNK, peers, slots, live, offsets, made, inline, verifiers)
            return executor.load(plan.operations(rank))

        return on_all(self.new.world, one)

    def is_whole(self) -> bool:
        _, expected = self.new.states(self.whole)
        return all(
            set(live) == set(tensors)
            and all(np.array_equal(plain_bytes(live[n]), plain_bytes(tensors[n])) for n in tensors)
            for live, tensors in zip(self.live, expected, strict=True)
        )


def blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).fill_(1)


def rows(world: int) -> Shape:
    """Returns the shape in which every tensor is cut by rows."""
    return Shape((world,), dict.fromkeys(ROWS, (0,)), {}, {})


def replicated(world: int) -> Shape:
    return Shape((world,), dict.fromkeys(ROWS, (None,)), {}, {})


ROWS = {
    "w": torch.arange(301 * 33, dtype=torch.float32).reshape(301, 33).add(0.5),
    "v": torch.arange(20_011).to(torch.bfloat16),
    "b": torch.arange(17, dtype=torch.float64),
}


def drawn_move(
    rng: random.Random, whole: Tensors, old: Shape, new: Shape, per_node: int
) -> tuple[Move, dict[str, list[int]], list[int]]:
    """Returns a move, the ranks of each new node, and the ranks of one old node to lose."""
    domains = [rank // per_node for rank in range(old.world)]
    scheme, tolerate = rng.choice(("auto", "aec", "arc", "aor", "none")), rng.choice((None, 1, 2))
    # Without inline leaves, small unreplicated leaves are in sections, too.
    inline_bytes_max = rng.choice((0, INLINE_BYTES_MAX))
    move = Move(whole, old, new, domains, scheme, tolerate, slots=4, inline_bytes_max=inline_bytes_max)
    nodes: dict[str, list[int]] = {}
    for rank in range(new.world):
        nodes.setdefault(f"node{rng.randrange(new.world + 1)}", []).append(rank)
    gone = rng.choice(domains)
    return move, nodes, [rank for rank in range(old.world) if domains[rank] == gone]
