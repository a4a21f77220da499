"""REFT-load: every rank gets its cells after up to f losses, and no rank hangs."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reft.client.restore import executor as executor_module
from reft.client.restore.decode import StripeDecoder
from reft.client.restore.executor import NO_RANK, LoadProgress, LoadReport, TransferExecutor
from reft.client.restore.opened import OldRank, OpenReport, RestoreContext
from reft.client.restore.remote_slots import SlotOpener
from reft.client.restore.restore import Restore
from reft.client.restore.same_shape import SECTION, needs_of_section, plan_for_itself, stored_section
from reft.client.restore.slot_reader import SlotReader
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.verify import PeerMessages
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import INLINE_BYTES_MAX
from reft.core.layout.layout import Layout
from reft.core.recovery.gather import group_lanes, undecodable
from reft.core.recovery.plan import DecodeOperation, SlotReaders, TransferSizes
from reft.core.recovery.recovery import HeldCapsule, HeldSlot, RecoveryPlan
from reft.core.recovery.walk import OPERATIONS_MAX
from reft.errors import FormatError, LayoutChanged, RestoreError
from reft.wire.capsule_format import NO_NAMES
from reft.wire.slot_format import SlotMap, chunk_digest
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.loads import CHUNK, CLEAN, SMALL, Job, blank, every_loss, few, mixed, random
from tests.support.shards import Postbox, alike, slot_data

CODES = [(D, f, scheme) for D in range(2, 6) for f in range(1, min(D, 4)) for scheme in ("aec", "arc")]


@pytest.mark.parametrize(("D", "f", "scheme"), CODES)
def test_every_tolerated_loss_is_restored(D, f, scheme):
    every_loss(Job(D, scheme, f), f)


WIDE = [(D, f, scheme) for D in range(6, 9) for f in range(1, 4) for scheme in ("aec", "arc")]


WIDEST = pytest.mark.slow  # 56 to 92 losses


@pytest.mark.parametrize(
    ("D", "f", "scheme"), [pytest.param(*each, marks=[WIDEST] * (each[0] > 6 and each[1] == 3)) for each in WIDE]
)
def test_every_tolerated_loss_is_restored_in_wide_groups(D, f, scheme):
    """As above, with less state."""
    every_loss(Job(D, scheme, f, few()), f)


@pytest.mark.parametrize("scheme", ["aec", "arc"])
@pytest.mark.parametrize(("D", "f"), [(D, f) for D in range(2, 9) for f in range(1, min(D, 4))])
def test_more_losses_than_tolerated_are_refused(D, f, scheme):
    """Each pattern of f + 1 losses that leaves some stripe with too few shards; no rank waits."""
    job = Job(D, scheme, f, few())
    groups = group_lanes(job.placement.lanes)
    for lost in itertools.combinations(range(D), f + 1):
        have = np.array([rank not in lost for rank in range(D)])
        if len(lost) < D and not undecodable(groups, have):
            continue
        results = job.load(lost, box=Postbox(deadline_s=5.0))
        assert all(isinstance(result, ValueError) for result in results), (lost, results)
        assert "shards are at hand; it takes" in str(results[0])


@pytest.mark.parametrize(
    "sizes",
    [TransferSizes(), SMALL, TransferSizes(192, 4096, 192, 64), TransferSizes(1 << 16, 1 << 14, 1 << 17, 1)],
)
@pytest.mark.parametrize("scheme", ["aec", "arc", "none"])
def test_load_sizes_do_not_change_the_result(sizes, scheme):
    job = Job(4, scheme, 2, mixed(2))
    lost = () if scheme == "none" else (1, 2)
    assert job.load(lost, sizes=sizes) == [CLEAN] * 4
    assert job.is_whole()


@pytest.mark.parametrize("lost", [(), (2,), (0, 3)])
def test_both_ranks_of_a_pair_post_messages_in_the_same_order(lost):
    """Must not hang on a transport without tags, such as NCCL.

    There, the messages of a pair wait for one another in both directions.
    """
    job, box = Job(5, "aec", 2), Postbox()
    assert job.load(lost, box=box) == [CLEAN] * 5
    assert box.posted and all(box.posted[a, b] == box.posted[b, a] for a, b in box.posted)


def test_several_ranks_on_each_node_and_cells_on_some_ranks():
    """Two pipeline stages on four nodes with two ranks each; a node is lost.

    There are two cells, each with two lanes.
    """
    stages = [{f"stage{s}.{name}": tensor for name, tensor in mixed(s + 1).items()} for s in range(2)]
    shared = {"shared": random((5000,), torch.float32, 7)}
    ranks = [stages[rank % 2] | shared for rank in range(8)]
    job = Job(8, "aec", 1, ranks=ranks, domains=[rank // 2 for rank in range(8)])
    assert len(job.placement.lanes) > 2
    box = Postbox()
    assert job.load((4, 5), box=box) == [CLEAN] * 8
    assert job.is_whole()
    inside = {(a, b) for a, b in box.sent_bytes if a // 2 == b // 2}
    assert inside == {(4, 5), (5, 4)}, "inside a node ranks send only decoded bytes"


def test_a_rank_may_read_slots_with_cells_that_it_does_not_hold():
    """The ranks moved: a slot's reader is the rank that runs where the slot lies."""
    stages = [{f"stage{s}.{name}": tensor for name, tensor in mixed().items()} for s in range(2)]
    nodes = {f"node{old}": [rank] for old, rank in enumerate([3, 0, 4, 1, 5, 2])}
    for lost in ((), (2,), (2, 3)):
        job = Job(6, "aec", 1, ranks=[stages[rank // 3] for rank in range(6)])
        assert job.load(lost, nodes=nodes) == [CLEAN] * 6
        assert job.is_whole()


def test_slots_on_nodes_without_ranks_are_read_by_other_ranks():
    job = Job(4, "aec", 1)
    nodes = {"node0": [0], "node3": [3], "new": [1, 2]}
    assert job.load((2,), nodes=nodes) == [CLEAN] * 4
    assert job.is_whole()


def test_local_copies_are_not_sent():
    job, box = Job(2, "arc", 1), Postbox()
    job.load(box=box)
    assert job.is_whole()
    assert not box.sent_bytes
    job.live = [blank(tensors) for tensors in job.ranks]
    job.load((1,), box=box)
    cell = job.placement.division.cells[0]
    assert box.sent_bytes == {(0, 1): cell.nbytes + 8}, "every byte once, and the digest of the messages"
    assert job.is_whole()


@pytest.mark.parametrize("lost", [(), (2,)])
def test_every_byte_is_received_once(lost):
    job, box = Job(4, "aec", 1, {"large": random((1 << 16,), torch.float32, 1)}), Postbox()
    job.load(lost, box=box)
    lane = job.placement.lanes[0]
    into = {to: sum(n for (_, each), n in box.sent_bytes.items() if each == to) for to in range(4)}
    digests = {to: 8 * len({a for a, b in box.sent_bytes if b == to}) for to in range(4)}
    own = lane.code.k * lane.shard_bytes  # data shards of one rank
    for rank, got in into.items():
        if rank not in lost:
            padding = lane.D * own - lane.nbytes  # at the end of the last shard, not sent
            assert lane.D * own - own - padding <= got - digests[rank] <= lane.D * own - own
        else:  # the data of others, and parity: as much as the lost data
            assert got - digests[rank] <= lane.D * own
            made = [each for each in job.plan(rank, lost).operations(rank) if isinstance(each, DecodeOperation)]
            parity = sum(sum(s not in each.slice.stripe.live for s in each.slice.stripe.inputs) for each in made)
            assert parity == len(made), "of each stripe only parity comes to the keeper for decoding"


def test_absent_leaves_are_zeros_and_are_not_loaded():
    tensors = {"a": random((5000,), torch.float32, 1), "b": torch.zeros(7000), "c": random((901,), torch.float32, 2)}
    job = Job(4, "aec", 2, tensors)
    for live in job.live:
        del live["b"]
    assert job.load((1, 2), absent={"b"}) == [CLEAN] * 4
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
    assert damaged == [CLEAN, LoadReport((1,)), CLEAN, CLEAN]
    job.live = [blank(tensors) for tensors in job.ranks]
    assert job.load((1, *lost)) == [CLEAN] * 4
    assert job.is_whole()


def test_a_slot_that_is_too_short_is_damaged():
    job = Job(3, "none", 0)
    other = Job(3, "none", 0, {"large": random((64,), torch.float32, 1)})
    job.slots[2] = other.slots[2]
    assert job.load() == [CLEAN, CLEAN, LoadReport((2,))]


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
    context = RestoreContext(
        plan, job.placement, [NO_NAMES] * 2, rank, {"a": [0], "b": [1]}, opener, **nothing, decoder=StripeDecoder()
    )
    assert Restore(context, ()).open()[1] == OpenReport((rank,))


@pytest.mark.parametrize("scheme", ["aec", "arc"])
def test_wrong_digests_of_a_lost_slot_are_faults(scheme):
    """With copies, too: the keeper compares the copies that it loaded."""
    job = Job(4, scheme, 1)
    table = np.frombuffer(bytearray(job.digests(2)), "<u8")
    table[1] ^= np.uint64(1)
    fault = "chunk 1 of rank 2, decoded from its peers, differs from the saved bytes"
    for digests in (table, table[:1]):
        results = job.load((2,), digests={2: digests.tobytes()})
        assert results == [CLEAN, CLEAN, LoadReport((), {fault: NO_RANK}), CLEAN]


def test_wrong_parity_is_detected_by_the_rank_that_lost_its_slot():
    """The parity's digest is right, so its reader cannot notice."""
    job = Job(3, "aec", 1)
    slot, part = job.slots[0], job.placement.rank_placement(0)
    slot.data[part.parity_offset] ^= 1
    slot.digests[: slot.chunks] = make_digests(slot)
    faults = job.load((2,))[2].faults
    assert list(faults.values()) == [NO_RANK] and "of rank 2, decoded" in min(faults)


def make_digests(slot: SlotMap) -> np.ndarray:
    return np.array([chunk_digest(slot.chunk(index)) for index in range(slot.chunks)], np.uint64)


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
    sizes = TransferSizes(piece=64 << 10, band=128 << 10, window=256 << 10, ahead=64 << 10)
    tracemalloc.start()
    try:
        results = job.load((0, 3), sizes=sizes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert results == [CLEAN] * 4
    assert job.is_whole()
    buffers = 3 * sizes.band + sizes.window + sizes.ahead + 2 * OPERATIONS_MAX * sizes.piece
    assert peak < 3 * buffers, "of all four ranks; two of them read only"
    assert buffers < 12_000_000 / 4, "the state of one rank has 12 MB"


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
    assert job.load(box=box) == [CLEAN] * 3
    assert all(nbytes <= SMALL.window + 2 * SMALL.piece for nbytes in most.values()), most


# Unreplicated leaves, and jobs of one rank


@pytest.mark.parametrize("sizes", [SMALL, TransferSizes()])
@pytest.mark.parametrize("world", [1, 2])
def test_unreplicated_leaves_are_loaded_from_the_ranks_own_slot(world, sizes):
    states = [
        {f"own{rank}.{n}": t for n, t in mixed(30).items() if t.nbytes > INLINE_BYTES_MAX} for rank in range(world)
    ]
    job = Job(world, "aec", 1, ranks=states)
    for rank in range(world):
        part = job.placement.rank_placement(rank)
        leaves, ends = part.unreplicated.leaves, [part.unreplicated_offset + at for at in part.unreplicated.offsets]
        unreplicated = Layout(leaves, tuple(ends), part.data_bytes)
        own = OldRank(
            {"riders": {}}, (), job.slots[rank], unreplicated, {leaf.name: pb.UNREPLICATED for leaf in leaves}
        )
        needs = needs_of_section(rank, stored_section(own))
        plan = plan_for_itself(needs, job.placement, rank, SlotReaders.of({}, job.nodes, world), sizes)
        for is_damaged in (False, True):
            slot = SlotReader(job.slots[rank], unreplicated.data_bytes, lambda _: None)
            target = FlatTensorView(leaves, ends, job.live[rank]), {SECTION: ends[0]}
            executor = TransferExecutor(sizes, CHUNK, PeerMessages(None, rank), {rank: slot}, *target, StripeDecoder())
            report = executor.load(plan.operations(rank))
            assert report == LoadReport((rank,) if is_damaged else ())
            assert is_damaged or alike(job.live[rank], states[rank], [leaf.name for leaf in leaves])
            job.slots[rank].data[part.unreplicated_offset + 3] ^= 1


def test_one_rank_needs_no_transport():
    job = Job(1, "aec", 1)
    plan, decoder = job.plan(0), StripeDecoder()
    slots = {0: SlotReader(job.slots[0], 0, lambda _: None)}
    executor = TransferExecutor(SMALL, CHUNK, PeerMessages(None, 0), slots, *job.target(0, decoder), decoder)
    assert executor.load(plan.operations(0)) == CLEAN
    assert job.is_whole()


def test_the_test_tool_makes_the_same_slots_as_a_snapshot():
    job = Job(4, "aec", 1)
    assert all(np.array_equal(job.slots[r].data, slot_data(job.placement, r, job.ranks[r])) for r in range(4))
    assert not any(slot.bad_chunks() for slot in job.slots)


@pytest.mark.parametrize(("interval_s", "speaks", "lines"), [(0.0, True, 3), (3600.0, True, 0), (0.0, False, 0)])
def test_a_long_load_says_how_far_it_is(interval_s, speaks, lines, monkeypatch, capsys):
    monkeypatch.setattr(executor_module, "PROGRESS_S", interval_s)
    progress = LoadProgress(4 << 20, speaks)
    for _ in range(3):
        progress.add(1 << 20)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines
    assert not printed or printed[-1].startswith("[reft] restores: 3.0 MiB of 4.0 MiB of this rank's state, about")
