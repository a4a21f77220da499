"""REFT-load: every rank gets its cells after up to f losses, and no rank hangs."""

from __future__ import annotations

import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reft.client.restore.decode import Decoder
from reft.client.restore.load import load, load_unreplicated
from reft.client.restore.load_plan import LoadPlan, LoadSizes
from reft.client.restore.remote_slots import SlotOpener
from reft.client.restore.restore import Restore
from reft.client.restore.run import OpenReport, RestoreContext
from reft.core.coding.placement import Placement
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import INLINE_BYTES_MAX
from reft.core.layout.layout import Layout
from reft.core.recovery.recovery import HeldCapsule, HeldSlot, RecoveryPlan
from reft.errors import FormatError, LayoutChanged, RestoreError
from reft.wire.slot_format import SlotMap
from tests.support.loads import CHUNK, SMALL, Job, blank, every_loss, few, mixed, random
from tests.support.shards import Postbox, alike, on_all, slot_data

CODES = [
    (D, f, scheme) for D in range(2, 6) for f in range(1, min(D, 4)) for scheme in ("aec", "arc") if not (f == 3 and D < 4)
]  # fmt: skip


@pytest.mark.parametrize(("D", "f", "scheme"), CODES)
def test_every_tolerated_loss_is_restored(D, f, scheme):
    every_loss(Job(D, scheme, f), f)


WIDE = [(D, f, scheme) for D in range(6, 9) for f in range(1, 4) for scheme in ("aec", "arc")]


@pytest.mark.parametrize(("D", "f", "scheme"), WIDE)
def test_every_tolerated_loss_is_restored_in_wide_groups(D, f, scheme):
    """As above, with less state."""
    every_loss(Job(D, scheme, f, few()), f)


@pytest.mark.parametrize(
    "sizes", [LoadSizes(), SMALL, LoadSizes(192, 4096, 1, 192, 64), LoadSizes(1 << 16, 1 << 14, 2, 1 << 17, 1)]
)
@pytest.mark.parametrize("scheme", ["aec", "arc", "none"])
def test_load_sizes_do_not_change_the_result(sizes, scheme):
    job = Job(4, scheme, 2, mixed(2))
    lost = () if scheme == "none" else (1, 2)
    assert job.load(lost, sizes=sizes) == [()] * 4
    assert job.is_whole()


@pytest.mark.parametrize("lost", [(), (2,), (0, 3)])
def test_both_ranks_of_a_pair_post_messages_in_the_same_order(lost):
    """Must not hang on a transport without tags, such as NCCL.

    There, the messages of a pair wait for one another in both directions.
    """
    job, box = Job(5, "aec", 2), Postbox()
    assert job.load(lost, box=box) == [()] * 5
    assert box.posted and all(box.posted[a, b] == box.posted[b, a] for a, b in box.posted)


def test_more_losses_than_tolerated_are_refused():
    job = Job(4, "aec", 1)
    assert all(isinstance(result, ValueError) for result in job.load((0, 1)))


def test_several_ranks_on_each_node_and_cells_on_some_ranks():
    """Two pipeline stages on four nodes with two ranks each; a node is lost.

    There are two cells, each with two lanes.
    """
    stages = [{f"stage{s}.{name}": tensor for name, tensor in mixed(s + 1).items()} for s in range(2)]
    shared = {"shared": random((5000,), torch.float32, 7)}
    ranks = [stages[rank % 2] | shared for rank in range(8)]
    job = Job(8, "aec", 1, ranks=ranks, domains=[rank // 2 for rank in range(8)])
    assert len(job.placement.lanes) > 2
    assert job.load((4, 5)) == [()] * 8
    assert job.is_whole()


def test_a_rank_may_read_slots_with_cells_that_it_does_not_hold():
    stages = [{f"stage{s}.{name}": tensor for name, tensor in mixed().items()} for s in range(2)]
    job = Job(6, "aec", 1, ranks=[stages[rank // 3] for rank in range(6)])
    readers = {0: 0, 1: 3, 2: 0, 3: 4, 4: 1, 5: 1}
    assert job.load(readers=readers) == [()] * 6
    assert job.is_whole()
    job.live = [blank(tensors) for tensors in job.ranks]
    assert job.load((2, 3), readers=readers) == [()] * 6
    assert job.is_whole()


def test_local_copies_are_not_sent():
    job, box = Job(2, "arc", 1), Postbox()
    job.load(box=box)
    assert job.is_whole()
    assert not box.sent_bytes
    job.live = [blank(tensors) for tensors in job.ranks]
    job.load((1,), box=box)
    cell = job.placement.division.cells[0]
    assert box.sent_bytes == {(0, 1): cell.nbytes + 1}, "every byte once, and the message with the verdict"
    assert job.is_whole()


@pytest.mark.parametrize("lost", [(), (2,)])
def test_every_byte_is_received_once(lost):
    job, box = Job(4, "aec", 1, {"large": random((1 << 16,), torch.float32, 1)}), Postbox()
    job.load(lost, box=box)
    lane = job.placement.lanes[0]
    into = {to: sum(n for (_, each), n in box.sent_bytes.items() if each == to) for to in range(4)}
    own = lane.code.k * lane.shard_bytes  # data shards of one rank
    at_hand = {rank: 0 if rank in lost else own for rank in range(4)}
    for rank, got in into.items():
        parity = lane.shard_bytes  # in stripes that lost data, a rank reads its own parity locally
        assert lane.D * own - at_hand[rank] - 4 * parity <= got <= lane.D * own - at_hand[rank] + 8


def test_absent_leaves_are_zeros_and_are_not_loaded():
    tensors = {"a": random((5000,), torch.float32, 1), "b": torch.zeros(7000), "c": random((901,), torch.float32, 2)}
    job = Job(4, "aec", 2, tensors)
    for live in job.live:
        del live["b"]
    box, have = Postbox(), frozenset({0, 3})

    def one(rank: int) -> tuple[int, ...]:
        mine = {rank: job.slots[rank]} if rank in have else {}
        digests = {rank: job.digests(rank)}
        return load(
            box.of(rank), job.placement, rank, have, {0: 0, 3: 3}, mine, job.live[rank], {"b"}, digests, lambda _: None,
            SMALL,
        )  # fmt: skip

    assert on_all(4, one) == [()] * 4
    assert all(alike(live, tensors, ["a", "c"]) and "b" not in live for live in job.live)


def test_a_missing_tensor_is_refused_on_its_rank():
    job = Job(2, "none", 0)
    del job.live[1]["large"]
    results = job.load(box=Postbox(deadline_s=0.5))
    assert isinstance(results[1], LayoutChanged)
    assert isinstance(results[0], RestoreError)


# Damage


@pytest.mark.parametrize("lost", [(), (3,)])
def test_a_bad_chunk_is_reported_by_its_reader_and_no_rank_hangs(lost):
    job = Job(4, "aec", 2)
    job.slots[1].data[CHUNK + 5] ^= 1
    damaged = job.load(lost)
    assert damaged == [(), (1,), (), ()]
    job.live = [blank(tensors) for tensors in job.ranks]
    assert job.load((1, *lost)) == [()] * 4
    assert job.is_whole()


def test_a_slot_that_is_too_short_is_damaged():
    job = Job(3, "none", 0)
    other = Job(3, "none", 0, {"large": random((64,), torch.float32, 1)})
    job.slots[2] = other.slots[2]
    assert job.load() == [(), (), (2,)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slot_or_capsule_damaged_at_open_is_reported_without_an_error(rank):
    """All ranks then search another copy, or go back together."""

    def torn(*_: object, **__: object) -> None:
        raise FormatError("torn.")

    job, base = Job(2, "arc", 1), Version(Epoch(1, b"e" * 16), 3)
    plan = RecoveryPlan(
        base,
        {0: HeldSlot("a", 0, "rank-0.slot-0", SlotState.SEALED, base)},
        {1: HeldCapsule("a", 1, base, unreplicated_bytes=0)},
    )
    opener = SlotOpener(SimpleNamespace(take=torn), SimpleNamespace(capsule=torn, own="ab"[rank]))
    nothing = dict.fromkeys(("tracked", "tensor_index", "host", "buffer"))
    context = RestoreContext(plan, job.placement, rank, {"a": [0], "b": [1]}, opener, **nothing)
    assert Restore(context, (), Decoder()).open()[1] == OpenReport((rank,), {rank: ()})


@pytest.mark.parametrize("scheme", ["aec", "arc"])
def test_wrong_digests_of_a_lost_slot_are_refused(scheme):
    job = Job(4, scheme, 1)
    table = job.digests(2)
    table[1] ^= np.uint64(1)
    results = job.load((2,), digests={2: table})
    assert isinstance(results[2], RestoreError)
    assert "lane 0" in str(results[2]) and "rank 2" in str(results[2])
    assert all(result == () for rank, result in enumerate(results) if rank != 2)
    assert isinstance(job.load((2,), digests={2: table[:1]})[2], RestoreError)


def test_without_digests_a_lost_slot_is_loaded_without_comparison():
    job = Job(3, "aec", 1)
    assert job.load((1,), digests={}) == [()] * 3
    assert job.is_whole()


def test_wrong_parity_is_detected_by_the_rank_that_lost_its_slot():
    """The parity's digest is right, so its reader cannot notice."""
    job = Job(3, "aec", 1)
    slot, part = job.slots[0], job.placement.rank_placement(0)
    slot.data[part.parity_offset] ^= 1
    slot.digests[:] = make_digests(slot)
    results = job.load((2,))
    assert any(isinstance(result, RestoreError) for result in results)


def make_digests(slot: SlotMap) -> np.ndarray:
    digests = slot.digests.copy()
    slot_chunks = slot.bad_chunks()
    from reft.wire.slot_format import chunk_digest

    for index in slot_chunks:
        digests[index] = chunk_digest(slot.chunk(index))
    return digests


def test_a_rank_that_stops_ends_all_others_within_the_deadline():
    def stops(sender: int, receiver: int) -> None:
        if sender == 2:
            raise RuntimeError("stopped")

    job = Job(4, "aec", 1)
    began = time.monotonic()
    results = job.load((0,), box=Postbox(deadline_s=1.0, reached=stops))
    assert time.monotonic() - began < 10
    assert all(isinstance(result, Exception) for result in results)


def test_an_error_in_at_chunk_is_raised():
    def fails(rank: int, chunk: int) -> None:
        if rank == 1 and chunk == 2:
            raise RestoreError("failpoint")

    results = Job(3, "aec", 1).load(box=Postbox(deadline_s=1.0), at_chunk=fails)
    assert "failpoint" in str(results[1])
    assert all(isinstance(result, RestoreError) for result in results)


# Bounds


@pytest.mark.parametrize("scheme", ["aec", "arc"])
@pytest.mark.parametrize("kind", ["one leaf", "many leaves"])
def test_memory_beside_state_and_slots_is_bounded(scheme, kind):
    count = 1 if kind == "one leaf" else 300
    tensors = {f"leaf{i}": random((3_000_000 // count + i % 5,), torch.float32, i) for i in range(count)}
    job = Job(4, scheme, 2, tensors)
    sizes = LoadSizes(piece=64 << 10, group=128 << 10, groups=2, window=256 << 10, ahead=64 << 10)
    tracemalloc.start()
    try:
        results = job.load((0, 3), sizes=sizes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert results == [()] * 4
    assert job.is_whole()
    buffers = sizes.memory_max - (16 << 20)
    assert peak < 4 * (buffers + (2 << 20)), "of all four ranks"
    assert 4 * (buffers + (2 << 20)) < 12_000_000, "the state of one rank"


def test_the_parity_of_a_slice_fits_its_buffer():
    """The parity of a slice must fit for any number of packets; EVENODD has many."""
    job = Job(5, "aec", 2)
    load_plan = LoadPlan(job.placement, frozenset({2, 3, 4}), {2: 2, 3: 3, 4: 4}, SMALL)
    slices = [stripe_slice for stripe_slice in load_plan.slices(0) if stripe_slice.has_lost_shards]
    lanes = job.placement.lanes
    assert slices
    for stripe_slice in slices:
        parity = len(stripe_slice.read.lost) * lanes[stripe_slice.lane].code.w * (stripe_slice.end - stripe_slice.begin)
        assert 0 < parity <= SMALL.group
        assert all(range_.end - range_.begin <= SMALL.piece for range_ in stripe_slice.ranges)


def test_bytes_under_way_stay_within_the_window():
    """At most the window and one range are under way."""
    job, box = Job(3, "none", 0, {"large": random((1 << 17,), torch.float32, 1)}), Postbox()
    under_way: dict[int, int] = {}
    most: dict[int, int] = {}
    post = box.post

    def watched(key, is_send, data):
        rank = key[0] if is_send else key[1]
        message = post(key, is_send, data)
        under_way[rank] = under_way.get(rank, 0) + data.nbytes
        most[rank] = max(most.get(rank, 0), under_way[rank])
        wait = message.wait

        def waited():
            wait()
            under_way[rank] -= data.nbytes

        message.wait = waited
        return message

    box.post = watched
    assert job.load(box=box) == [()] * 3
    assert all(nbytes <= SMALL.window + 2 * SMALL.piece for nbytes in most.values()), most


# Unreplicated leaves, and jobs of one rank


def unreplicated_of(placement: Placement, rank: int) -> Layout:
    part = placement.rank_placement(rank)
    offsets = tuple(part.unreplicated_offset + offset for offset in part.unreplicated.offsets)
    return Layout(part.unreplicated.leaves, offsets, part.data_bytes)


@pytest.mark.parametrize("run_bytes", [1, 32 << 20])
@pytest.mark.parametrize("world", [1, 2])
def test_unreplicated_leaves_are_loaded_from_the_ranks_own_slot(world, run_bytes):
    states = [
        {f"own{rank}.{n}": t for n, t in mixed(30).items() if t.nbytes > INLINE_BYTES_MAX} for rank in range(world)
    ]
    job = Job(world, "aec", 1, ranks=states)
    for rank in range(world):
        unreplicated = unreplicated_of(job.placement, rank)
        assert load_unreplicated(job.slots[rank], unreplicated, job.live[rank], lambda _: None, run_bytes)
        assert alike(
            job.live[rank], states[rank], [leaf.name for leaf in job.placement.rank_placement(rank).unreplicated.leaves]
        )
        job.slots[rank].data[job.placement.rank_placement(rank).unreplicated_offset + 3] ^= 1
        assert not load_unreplicated(job.slots[rank], unreplicated, job.live[rank], lambda _: None, run_bytes)


def test_one_rank_needs_no_transport():
    job = Job(1, "aec", 1)
    damaged = load(
        None, job.placement, 0, frozenset({0}), {0: 0}, {0: job.slots[0]}, job.live[0], (), {}, lambda _: None
    )
    assert damaged == ()


def test_the_test_tool_makes_the_same_slots_as_a_snapshot():
    job = Job(4, "aec", 1)
    assert all(np.array_equal(job.slots[r].data, slot_data(job.placement, r, job.ranks[r])) for r in range(4))
    assert not any(slot.bad_chunks() for slot in job.slots)
