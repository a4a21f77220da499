"""Restores into another shape: every new rank gets its pieces, bitwise, after tolerated losses."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from reft.client.restore.executor import PeerMessages
from reft.client.restore.reshard_decode import ChunkVerifier
from reft.client.restore.reshard_executor import ReshardExecutor
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.verified_slot import SlotSource
from reft.core.layout.layout import pack
from reft.core.recovery.gather import group_lanes as lanes_alike
from reft.core.recovery.gather import undecodable
from reft.core.recovery.regather import ReshardPlan, TransferSizes, readers_of
from reft.core.recovery.shard_matching import ShardMatch, UnforeseenLeaves, match, pieces_of, wanted_leaves
from reft.wire.slot_format import chunk_digest
from tests.support.shapes import Shape, placement_for, random_shape, whole_state
from tests.support.shards import Postbox, Tensors, make_slot, on_all, plain_bytes

CHUNK = 4096
SMALL = TransferSizes(piece=8 << 10, band=32 << 10, window=32 << 10)


class Move:
    """The state of a job of one shape, to restore into another shape."""

    def __init__(self, whole: Tensors, old: Shape, new: Shape, domains: Sequence[int], scheme: str = "auto",
                 tolerate: int | None = 1, own: Sequence[str] = ()) -> None:  # fmt: skip
        self.whole, self.old, self.new, self.domains = whole, old, new, domains
        self.before, tensors = old.states(whole)
        self.placement = placement_for(self.before, domains, scheme, tolerate, CHUNK, own)
        self.slots = [make_slot(self.placement, rank, tensors[rank]) for rank in range(old.world)]
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
        has_unreplicated = any(self.placement.rank_placement(rank).unreplicated.leaves for rank in ranks)
        return not has_unreplicated and not undecodable(lanes_alike(self.placement.lanes), have)

    def load(self, lost: Collection[int] = (), nodes: Mapping[str, Sequence[int]] | None = None, sizes: TransferSizes = SMALL,
             box: Postbox | None = None) -> list[Any]:  # fmt: skip
        """Loads on all new ranks, each in a thread; returns (damaged, wrong chunks) of each."""
        shard_match = self.match()
        assert not shard_match.problems, shard_match.problems
        have = {rank: f"node{self.domains[rank]}" for rank in range(self.old.world) if rank not in lost}
        where = nodes or {f"node{rank}": [rank] for rank in range(self.new.world)}
        readers = readers_of(have, where, self.new.world)
        keepers = {rank: readers.get(rank, rank % self.new.world) for rank in range(self.old.world)}
        node_of = {rank: node for node, ranks in where.items() for rank in ranks}
        names = [node_of[rank] for rank in range(self.new.world)]
        reshard_plan = ReshardPlan(shard_match.needs, self.placement, readers, keepers, names, sizes)
        box = box or Postbox()
        self.live: list[Tensors] = [{}] * self.new.world

        def one(rank: int) -> Any:
            leaves, tensors = self.new.state(self.whole, rank)
            self.live[rank] = {name: blank(tensor) for name, tensor in tensors.items()}
            layout = pack(leaves)
            flat_view = FlatTensorView(layout.leaves, layout.offsets, self.live[rank])
            offsets = {leaf.name: at for leaf, at in zip(layout.leaves, layout.offsets, strict=True)}
            slots = {
                old: SlotSource(self.slots[old], self.placement, old, lambda _: None)
                for old, reader in readers.items()
                if reader == rank
            }
            inline_leaves = {old: self.inline_leaves[old] for old, keeper in keepers.items() if keeper == rank}
            verifiers = {old: self.verifier(old) for old in lost if old % self.new.world == rank}
            ReshardExecutor(
                PeerMessages(box.of(rank), rank),
                reshard_plan,
                slots,
                inline_leaves,
                verifiers,
                flat_view,
                offsets,
                False,
            ).run()
            wrong = {old: verifier.finish() for old, verifier in verifiers.items() if reshard_plan.is_rebuilt(old)}
            return [old for old, source in slots.items() if source.is_bad], {o: w for o, w in wrong.items() if w}

        return on_all(self.new.world, one)

    def verifier(self, old: int) -> ChunkVerifier:
        slot, part = self.slots[old], self.placement.rank_placement(old)
        end = max((block.offset + block.nbytes for block in part.blocks[: part.data_blocks]), default=0)
        return ChunkVerifier(slot.digests[: slot.chunks].copy(), CHUNK, end)

    def is_whole(self) -> bool:
        _, expected = self.new.states(self.whole)
        return all(
            set(live) == set(tensors)
            and all(np.array_equal(plain_bytes(live[n]), plain_bytes(tensors[n])) for n in tensors)
            for live, tensors in zip(self.live, expected, strict=True)
        )


def blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).fill_(1)


@pytest.mark.parametrize("seed", [*range(50), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(50, 400))])
def test_any_shape_is_restored_into_any_other(seed):
    rng = random.Random(seed)
    whole = whole_state(rng, rng.randint(1, 12), rng.choice((10, 300, 3000)))
    old, new = random_shape(rng, whole), random_shape(rng, whole)
    per_node = rng.choice((1, 1, 2, 3))
    domains = [rank // per_node for rank in range(old.world)]
    move = Move(whole, old, new, domains, rng.choice(("auto", "aec", "arc", "none")), rng.choice((None, 1, 2)))
    nodes: dict[str, list[int]] = {}
    for rank in range(new.world):
        nodes.setdefault(f"node{rng.randrange(new.world + 1)}", []).append(rank)
    gone = rng.choice(domains)
    lost = [rank for rank in range(old.world) if domains[rank] == gone]
    for without in ([], lost) if move.can_lose(lost) else ([],):
        assert move.load(without, nodes) == [([], {})] * new.world
        assert move.is_whole()


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


def shrunk(scheme: str = "aec", tolerate: int = 1) -> Move:
    """Returns the move of four replicas to shards on three ranks."""
    return Move(ROWS, replicated(4), rows(3), range(4), scheme, tolerate)


@pytest.mark.parametrize(("scheme", "lost"), [("aec", (1,)), ("aec", (0, 3)), ("arc", (2,)), ("aec", ())])
def test_lost_slots_are_decoded(scheme, lost):
    move = shrunk(scheme, max(len(lost), 1))
    assert move.load(lost) == [([], {})] * 3
    assert move.is_whole()


def test_bytes_on_the_rank_that_needs_them_are_not_sent():
    move, box = Move(ROWS, rows(2), rows(2), range(2), "none"), Postbox()
    assert move.load(box=box) == [([], {})] * 2
    assert move.is_whole() and not box.sent_bytes


@pytest.mark.parametrize("scheme", ["aec", "arc", "none"])
def test_every_needed_byte_is_received_once(scheme):
    move, box = shrunk(scheme), Postbox()
    move.load(box=box)
    assert move.is_whole()
    into = {to: sum(n for (_, each), n in box.sent_bytes.items() if each == to) for to in range(3)}
    need = {rank: sum(tensor.nbytes for tensor in live.values()) for rank, live in enumerate(move.live)}
    assert all(into[rank] <= need[rank] for rank in range(3))
    assert all(into[rank] >= need[rank] // 4 for rank in range(3)) or scheme == "arc"


def test_a_copy_on_the_same_node_is_preferred():
    """There are two copies of each byte.

    Both new ranks of a node read the slot on their node.
    """
    move = Move(ROWS, replicated(2), rows(4), range(2), "arc", 1)
    box = Postbox()
    assert move.load(nodes={"node0": [0, 1], "node1": [2, 3]}, box=box) == [([], {})] * 4
    assert move.is_whole()
    assert {pair for pair, n in box.sent_bytes.items() if n} <= {(0, 1), (1, 0), (2, 3), (3, 2)}


# Damage


def test_a_bad_chunk_is_reported_by_its_reader_and_no_rank_hangs():
    move = shrunk()
    move.slots[2].data[CHUNK + 5] ^= 1
    assert [damaged for damaged, _ in move.load()] == [[], [], [2]]
    assert move.load((2,)) == [([], {})] * 3
    assert move.is_whole()


def test_a_bad_chunk_of_the_parity_for_a_lost_slot_is_reported():
    move = shrunk()
    part = move.placement.rank_placement(3)
    move.slots[3].data[part.parity_offset] ^= 1
    results = move.load((0,))
    assert 3 in [old for damaged, _ in results for old in damaged]


def test_a_wrong_decode_is_detected():
    """The parity is wrong and its digest is right, so its reader cannot notice."""
    move = shrunk()
    slot, part = move.slots[3], move.placement.rank_placement(3)
    slot.data[part.parity_offset] ^= 1
    for index in slot.bad_chunks():
        slot.digests[index] = chunk_digest(slot.chunk(index))
    results = move.load((0,))
    assert [damaged for damaged, _ in results] == [[], [], []]
    assert any(wrong for _, wrong in results)


def test_a_rank_that_stops_ends_all_others_within_the_deadline():
    def stops(sender: int, receiver: int) -> None:
        if sender == 2:
            raise RuntimeError("stopped")

    results = shrunk().load((0,), box=Postbox(deadline_s=1.0, reached=stops))
    assert all(isinstance(result, Exception) for result in results)


def test_chunks_are_verified_in_any_order_of_their_bytes():
    rng = random.Random(0)
    data = np.frombuffer(rng.randbytes(10 * CHUNK + 17), np.uint8)
    padded = np.concatenate([data, np.zeros(-len(data) % CHUNK, np.uint8)])
    digests = np.array([chunk_digest(padded[i : i + CHUNK]) for i in range(0, len(padded), CHUNK)], np.uint64)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(60))})
    pieces = list(pairwise(cuts))
    for flipped in (None, 3 * CHUNK + 1):
        rng.shuffle(pieces)
        verifier = ChunkVerifier(digests, CHUNK, len(data))
        for begin, end in pieces:
            piece = data[begin:end].copy()
            if flipped is not None and begin <= flipped < end:
                piece[flipped - begin] ^= 1
            verifier.take(begin, piece)
            piece[:] = 0  # the caller reuses the buffer
        assert verifier.finish() == ([] if flipped is None else [3])
    assert ChunkVerifier(digests, CHUNK, len(data)).finish() == [10], "chunks with missing bytes are not verified"
