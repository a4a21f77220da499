"""Restores into another shape: every new rank gets its pieces, bitwise, after tolerated losses."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from reft.client.restore.executor import NO_RANK, LoadReport
from reft.client.restore.restore import damaged_at_load
from reft.wire.slot_format import chunk_digest
from tests.support.loads import CLEAN
from tests.support.moves import CHUNK, ROWS, Move, drawn_move, replicated, rows
from tests.support.shapes import random_shape, whole_state
from tests.support.shards import Postbox


@pytest.mark.parametrize("seed", [*range(50), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(50, 400))])
def test_any_shape_is_restored_into_any_other(seed):
    rng = random.Random(seed)
    whole = whole_state(rng, rng.randint(1, 12), rng.choice((10, 300, 3000)))
    old, new = random_shape(rng, whole), random_shape(rng, whole)
    per_node = rng.choice((1, 1, 2, 3, 4))
    move, nodes, lost = drawn_move(rng, whole, old, new, per_node)
    for without in ([], lost) if move.can_lose(lost) else ([],):
        assert move.load(without, nodes) == [CLEAN] * new.world
        assert move.is_whole()


def shrunk(scheme: str = "aec", tolerate: int = 1) -> Move:
    """Returns the move of four replicas to shards on three ranks."""
    return Move(ROWS, replicated(4), rows(3), range(4), scheme, tolerate)


@pytest.mark.parametrize(("scheme", "lost"), [("aec", (1,)), ("aec", (0, 3)), ("arc", (2,)), ("aec", ())])
def test_lost_slots_are_decoded(scheme, lost):
    move = shrunk(scheme, max(len(lost), 1))
    assert move.load(lost) == [CLEAN] * 3
    assert move.is_whole()


def test_bytes_on_the_rank_that_needs_them_are_not_sent():
    move, box = Move(ROWS, rows(2), rows(2), range(2), "none"), Postbox()
    assert move.load(box=box) == [CLEAN] * 2
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
    assert move.load(nodes={"node0": [0, 1], "node1": [2, 3]}, box=box) == [CLEAN] * 4
    assert move.is_whole()
    assert {pair for pair, n in box.sent_bytes.items() if n} <= {(0, 1), (1, 0), (2, 3), (3, 2)}


# Damage


def test_a_bad_chunk_is_reported_by_its_reader_and_no_rank_hangs():
    move = shrunk()
    move.slots[2].data[CHUNK + 5] ^= 1
    assert move.load() == [CLEAN, CLEAN, LoadReport((2,))]
    assert move.load((2,)) == [CLEAN] * 3
    assert move.is_whole()


def test_a_bad_chunk_of_the_parity_for_a_lost_slot_is_reported():
    move = shrunk()
    part = move.placement.rank_placement(3)
    move.slots[3].data[part.parity_offset] ^= 1
    results = move.load((0,))
    assert 3 in [old for report in results for old in report.damaged]


def test_a_wrong_decode_is_a_fault():
    """The parity is wrong and its digest is right, so its reader cannot notice."""
    move = shrunk()
    slot, part = move.slots[3], move.placement.rank_placement(3)
    slot.data[part.parity_offset] ^= 1
    for index in slot.bad_chunks():
        slot.digests[index] = chunk_digest(slot.chunk(index))
    results = move.load((0,))
    assert [report.damaged for report in results] == [()] * 3
    faults = {text: owner for report in results for text, owner in report.faults.items()}
    assert set(faults.values()) == {NO_RANK}
    assert all("of rank 0, decoded from its peers, differs from the saved bytes" in text for text in faults)


def test_a_rank_that_stops_ends_all_others_within_the_deadline():
    def stops(sender: int, receiver: int) -> None:
        if sender == 2:
            raise RuntimeError("stopped")

    results = shrunk().load((0,), box=Postbox(deadline_s=1.0, reached=stops))
    assert all(isinstance(result, Exception) for result in results)


# Every loss


FEW = {
    "w": torch.arange(61 * 33, dtype=torch.float32).reshape(61, 33).add(0.5),
    "v": torch.arange(2_011).to(torch.bfloat16),
    "b": torch.arange(17, dtype=torch.float64),
}


def reshaped(D: int, f: int, scheme: str) -> Move:
    """Returns the move of D replicas to shards on a rank less, or on three."""
    return Move(FEW, replicated(D), rows(max(D - 1, 1) if D < 6 else 3), range(D), scheme, f)


@pytest.mark.parametrize("scheme", ["aec", "arc"])
@pytest.mark.parametrize(
    ("D", "f"),
    [pytest.param(D, f, marks=pytest.mark.soak if D > 6 else ()) for D in range(2, 9) for f in range(1, min(D, 4))],
)
def test_every_tolerated_loss_is_restored_and_every_other_is_refused(D, f, scheme):
    move = reshaped(D, f, scheme)
    for count in range(f + 2):
        for lost in itertools.combinations(range(D), count):
            if move.can_lose(lost):
                assert move.load(lost) == [CLEAN] * move.new.world, lost
                assert move.is_whole(), lost
            elif scheme == "aec":
                results = move.load(lost, box=Postbox(deadline_s=5.0))
                assert count > f
                assert all(isinstance(result, ValueError) for result in results), (lost, results)


LARGE = {
    "w": torch.arange(601 * 165, dtype=torch.float32).reshape(601, 165).add(0.5),
    "v": torch.arange(40_003).to(torch.bfloat16),
}


def guarded(D: int, new: int, f: int = 1) -> Move:
    """Returns the move of D shards, too large for capsules, to shards on other ranks."""
    return Move(LARGE, rows(D), rows(new), range(D), tolerate=f, slots=4, inline_bytes_max=64 << 10)


@pytest.mark.parametrize("D", range(2, 7))
@pytest.mark.parametrize("new", [1, 2, 5])
def test_lost_shards_without_replicas_are_decoded_from_guard_lanes(D, new):
    move = guarded(D, new)
    assert not move.placement.lanes and len(move.placement.guard_lanes) == 1
    for lost in range(D):
        assert move.can_lose([lost])
        assert move.load([lost]) == [CLEAN] * new, lost
        assert move.is_whole(), lost


def test_sections_are_refused_by_name_if_two_members_are_lost():
    move = guarded(3, 2)
    assert not move.can_lose([0, 2])
    results = move.load([0, 2], box=Postbox(deadline_s=5.0))
    assert all(isinstance(result, ValueError) for result in results)
    assert "leaves of old rank 0 can't be decoded without rank 2, which is lost" in str(results[0])


@pytest.mark.parametrize(("D", "f", "new"), [(3, 2, 2), (5, 2, 3), (6, 2, 1), (5, 3, 2), (7, 3, 4)])
def test_several_lost_shards_without_replicas_are_decoded(D, f, new):
    move = guarded(D, new, f)
    assert [lane.f for lane in move.placement.guard_lanes] == [f] and not move.placement.lanes
    losses = list(itertools.combinations(range(D), f))
    assert not move.can_lose(range(f + 1))
    for lost in losses[:: max(len(losses) // 5, 1)]:
        assert move.can_lose(lost)
        assert move.load(lost) == [CLEAN] * new, lost
        assert move.is_whole(), lost


def test_damage_of_the_sources_of_a_lost_section_is_found():
    move = guarded(3, 2)
    move.parity[1].data[9] ^= 1
    assert damaged_at_load(move.load([0]), False) == (3 + 1,)
    move = guarded(3, 2)
    move.slots[2].data[move.placement.rank_placement(2).unreplicated_offset] ^= 1
    assert damaged_at_load(move.load([0]), False) == (2,)
    assert damaged_at_load(move.load([1]), False) == (2,)


@pytest.mark.parametrize("lost", [(), (2,), (0, 3)])
def test_both_ranks_of_a_pair_post_messages_in_the_same_order(lost):
    """Must not hang on a transport without tags, such as NCCL."""
    move, box = shrunk("aec", 2), Postbox()
    assert move.load(lost, box=box) == [CLEAN] * 3
    assert box.posted and all(box.posted[a, b] == box.posted[b, a] for a, b in box.posted)
