"""The contract of a copy engine, for the CPU engine and the CUDA engine.

The CPU engine has one thread or two. A single process stores all its state. In a group, each rank
writes its data shards and parity, and the slots of any D - f ranks give the whole state.
test_save_plan.py tests save plans without an engine.

Without a GPU the CUDA engine runs on two fake devices: one does all work at once, the other as late
as possible. With a GPU it also runs on CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reft.client.snapshot import cuda_engine, cuda_plan
from reft.client.snapshot import save_plan as save_plan
from reft.client.snapshot.cpu_engine import CpuCopyEngine
from reft.client.snapshot.cpu_plan import TASK_BYTES, CopyPart, CpuCopyPlan, join_parts
from reft.client.snapshot.cuda_engine import CudaCopyEngine
from reft.client.snapshot.cuda_plan import GRAPH_COPIES
from reft.client.snapshot.engine import CopiedEvent
from reft.client.snapshot.replica_check import WINDOW_BYTES
from reft.client.snapshot.save_plan import WriteItem
from reft.client.state.tensors import TensorIndex, flat_bytes
from reft.core.coding import erasure
from reft.core.coding.placement import Placement
from reft.core.commit.slots import SlotState
from reft.core.pipeline.pacing import Tier
from reft.errors import ReftError
from tests.support.codes import decode_program
from tests.support.daemons import until
from tests.support.snapshot import Away, Taken, bytes_in, placement_of, tensors_on
from tests.support.streams import Inline, Late


def test_every_byte_is_copied_and_slot_states_follow_in_order(engine):
    copy_engine, device = engine
    taken = Taken(tensors_on(device), {"buffer"}).by(copy_engine)
    for name, tensor in tensors_on(device).items():
        assert taken.bytes_of(name) == bytes_in(tensor).tobytes(), name
    assert taken.states[-2:] == [SlotState.LANDED, SlotState.SEALED]
    assert set(taken.states[:-2]) == {SlotState.WRITING}
    assert taken.slot.bad_chunks() == [] and taken.slot.capsule() == b"capsule"
    assert copy_engine.copy_stats.written() == taken.save_plan.written_bytes


@pytest.mark.parametrize("D", [1, 3])
def test_inline_and_staged_leaves_are_as_at_the_mark(engine, D):
    copy_engine, device = engine
    # "cache" is too large for a capsule.
    tensors = tensors_on(device) | {"cache": torch.randn(100, 1024, device=device)}
    taken = Taken(tensors, {"buffer", "cache"}, placement_of(TensorIndex(tensors, {"buffer", "cache"}), D, D - 1))
    assert "cache" not in [taken.save_plan.leaves[i].name for i in taken.save_plan.inline_leaves]
    before = {name: bytes_in(tensors[name]).tobytes() for name in ("buffer", "cache")}
    taken.start(copy_engine)
    for name in before:
        tensors[name].add_(1)  # as forward does
    copy_engine.fence()
    assert taken.ended.wait(20) and taken.error is None
    assert {name: taken.bytes_of(name) for name in before} == before


def test_nothing_is_read_after_the_fence(engine):
    copy_engine, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, set())
    before = tensors["large"].cpu().numpy().tobytes()
    taken.start(copy_engine)
    copy_engine.fence()
    tensors["large"].zero_()
    assert taken.ended.wait(20) and taken.error is None
    assert taken.bytes_of("large") == before


def test_a_failure_is_reported_and_the_fence_opens(engine):
    copy_engine, device = engine
    taken = Taken(tensors_on(device), set())

    taken.landed = lambda copied: throw(ReftError("torn"))
    taken.start(copy_engine)
    copy_engine.fence()
    assert taken.ended.wait(20) and "torn" in str(taken.error)
    assert taken.slot.reread().state is SlotState.WRITING, "a torn snapshot must not look landed"
    again = Taken(tensors_on(device), set())
    again.start(copy_engine)
    copy_engine.fence()
    assert again.ended.wait(20) and again.error is None


def test_bytes_count_in_the_tier_in_which_their_copy_begins(engine):
    copy_engine, device = engine
    copy_engine.enter(1, Tier.GAP)
    first = Taken(tensors_on(device), set()).by(copy_engine)
    assert copy_engine.copy_stats.written(Tier.GAP) == first.save_plan.written_bytes == copy_engine.copy_stats.written()
    copy_engine.enter(2, Tier.COMPUTE)
    second = Taken(tensors_on(device), set()).by(copy_engine)
    assert copy_engine.copy_stats.written(Tier.COMPUTE) == second.save_plan.written_bytes
    assert copy_engine.copy_stats.written() == 2 * copy_engine.copy_stats.written(Tier.GAP)


# Groups


def cell_bytes(placement: Placement, number: int, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """Returns the bytes that a cell must hold: live bytes, and zeros in all other places."""
    cell = placement.division.cells[number]
    whole = np.zeros(cell.nbytes, np.uint8)
    for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
        if leaf.name in tensors:
            whole[offset : offset + leaf.nbytes] = bytes_in(tensors[leaf.name])
    return whole


def gathered(placement: Placement, lane_number: int, slots: dict[int, np.ndarray]) -> np.ndarray:
    """Returns a lane with its padding from the slots of some ranks.

    Decodes the shards of missing ranks.
    """
    lane = placement.lanes[lane_number]
    k, packet = lane.code.k, lane.packet_bytes
    shards = {
        (block.stripe, block.shard): slots[rank][block.offset : block.offset + block.nbytes]
        for rank in slots
        for block in placement.rank_placement(rank).blocks
        if block.lane == lane_number
    }
    whole = np.zeros((lane.D, k, lane.shard_bytes), np.uint8)
    for stripe in range(lane.D):
        lost = [shard for shard in range(k) if (stripe, shard) not in shards]
        for shard in set(range(k)) - set(lost):
            whole[stripe, shard] = shards[stripe, shard]
        if lost:
            program = decode_program(lane.code, lost, [j for j in range(lane.code.f) if (stripe, k + j) in shards])
            inputs = [shards[stripe, shard][p * packet : (p + 1) * packet] for shard, p in program.inputs]
            outputs = [whole[stripe, shard][p * packet : (p + 1) * packet] for shard, p in program.outputs]
            erasure.run(program, inputs, outputs, [np.empty(packet, np.uint8) for _ in range(program.scratch)])
    return whole.reshape(-1)


def assert_any_survivors_have_it_all(placement: Placement, slots: dict[int, np.ndarray], tensors, f: int) -> None:
    domains = sorted(set(placement.domains))
    for lost in itertools.combinations(domains, f):
        alive = {rank: data for rank, data in slots.items() if placement.domains[rank] not in lost}
        for number, lane in enumerate(placement.lanes):
            expected = np.zeros(lane.D * lane.code.k * lane.shard_bytes, np.uint8)
            expected[: lane.nbytes] = cell_bytes(placement, lane.cell, tensors)[lane.begin : lane.begin + lane.nbytes]
            assert np.array_equal(gathered(placement, number, alive), expected), f"lane {number} without {lost}"


def live_bytes(placement: Placement, rank: int, tensors: dict[str, torch.Tensor]) -> int:
    """Counts live bytes, unreplicated leaves and parity of a rank, without a save plan."""
    part, total = placement.rank_placement(rank), 0
    for block in part.blocks[: part.data_blocks]:
        lane = placement.lanes[block.lane]
        cell = placement.division.cells[lane.cell]
        begin, end = lane.data_range(block.stripe, block.shard)
        end = min(end, lane.begin + lane.nbytes)
        for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
            if leaf.name in tensors:
                total += max(0, min(end, offset + leaf.nbytes) - max(begin, offset))
    total += sum(block.nbytes for block in part.blocks[part.data_blocks :])
    return total + sum(leaf.nbytes for leaf in part.unreplicated.leaves if leaf.name in tensors)


GROUPS = [(2, 1, 1), (3, 1, 1), (3, 2, 1), (4, 2, 1), (4, 3, 2), (5, 2, 2), (6, 1, 1), (6, 3, 1)]


@pytest.mark.parametrize(("D", "f", "each"), GROUPS)
@pytest.mark.parametrize("scheme", ["aec", "arc"])
def test_slots_without_any_f_domains_give_the_whole_state(engine, D, f, each, scheme):
    copy_engine, device = engine
    tensors = tensors_on(device)
    placement = placement_of(TensorIndex(tensors, {"buffer"}), D, f, each, scheme)
    slots, copied = {}, 0
    for rank in range(D * each):
        taken = Taken(tensors, {"buffer"}, placement, rank).by(copy_engine)
        assert taken.slot.bad_chunks() == [] and taken.inline_leaves["buffer"] == bytes_in(tensors["buffer"]).tobytes()
        assert sorted(taken.parity) == list(range(len(taken.save_plan.columns)))
        assert (
            copy_engine.copy_stats.written() - copied
            == taken.save_plan.written_bytes
            == live_bytes(placement, rank, tensors)
        )
        slots[rank], copied = taken.slot.data, copy_engine.copy_stats.written()
    assert_any_survivors_have_it_all(placement, slots, tensors, f)


def test_ranks_with_different_engines_at_the_same_time():
    tensors = tensors_on("cpu")
    placement = placement_of(TensorIndex(tensors, set()), 4, 2)
    copiers = [CpuCopyEngine([]), CpuCopyEngine([0, 0]), CudaCopyEngine(Inline()), CpuCopyEngine([])]
    members = [Taken(tensors, set(), placement, rank) for rank in range(4)]
    for copy_engine, member in zip(copiers, members, strict=True):
        member.start(copy_engine)
    for copy_engine, member in zip(copiers, members, strict=True):
        copy_engine.fence()
        assert member.ended.wait(20) and member.error is None
        copy_engine.close()
    assert_any_survivors_have_it_all(placement, {r: m.slot.data for r, m in enumerate(members)}, tensors, 2)


def test_on_cuda_leaves_on_the_host_are_in_the_snapshot(monkeypatch):
    """For example step counters, and the state of an offloaded optimizer.

    Some leaves are declared to lie on the host.
    """
    # Staged leaves are gathered before the others, and "turns" is the last leaf.
    staged, others = {"buffer", "turns"}, {"on host", "medium", "small", "gapped", "gapped and turned"}
    monkeypatch.setattr(
        save_plan,
        "_host_resident",
        lambda leaves, _: frozenset(i for i, leaf in enumerate(leaves) if leaf.name in staged | others),
    )
    tensors = tensors_on("cpu") | {"gapped and turned": torch.randn(9, 9)[::2, ::3].t(), "turns": torch.randn(3)}
    for D, f in ((1, 0), (3, 2), (4, 1)):
        placement = placement_of(TensorIndex(tensors, staged), D, f)
        slots = {}
        for rank in range(D):
            copy_engine = CudaCopyEngine(Inline())
            taken = Taken(tensors, staged, placement, rank)
            before = {name: bytes_in(tensors[name]).tobytes() for name in staged}
            taken.start(copy_engine)
            for name in staged:
                tensors[name].add_(1)
            copy_engine.fence()
            assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
            assert before.items() <= taken.inline_leaves.items()
            for name in others if D == 1 else ():
                assert taken.bytes_of(name) == bytes_in(tensors[name]).tobytes(), name
            slots[rank] = taken.slot.data
            copy_engine.close()
        assert_any_survivors_have_it_all(placement, slots, tensors, f)


def test_on_the_host_leaves_on_a_device_are_as_at_the_mark():
    """FSDP2 offloads parameters and moments; buffers and a GradScaler's scale stay there."""
    staged, away = {"buffer", "gapped"}, {"buffer", "gapped", "turned", "medium", "small"}
    for D, f in ((1, 0), (3, 1), (4, 2)):
        before = tensors_on("cpu")
        placement = placement_of(TensorIndex(before, staged), D, f)
        slots = {}
        for rank in range(D):
            tensors = {n: each.as_subclass(Away) if n in away else each for n, each in tensors_on("cpu").items()}
            copy_engine = CpuCopyEngine([0, 0])
            taken = Taken(tensors, staged, placement, rank)
            taken.start(copy_engine)
            for name in away:
                tensors[name].add_(1)  # only the trainer's thread knows the stream in which this runs
            copy_engine.fence()
            assert taken.ended.wait(20) and taken.error is None, taken.error
            assert taken.slot.bad_chunks() == []
            for name in away if D == 1 else ():
                assert taken.bytes_of(name) == bytes_in(before[name]).tobytes(), name
            slots[rank] = taken.slot.data
            copy_engine.close()
        assert_any_survivors_have_it_all(placement, slots, before, f)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_every_bit_pattern_of_a_small_leaf_is_copied(engine, dtype):
    """Arithmetic on elements would change NaNs."""
    copy_engine, device = engine
    patterns = torch.arange(1 << 15, dtype=torch.int32).mul_(0x1_0001 << 1).view(dtype).to(device)
    tensors = {"flat": patterns[:3000], "turned": patterns[:4000].view(40, 100).t(), "other": patterns[3:]}
    taken = Taken(tensors, set()).by(copy_engine)
    for name, tensor in tensors.items():
        assert taken.bytes_of(name) == flat_bytes(tensor).cpu().numpy().tobytes(), name


class CountCalls(TorchDispatchMode):
    """Counts the calls of operators."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_host", [False, True])
def test_on_cuda_a_mark_copies_all_small_leaves_by_one_call(on_host, monkeypatch):
    """A launch for each leaf would cost training some 5 us, and models have 10,000s of them."""
    monkeypatch.setattr(save_plan, "_host_resident", lambda leaves, _: frozenset(range(len(leaves)) if on_host else ()))
    counts = []
    for leaves in (20, 400):
        taken = Taken({f"w{i}": torch.full((i % 50 + 1,), float(i)) for i in range(leaves)}, set())
        copy_engine = CudaCopyEngine(Inline())
        taken.by(copy_engine)  # makes the plan
        taken.begin()
        with CountCalls() as counted:
            taken.start(copy_engine)
        copy_engine.fence()
        assert taken.ended.wait(20) and taken.error is None
        assert all(
            taken.bytes_of(f"w{i}") == bytes_in(torch.full((i % 50 + 1,), float(i))).tobytes() for i in range(leaves)
        )
        counts.append(counted.calls)
    assert counts[0] == counts[1], counts


def test_on_cuda_a_batch_of_copies_enters_the_side_stream_once(monkeypatch):
    """To enter it costs training more time than to enqueue a copy."""
    counts = []
    for nbytes in (100_000, 1_000):
        monkeypatch.setattr(cuda_plan, "TRANSFER_BYTES", nbytes)
        device, entered = Inline(), []
        monkeypatch.setattr(device, "on_side", lambda entered=entered: entered.append(1) or contextlib.nullcontext())
        Taken(tensors_on("cpu"), set()).by(CudaCopyEngine(device))
        counts.append(len(entered))
    assert counts[0] == counts[1], counts


def test_absent_leaves_are_zeros_and_unplanned_ones_are_stored(engine):
    copy_engine, device = engine
    tensors = tensors_on(device)
    placement = placement_of(TensorIndex(tensors, {"buffer"}), 3, 1)
    missing = {"large", "small"}
    grown = {name: tensor for name, tensor in tensors.items() if name not in missing and name != "medium"}
    grown |= {"medium": torch.randn(7, device=device), "new": torch.randn(3000, device=device)}
    slots = {}
    for rank in range(3):
        taken = Taken(grown, {"buffer"}, placement, rank).by(copy_engine)
        assert set(taken.save_plan.absent) == missing and set(taken.save_plan.unplanned) == {"medium", "new"}
        assert taken.slot.bad_chunks() == []
        for name in taken.save_plan.unplanned:
            assert taken.bytes_of(name) == bytes_in(grown[name]).tobytes()
        slots[rank] = taken.slot.data
    in_cells = {name: tensor for name, tensor in grown.items() if name not in ("medium", "new")}
    assert_any_survivors_have_it_all(placement, slots, in_cells, 1)


def test_zeros_are_written_once_into_a_slot_and_again_after_a_failure(engine):
    copy_engine, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, {"buffer"}, placement_of(TensorIndex(tensors, {"buffer"}), 3, 1))
    padding = [slice(offset, offset + size) for offset, size in taken.save_plan.zeros]

    def begin(error: Exception | None) -> None:
        taken.begin()
        if error is not None:
            taken.landed = lambda copied: throw(error)
        taken.start(copy_engine)
        copy_engine.fence()
        assert taken.ended.wait(20) and taken.error is error

    widest = max(padding, key=lambda run: run.stop - run.start)
    begin(ReftError("torn"))
    del taken.landed
    taken.slot.data[:] = 0xA5
    begin(None)
    assert not any(taken.slot.data[run].any() for run in padding), "the first snapshot failed, so zeros were due"
    taken.slot.data[widest] = 1
    begin(None)
    assert (taken.slot.data[widest] == 1).all(), "zeros are not written twice"


def throw(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_a_failure_in_parity_is_reported_and_the_fence_opens(engine):
    copy_engine, device = engine
    tensors = tensors_on(device)
    placement = placement_of(TensorIndex(tensors, set()), 3, 1)
    taken = Taken(tensors, set(), placement)
    assert len(taken.save_plan.columns) > 3

    def at_parity(index: int) -> None:
        if index == 3:
            raise ReftError("failpoint")

    taken.at_parity = at_parity
    taken.start(copy_engine)
    copy_engine.fence()
    assert taken.ended.wait(20) and "failpoint" in str(taken.error)
    assert taken.slot.reread().state is SlotState.WRITING
    Taken(tensors, set(), placement).by(copy_engine)


def test_a_failure_to_seal_is_reported(engine):
    """The fence has been passed by then, so no caller waits for the result."""
    copy_engine, device = engine
    tensors = tensors_on(device)
    placement = placement_of(TensorIndex(tensors, set()), 3, 1)
    taken = Taken(tensors, set(), placement)
    taken.sealed = lambda event: throw(OSError("no space left on device"))
    taken.start(copy_engine)
    copy_engine.fence()
    assert taken.ended.wait(20) and "no space left" in str(taken.error)
    assert taken.slot.reread().state is SlotState.LANDED
    Taken(tensors, set(), placement).by(copy_engine)


def test_the_fence_opens_when_the_next_event_is_asked_for(engine):
    """On the CPU nothing may write the state before the caller has dealt with `CopiedEvent`."""
    copy_engine, device = engine
    taken = Taken(tensors_on(device), set())
    events = copy_engine.begin(taken.order, taken.slot).events(taken.slot)
    copy_engine.hurry()
    assert isinstance(next(events), CopiedEvent)
    fence = threading.Thread(target=copy_engine.fence, daemon=True)
    fence.start()
    if isinstance(copy_engine, CpuCopyEngine):
        until(lambda: copy_engine._current is None)
        assert fence.is_alive()
    events.close()
    fence.join(20)
    assert not fence.is_alive()


def test_on_cuda_a_failed_snapshot_frees_its_memory_at_once(monkeypatch):
    """Trainings turn Python's garbage collection off, and the device may be full."""
    copy_engine, taken = CudaCopyEngine(Inline()), Taken(tensors_on("cpu"), set())
    monkeypatch.setattr(taken, "at_chunk", lambda index: throw(torch.OutOfMemoryError()))
    gc.disable()
    try:
        copy = copy_engine.begin(taken.order, taken.slot)
        copy_engine.fence()
        with pytest.raises(torch.OutOfMemoryError):
            next(copy.events(taken.slot))
        is_freed, copy = weakref.ref(copy), None
        assert is_freed() is None
    finally:
        gc.enable()


def test_a_copy_that_gets_no_slot_opens_the_fence():
    copy_engine = CpuCopyEngine([])
    taken = Taken(tensors_on("cpu"), set())
    copy_engine.begin(taken.order).drop()
    copy_engine.fence()
    assert not taken.chunks
    copy_engine.close()


def test_a_leaf_with_gaps_that_spans_chunks_and_shards():
    """One thread could digest a chunk that another thread has not finished.

    The rest of the leaf would not be copied yet.
    """
    tensors = {"gaps": torch.randn(600, 300)[:, ::2], "after": torch.randn(30000)}
    for D, f in ((1, 0), (3, 1)):
        placement = placement_of(TensorIndex(tensors, set()), D, f)
        slots = {}
        for rank in range(D):
            copy_engine = CpuCopyEngine([0, 0])
            taken = Taken(tensors, set(), placement, rank).by(copy_engine)
            copy_engine.close()
            assert taken.slot.bad_chunks() == []
            slots[rank] = taken.slot.data
            assert D > 1 or taken.bytes_of("gaps") == bytes_in(tensors["gaps"]).tobytes()
        assert_any_survivors_have_it_all(placement, slots, tensors, f)


def test_slots_with_other_chunks_than_the_placement_are_refused(engine):
    copy_engine, device = engine
    taken = Taken(tensors_on(device), set())
    taken.order = replace(taken.order, chunk_bytes=8192)
    with pytest.raises(ReftError, match="chunks of 8192 bytes, the placement of 4096"):
        taken.start(copy_engine)
    Taken(tensors_on(device), set()).by(copy_engine)


def test_no_copy_task_has_chunks_of_parity():
    tensors = tensors_on("cpu")
    copy_engine = CpuCopyEngine([0, 0])
    taken = Taken(tensors, set(), placement_of(TensorIndex(tensors, set()), 4, 2)).by(copy_engine)
    copy_engine.close()
    assert len(taken.save_plan.parity_chunks) > 10
    assert set(taken.chunks) == set(range(taken.slot.chunks)) - set(taken.save_plan.parity_chunks)


@pytest.mark.parametrize("f", [0, 2])
def test_a_task_has_many_chunks_up_to_a_limit(f):
    tensors = {"w": torch.randn(1 << 20), "small": torch.randn(5)}
    save_plan = Taken(tensors, set(), placement_of(TensorIndex(tensors, set()), 4, f)).save_plan
    plan = CpuCopyPlan.of(save_plan, 4096, 1)
    assert all(0 < sum(len(part.chunks) for part in task) <= TASK_BYTES // 4096 for task in plan.tasks)
    covered = [chunk for task in plan.tasks for part in task for chunk in part.chunks]
    assert covered == [chunk for chunk in range(plan.chunks) if chunk not in save_plan.parity_chunks]
    assert len(plan.tasks) <= save_plan.data_bytes // TASK_BYTES + 2 and len(plan.weights) == len(plan.tasks) + len(
        save_plan.columns
    )


@pytest.mark.parametrize("f", [0, 1])
def test_adjacent_chunks_of_one_leaf_are_one_copy(f):
    tensors = {"w": torch.randn(100_000), "b": torch.randn(2048), "c": torch.randn(1024), "d": torch.randn(9)}
    save_plan = Taken(tensors, set(), placement_of(TensorIndex(tensors, set()), 3, f)).save_plan
    plan = CpuCopyPlan.of(save_plan, 4096, 1)
    places = {leaf.name: i for i, leaf in enumerate(save_plan.leaves)}
    for task in plan.tasks:
        for part in task:
            end = min(part.chunks.stop * 4096, save_plan.data_bytes)
            if len(part.chunks) > 1:
                (run,) = part.runs
                assert (run.at, run.nbytes) == (part.chunks.start * 4096, end - part.chunks.start * 4096)
            assert all(part.chunks.start * 4096 <= run.at and run.at + run.nbytes <= end for run in part.runs)
        filled = [part.runs[0] for part in task if len(part.runs) == 1 and part.runs[0].nbytes >= 4096]
        for before, after in itertools.pairwise(filled):
            assert before.leaf != after.leaf or before.begin + before.nbytes != after.begin, "two copies, not one"
    runs = [run for task in plan.tasks for part in task for run in part.runs]
    assert [sum(run.nbytes for run in runs if run.leaf == places[name]) for name in ("w", "d")] == [
        sum(run.nbytes for run in save_plan.runs if run.leaf == places[name]) for name in ("w", "d")
    ]
    assert max(run.nbytes for run in runs) > 8 * 4096


@pytest.mark.parametrize(
    ("data_bytes", "joins"), [(5 * 64, [[0, 1], [2], [3], [4]]), (4 * 64 + 60, [[0, 1], [2], [3, 4]])]
)
def test_parts_are_joined_only_where_one_leaf_fills_both(data_bytes, joins):
    runs = [
        WriteItem(0, 0, 64, 0),
        WriteItem(0, 64, 64, 64),
        WriteItem(1, 128, 64, 128),
        WriteItem(1, 0, 64, 192),
        WriteItem(1, 64, 60, 256),
    ]
    parts = join_parts([CopyPart(range(i, i + 1), [run]) for i, run in enumerate(runs)], 64, data_bytes)
    assert [list(part.chunks) for part in parts] == joins
    assert [run.nbytes for part in parts for run in part.runs] == [sum(runs[i].nbytes for i in each) for each in joins]


def test_threads_share_the_work_evenly():
    tensors = {"w": torch.randn(1 << 22)}
    plan = CpuCopyPlan.of(Taken(tensors, set(), placement_of(TensorIndex(tensors, set()), 4, 1)).save_plan, 4096, 2)
    _, middle, end = plan.bounds(2)
    assert end == len(plan.work) and abs(int(plan.work[middle]) - int(plan.work[-1]) // 2) <= TASK_BYTES


def test_on_cuda_the_fence_is_a_wait_of_the_stream_enqueued_after_the_last_copy():
    device = Inline()
    copy_engine = CudaCopyEngine(device)
    taken = Taken(tensors_on("cpu"), set())
    taken.start(copy_engine)
    copy_engine.fence()
    assert taken.ended.wait(20)
    copy_engine.close()
    order = [entry for entry in device.order if not entry.startswith("host")]
    assert order[:2] == ["record compute", "side waits for compute"], "the side stream waits for gathered leaves"
    last = f"compute waits for side {order.count('record side')}"
    assert order.index(last) > max(i for i, entry in enumerate(order) if entry == "record side")


def test_cell_digests_do_not_depend_on_the_engine():
    tensors = {name: torch.randn(300, 70) for name in ("a", "b")}
    # Behind other bytes, so that a device can't read these bytes as words of 8 bytes.
    tensors["c"] = torch.randn(30_001)[1:]
    placement = placement_of(TensorIndex(tensors, set()), D=2, f=1)
    taken = [
        Taken(tensors, set(), placement, rank).by(engine)
        for rank in range(2)
        for engine in (CpuCopyEngine([]), CudaCopyEngine(Inline()), CudaCopyEngine(Late()))
    ]
    assert taken[0].cells and all(each.cells == taken[0].cells for each in taken)
    other = {**tensors, "b": tensors["b"] + 1}
    assert Taken(other, set(), placement, 1).by(CpuCopyEngine([])).cells != taken[0].cells


@pytest.mark.parametrize("in_whole", [True, False])
def test_every_engine_digests_whole_cells_when_asked_and_else_a_window(engine, in_whole):
    copy_engine, device = engine
    digests = []
    for last in (0.0, 1.0):
        tensors = {"w": torch.zeros(3 * WINDOW_BYTES // 4, device=device)}
        tensors["w"][-1] = last
        taken = Taken(tensors, set(), placement_of(TensorIndex(tensors, set()), D=2, f=1))
        taken.order = replace(taken.order, compares_all=in_whole, step=0)
        digests.append(taken.by(copy_engine).cells)
    assert len(digests[0]) == 1 and (digests[0] != digests[1]) == in_whole


def test_cell_digests_are_of_the_state_before_the_fence(engine):
    copy_engine, device = engine
    cells = []
    for is_written in (False, True):
        tensors = tensors_on(device)
        taken = Taken(tensors, {"buffer"}, placement_of(TensorIndex(tensors, {"buffer"}), D=2, f=1))
        taken.start(copy_engine)
        copy_engine.fence()
        for tensor in tensors.values() if is_written else ():
            tensor.zero_()
        assert taken.ended.wait(20) and taken.error is None
        cells.append(taken.cells)
    assert cells[0] and cells[0] == cells[1]


def many_tensors(device: str) -> dict[str, torch.Tensor]:
    return {f"expert {i}": torch.full((33,), float(i), device=device) for i in range(GRAPH_COPIES)}


def test_thousands_of_small_leaves_are_copied_bit_for_bit_at_each_mark(engine):
    copy_engine, device = engine
    tensors = many_tensors(device)
    taken = Taken(tensors, set())
    for step in range(3):
        for tensor in tensors.values():
            tensor.add_(step)
        taken.begin()
        taken.by(copy_engine)
        for name, tensor in tensors.items():
            assert taken.bytes_of(name) == bytes_in(tensor).tobytes(), name


@pytest.mark.parametrize("is_refused", [False, True])
def test_thousands_of_small_leaves_are_one_graph_made_once_for_a_plan(is_refused, caplog):
    device = Inline()
    if is_refused:  # another thread captures a graph, say

        def refuse(_: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        device.as_graph = refuse
    copy_engine = CudaCopyEngine(device)
    tensors = many_tensors("cpu")
    taken = Taken(tensors, set())
    for _ in range(3):
        taken.begin()
        taken.by(copy_engine)
    copy_engine.close()
    assert all(taken.bytes_of(name) == bytes_in(tensor).tobytes() for name, tensor in tensors.items())
    assert [device.order.count(call) for call in ("capture", "replay")] == ([0, 0] if is_refused else [1, 3])
    assert ("without a CUDA graph" in caplog.text) == is_refused


def test_a_full_device_is_tried_again_only_now_and_then(monkeypatch):
    """Each failed allocation makes torch empty the cache that training uses."""
    copy_engine, tried = CudaCopyEngine(Inline()), []
    taken = Taken(tensors_on("cpu"), set())

    def full(*_: object) -> None:
        tried[-1] = True
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cuda_engine, "plan_transfers", full)
    for _ in range(20):
        tried.append(False)
        with pytest.raises(ReftError, match=r"(?s)no room .* lower REFT_PARITY_SCRATCH_BYTES"):
            taken.start(copy_engine)
        copy_engine.fence()
    assert [mark for mark, has_tried in enumerate(tried) if has_tried] == [0, 1, 2, 4, 8, 16]
    monkeypatch.undo()
    for _ in range(20, 32):
        with pytest.raises(ReftError):
            taken.start(copy_engine)
        copy_engine.fence()
    taken.by(copy_engine)
    copy_engine.close()
