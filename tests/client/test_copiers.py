"""The contract of a copying engine, held by the CPU engine, with one thread and with two, and by the CUDA engine.

One process alone keeps everything; in a group each member writes its data shards and parity, and any D - f members' slots
give the whole state back. What a share is, without an engine, is tested in test_share.py.

Without a GPU the CUDA engine runs on a device that does at once what a stream would do later, and on one that does it as
late as it may; with one, on CUDA as well.
"""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import torch

from reft.client import share, transfers
from reft.client.comparing import samples
from reft.client.copier import CopyJob, CpuCopier, Plan
from reft.client.cuda_copier import CudaCopier
from reft.client.share import Cut, share_of
from reft.client.state import Bindings, flat_bytes, is_dense
from reft.core import coding
from reft.core.cells import divide
from reft.core.course import Course, Stretch
from reft.core.pacing import Tier
from reft.core.placement import Placement, place
from reft.core.slots import SlotState
from reft.core.version import Epoch, Version
from reft.errors import ReftError
from reft.wire.slot_format import Geometry, SlotMap
from tests.support.streams import Inline, Late

VERSION = Version(Epoch(1, bytes(range(16))), 7)


ENGINES = {
    "cpu": lambda: (CpuCopier([]), "cpu"),
    "cpu, two threads": lambda: (CpuCopier([0, 0]), "cpu"),
    "cuda, inline": lambda: (CudaCopier(Inline()), "cpu"),
    "cuda, late": lambda: (CudaCopier(Late()), "cpu"),
    "cuda": lambda: (CudaCopier(), "cuda"),
}


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: the engine runs on the inline device above")
    copier, device = ENGINES[request.param]()
    yield copier, device
    copier.close()


CUT = Cut(4096, 8192, 1 << 20)  # several columns even for small tensors


def placement_of(bindings: Bindings, D: int = 1, f: int = 0, each: int = 1, scheme: str = "aec") -> Placement:
    """D domains with `each` ranks, which all hold the same leaves."""
    layout = bindings.layout()
    division = divide({layout.digest: layout}, [layout.digest] * (D * each))
    return place(division, [rank // each for rank in range(D * each)], scheme, f, 4096)


class Taken:
    """One snapshot taken by an engine, and what it reported."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], staged: set[str], placement: Placement | None = None, rank: int = 0,
        cut: Cut = CUT,
    ) -> None:  # fmt: skip
        bindings = Bindings(tensors, staged)
        self.placement = placement or placement_of(bindings)
        self.share = share_of(self.placement, rank, bindings.layout().leaves, tensors, cut)
        geometry = Geometry(1 << 16, self.share.data_bytes, 4096)
        self.pages = np.zeros(geometry.file_bytes, np.uint8)
        self.slot = SlotMap.create(self.pages, geometry, "job", rank)
        self.slot.data[:] = 0xA5  # of whoever had the slot before
        self.parity: list[int] = []
        self.begin()

    def begin(self) -> None:
        self.slot.begin(VERSION, self.share.digest, self.share.table, self.share.data_bytes)
        self.states: list[SlotState] = []
        self.chunks: list[int] = []
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.riders: dict[str, bytes] = {}
        self.cells: dict[int, int] = {}
        self.job = CopyJob(
            lambda may_wait: self.slot, lambda: None, 4096, self.share, self.at_chunk, self.parity.append, self.intact,
            self.landed, self.sealed, self.failed, lambda: samples(self.share.cells, 1, in_whole=True), self.cells.update,
        )  # fmt: skip

    def by(self, copier) -> Taken:
        """Takes it, to the end."""
        copier.begin(self.job)
        copier.fence()
        assert self.ended.wait(20) and self.error is None, self.error
        return self

    def at_chunk(self, index: int) -> None:
        self.chunks.append(index)
        self.states.append(self.slot.header.state)

    def intact(self) -> None:
        self.states.append(self.slot.header.state)

    def landed(self, riders) -> None:
        self.riders = dict(riders)
        self.slot.put_capsule(b"capsule")
        self.slot.landed()
        self.states.append(self.slot.header.state)

    def sealed(self, digests: np.ndarray) -> None:
        self.slot.sealed(digests)
        self.states.append(self.slot.header.state)
        self.ended.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def bytes_of(self, name: str) -> bytes:
        """Of a rider or a kept leaf."""
        if name in self.riders:
            return self.riders[name]
        leaves = zip(self.share.layout.leaves, self.share.layout.offsets, strict=True)
        leaf, offset = next((leaf, offset) for leaf, offset in leaves if leaf.name == name)
        return self.slot.data[offset : offset + leaf.nbytes].tobytes()


def bytes_in(tensor: torch.Tensor) -> np.ndarray:
    """In the order that a leaf has: that of memory, or row-major if there are gaps."""
    host = tensor.detach().cpu()
    return flat_bytes(host if is_dense(host) else host.contiguous()).numpy()


def tensors_on(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "large": torch.randn(64, 1024, device=device), "turned": torch.randn(700, 50, device=device).t(),
        "small": torch.randn(3, dtype=torch.bfloat16, device=device), "empty": torch.empty(0, 4, device=device),
        "buffer": torch.arange(10, device=device), "on host": torch.tensor(4.0),
        "gapped": torch.randn(9, 9, device=device)[::2, ::3], "medium": torch.randn(20000, device=device),
    }  # fmt: skip


def test_every_byte_lands_and_the_states_come_in_order(engine):
    copier, device = engine
    taken = Taken(tensors_on(device), {"buffer"}).by(copier)
    for name, tensor in tensors_on(device).items():
        assert taken.bytes_of(name) == bytes_in(tensor).tobytes(), name
    assert taken.states[-2:] == [SlotState.LANDED, SlotState.SEALED]
    assert set(taken.states[:-2]) == {SlotState.WRITING}
    assert taken.slot.bad_chunks() == [] and taken.slot.capsule() == b"capsule"
    assert copier.tally.written() == taken.share.written_bytes


@pytest.mark.parametrize("D", [1, 3])
def test_riders_and_staged_leaves_are_as_at_the_mark(engine, D):
    copier, device = engine
    tensors = tensors_on(device) | {"cache": torch.randn(100, 1024, device=device)}  # too large for a capsule
    taken = Taken(tensors, {"buffer", "cache"}, placement_of(Bindings(tensors, {"buffer", "cache"}), D, D - 1))
    assert "cache" not in [taken.share.leaves[i].name for i in taken.share.riders]
    before = {name: bytes_in(tensors[name]).tobytes() for name in ("buffer", "cache")}
    copier.begin(taken.job)
    for name in before:
        tensors[name].add_(1)  # as forward does
    copier.fence()
    assert taken.ended.wait(20) and taken.error is None
    assert {name: taken.bytes_of(name) for name in before} == before


def test_nothing_is_read_after_the_fence(engine):
    copier, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, set())
    before = tensors["large"].cpu().numpy().tobytes()
    copier.begin(taken.job)
    copier.fence()
    tensors["large"].zero_()
    assert taken.ended.wait(20) and taken.error is None
    assert taken.bytes_of("large") == before


def test_a_failure_is_reported_and_the_fence_opens(engine):
    copier, device = engine
    taken = Taken(tensors_on(device), set())

    def torn() -> None:
        raise ReftError("torn")

    taken.job.intact = torn
    copier.begin(taken.job)
    copier.fence()
    assert taken.ended.wait(20) and "torn" in str(taken.error)
    assert taken.slot.reread().state is SlotState.WRITING, "a torn snapshot must not look landed"
    again = Taken(tensors_on(device), set())
    copier.begin(again.job)
    copier.fence()
    assert again.ended.wait(20) and again.error is None


def test_bytes_count_as_what_training_does_when_their_copy_begins(engine):
    copier, device = engine
    copier.enter(1, Tier.GAP)
    first = Taken(tensors_on(device), set()).by(copier)
    assert copier.tally.written(Tier.GAP) == first.share.written_bytes == copier.tally.written()
    copier.enter(2, Tier.COMPUTE)
    second = Taken(tensors_on(device), set()).by(copier)
    assert copier.tally.written(Tier.COMPUTE) == second.share.written_bytes
    assert copier.tally.written() == 2 * copier.tally.written(Tier.GAP)


# Courses


def course_of(*stretches: tuple[Tier, float], bytes_per_s: float = 1e9) -> Course:
    return Course(tuple(Stretch(*each) for each in stretches), bytes_per_s, bytes_per_s, 0.0)


def wait_until(found) -> None:
    deadline = time.monotonic() + 30
    while not found():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


@pytest.mark.parametrize("f", [0, 1])
def test_all_bytes_go_into_a_gap_that_has_room(engine, f):
    copier, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, set(), placement_of(Bindings(tensors, set()), 3, f))
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0), (Tier.COMPUTE, 100.0))
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    assert not taken.chunks and not taken.parity, "before the gap"
    copier.enter(1, Tier.GAP)
    wait_until(lambda: copier.tally.written() == taken.share.written_bytes)
    copier.enter(2, Tier.COMPUTE)
    copier.fence()
    assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
    assert copier.tally.written(Tier.GAP) == taken.share.written_bytes
    assert sorted(taken.parity) == list(range(len(taken.share.columns)))


def test_what_no_stretch_holds_is_copied_at_the_fence(engine):
    copier, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, {"buffer"})
    before = {name: bytes_in(tensor).tobytes() for name, tensor in tensors.items()}
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    copier.fence()
    for name in ("large", "medium"):
        tensors[name].zero_()  # as the optimizer does
    assert taken.ended.wait(20) and taken.error is None
    assert {name: taken.bytes_of(name) for name in before} == before
    assert copier.tally.written(Tier.FENCE) == taken.share.written_bytes


@pytest.mark.parametrize("scratch", [0, 100_000, 10 << 20])
def test_an_overrun_goes_through_scratch_memory_as_far_as_that_goes(scratch, monkeypatch):
    monkeypatch.setattr(transfers, "TRANSFER_BYTES", 50_000)
    device = Late()
    copier = CudaCopier(device, overrun_scratch_bytes=scratch)
    tensors = tensors_on("cpu")
    for _ in range(2):  # the second one must not overtake the first in the scratch
        taken = Taken(tensors, set(), placement_of(Bindings(tensors, set()), 3, 1))
        before = {name: bytes_in(tensor).tobytes() for name, tensor in tensors.items()}
        taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
        copier.begin(taken.job)
        copier.fence()
        for tensor in tensors.values():
            tensor.add_(1)
        assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
        for run in taken.share.runs:
            name = taken.share.leaves[run.leaf].name
            expected = before[name][run.begin : run.begin + run.nbytes]
            assert taken.slot.data[run.at : run.at + run.nbytes].tobytes() == expected, name
    copier.close()


def test_whoever_leaves_the_course_or_waits_for_the_snapshot_gets_it_at_once(engine):
    copier, device = engine
    for leave in (lambda: copier.enter(1, Tier.COLLECTIVE), lambda: copier.enter(5, Tier.COMPUTE), copier.hurry):
        taken = Taken(tensors_on(device), set())
        taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
        copier.enter(0, Tier.COMPUTE)
        copier.begin(taken.job)
        leave()
        assert taken.ended.wait(20) and taken.error is None, "without a fence"
        copier.fence()
    assert copier.tally.written(Tier.FENCE) == 0


def test_a_failure_in_a_gap_is_reported_and_training_goes_on(engine):
    copier, device = engine
    taken = Taken(tensors_on(device), set())
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))

    def at_chunk(index: int) -> None:
        raise ReftError("failpoint")

    taken.job.at_chunk = at_chunk
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    copier.enter(1, Tier.GAP)
    copier.enter(2, Tier.COMPUTE)
    copier.fence()
    assert taken.ended.wait(20) and "failpoint" in str(taken.error)
    Taken(tensors_on(device), set()).by(copier)


@pytest.mark.parametrize("cpus", [[], [0, 0]])
def test_on_the_cpu_a_gap_that_ends_stops_copying_within_one_chunk_of_each_thread(cpus):
    copier = CpuCopier(cpus, clock=lambda: 0.0)
    taken = Taken(tensors_on("cpu"), set())
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0), (Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
    ended, threads = threading.Event(), len(cpus) or 1
    after: list[int] = []

    def at_chunk(index: int) -> None:
        taken.chunks.append(index)
        if ended.is_set():
            after.append(index)
        elif len(taken.chunks) == 5:
            copier.enter(2, Tier.COMPUTE)
            ended.set()

    taken.job.at_chunk = at_chunk
    copier.enter(0, Tier.COMPUTE)
    copier.begin(taken.job)
    copier.enter(1, Tier.GAP)
    for _ in range(2):
        wait_until(lambda: ended.is_set() and len(copier._gate._changed._waiters) == threads)
        assert len(after) <= threads - 1
        copier.enter(2, Tier.COMPUTE)  # wakes them all up
    copier.enter(3, Tier.GAP)
    wait_until(lambda: copier.tally.written() == taken.share.written_bytes)
    copier.fence()
    assert taken.ended.wait(20) and taken.error is None and len(after) > threads
    copier.close()


class Deaf(Late):
    """The mutant: the compute stream does not wait."""

    def compute_waits(self, event):
        pass


class Hasty(CpuCopier):
    """The same on the CPU."""

    def fence(self) -> None:
        pass


@pytest.mark.parametrize("mutant", [lambda: CudaCopier(Deaf()), lambda: Hasty([])])
def test_without_the_wait_of_the_fence_a_snapshot_is_torn(mutant):
    """What test_what_no_stretch_holds_is_copied_at_the_fence would find."""
    copier = mutant()
    tensors = tensors_on("cpu")
    taken = Taken(tensors, set())
    before = bytes_in(tensors["large"]).tobytes()
    taken.job.course = course_of((Tier.COMPUTE, 100.0), (Tier.GAP, 100.0))
    copier.enter(0, Tier.COMPUTE)
    hold = threading.Event()
    copier.submit(lambda: hold.wait(20) and None)  # the worker, or the first byte, is late
    copier.begin(taken.job)
    copier.fence()
    tensors["large"].zero_()
    copier.hurry()
    hold.set()
    assert taken.ended.wait(20)
    assert taken.bytes_of("large") != before
    copier.close()


# Groups


def cell_bytes(placement: Placement, number: int, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """What a cell must hold: live bytes, and zeros between and for absent leaves."""
    cell = placement.division.cells[number]
    whole = np.zeros(cell.nbytes, np.uint8)
    for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
        if leaf.name in tensors:
            whole[offset : offset + leaf.nbytes] = bytes_in(tensors[leaf.name])
    return whole


def gathered(placement: Placement, lane_number: int, slots: dict[int, np.ndarray]) -> np.ndarray:
    """A lane from the slots of some ranks' data, padding included, decoded where a member is missing."""
    lane = placement.lanes[lane_number]
    k, packet = lane.code.k, lane.packet_bytes
    found = {
        (block.stripe, block.shard): slots[rank][block.offset : block.offset + block.nbytes]
        for rank in slots
        for block in placement.part(rank).blocks
        if block.lane == lane_number
    }
    whole = np.zeros((lane.D, k, lane.shard_bytes), np.uint8)
    for stripe in range(lane.D):
        lost = [shard for shard in range(k) if (stripe, shard) not in found]
        for shard in set(range(k)) - set(lost):
            whole[stripe, shard] = found[stripe, shard]
        if lost:
            program = coding.decode_program(
                lane.code, lost, [j for j in range(lane.code.f) if (stripe, k + j) in found]
            )
            inputs = [found[stripe, shard][p * packet : (p + 1) * packet] for shard, p in program.inputs]
            outputs = [whole[stripe, shard][p * packet : (p + 1) * packet] for shard, p in program.outputs]
            coding.run(program, inputs, outputs, [np.empty(packet, np.uint8) for _ in range(program.scratch)])
    return whole.reshape(-1)


def assert_any_survivors_have_it_all(placement: Placement, slots: dict[int, np.ndarray], tensors, f: int) -> None:
    domains = sorted(set(placement.domains))
    for lost in itertools.combinations(domains, f):
        alive = {rank: data for rank, data in slots.items() if placement.domains[rank] not in lost}
        for number, lane in enumerate(placement.lanes):
            expected = np.zeros(lane.padded_bytes, np.uint8)
            expected[: lane.nbytes] = cell_bytes(placement, lane.cell, tensors)[lane.begin : lane.begin + lane.nbytes]
            assert np.array_equal(gathered(placement, number, alive), expected), f"lane {number} without {lost}"


def live_bytes(placement: Placement, rank: int, tensors: dict[str, torch.Tensor]) -> int:
    """Live bytes in a rank's data shards and kept leaves, and its parity, counted without a share."""
    part, total = placement.part(rank), 0
    for block in part.blocks[: part.data_blocks]:
        lane = placement.lanes[block.lane]
        cell = placement.division.cells[lane.cell]
        begin, end = lane.data_range(block.stripe, block.shard)
        end = min(end, lane.begin + lane.nbytes)
        for leaf, offset in zip(cell.leaves, cell.offsets, strict=True):
            if leaf.name in tensors:
                total += max(0, min(end, offset + leaf.nbytes) - max(begin, offset))
    total += sum(block.nbytes for block in part.blocks[part.data_blocks :])
    return total + sum(leaf.nbytes for leaf in part.kept.leaves if leaf.name in tensors)


GROUPS = [(2, 1, 1), (3, 1, 1), (3, 2, 1), (4, 2, 1), (4, 3, 2), (5, 2, 2), (6, 1, 1), (6, 3, 1)]


@pytest.mark.parametrize(("D", "f", "each"), GROUPS)
@pytest.mark.parametrize("scheme", ["aec", "arc"])
def test_any_members_but_f_domains_have_the_whole_state(engine, D, f, each, scheme):
    copier, device = engine
    tensors = tensors_on(device)
    placement = placement_of(Bindings(tensors, {"buffer"}), D, f, each, scheme)
    slots, copied = {}, 0
    for rank in range(D * each):
        taken = Taken(tensors, {"buffer"}, placement, rank).by(copier)
        assert taken.slot.bad_chunks() == [] and taken.riders["buffer"] == bytes_in(tensors["buffer"]).tobytes()
        assert sorted(taken.parity) == list(range(len(taken.share.columns)))
        assert copier.tally.written() - copied == taken.share.written_bytes == live_bytes(placement, rank, tensors)
        slots[rank], copied = taken.slot.data, copier.tally.written()
    assert_any_survivors_have_it_all(placement, slots, tensors, f)


def test_members_with_engines_of_their_own_at_the_same_time():
    tensors = tensors_on("cpu")
    placement = placement_of(Bindings(tensors, set()), 4, 2)
    copiers = [CpuCopier([]), CpuCopier([0, 0]), CudaCopier(Inline()), CpuCopier([])]
    members = [Taken(tensors, set(), placement, rank) for rank in range(4)]
    for copier, member in zip(copiers, members, strict=True):
        copier.begin(member.job)
    for copier, member in zip(copiers, members, strict=True):
        copier.fence()
        assert member.ended.wait(20) and member.error is None
        copier.close()
    assert_any_survivors_have_it_all(placement, {r: m.slot.data for r, m in enumerate(members)}, tensors, 2)


def test_on_cuda_what_lies_on_the_host_takes_part(monkeypatch):
    """Step counters, and the state of an optimizer that was offloaded; where there is no device, leaves play the host's."""
    on_host = {"on host", "buffer", "medium", "small"}
    monkeypatch.setattr(
        share, "_apart", lambda leaves, _: frozenset(i for i, leaf in enumerate(leaves) if leaf.name in on_host)
    )
    tensors = tensors_on("cpu")
    for D, f in ((1, 0), (3, 2), (4, 1)):
        placement = placement_of(Bindings(tensors, {"buffer"}), D, f)
        slots = {}
        for rank in range(D):
            copier = CudaCopier(Inline())
            taken = Taken(tensors, {"buffer"}, placement, rank)
            before = bytes_in(tensors["buffer"]).tobytes()
            copier.begin(taken.job)
            tensors["buffer"].add_(1)
            copier.fence()
            assert taken.ended.wait(20) and taken.error is None and taken.slot.bad_chunks() == []
            assert taken.riders["buffer"] == before
            assert D > 1 or taken.bytes_of("medium") == bytes_in(tensors["medium"]).tobytes()
            slots[rank] = taken.slot.data
            copier.close()
        assert_any_survivors_have_it_all(placement, slots, tensors, f)


def test_absent_leaves_are_zeros_and_extra_ones_are_kept(engine):
    copier, device = engine
    tensors = tensors_on(device)
    placement = placement_of(Bindings(tensors, {"buffer"}), 3, 1)
    missing = {"large", "small"}
    grown = {name: tensor for name, tensor in tensors.items() if name not in missing and name != "medium"}
    grown |= {"medium": torch.randn(7, device=device), "new": torch.randn(3000, device=device)}
    slots = {}
    for rank in range(3):
        taken = Taken(grown, {"buffer"}, placement, rank).by(copier)
        assert set(taken.share.absent) == missing and set(taken.share.extra) == {"medium", "new"}
        assert taken.slot.bad_chunks() == []
        for name in taken.share.extra:
            assert taken.bytes_of(name) == bytes_in(grown[name]).tobytes()
        slots[rank] = taken.slot.data
    in_cells = {name: tensor for name, tensor in grown.items() if name not in ("medium", "new")}
    assert_any_survivors_have_it_all(placement, slots, in_cells, 1)


def test_zeros_are_written_once_into_a_slot_and_again_after_a_failure(engine):
    copier, device = engine
    tensors = tensors_on(device)
    taken = Taken(tensors, {"buffer"}, placement_of(Bindings(tensors, {"buffer"}), 3, 1))
    padding = [slice(offset, offset + size) for offset, size in taken.share.zeros]

    def begin(error: Exception | None) -> None:
        taken.begin()
        taken.job.intact = lambda: throw(error)
        copier.begin(taken.job)
        copier.fence()
        assert taken.ended.wait(20) and taken.error is error

    widest = max(padding, key=lambda run: run.stop - run.start)
    begin(ReftError("torn"))
    taken.slot.data[:] = 0xA5
    begin(None)
    assert not any(taken.slot.data[run].any() for run in padding), "the first one has not landed: zeros were due"
    taken.slot.data[widest] = 1
    begin(None)
    assert (taken.slot.data[widest] == 1).all(), "zeros that are there are not written again"


def throw(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_a_failure_in_parity_is_reported_and_the_fence_opens(engine):
    copier, device = engine
    tensors = tensors_on(device)
    placement = placement_of(Bindings(tensors, set()), 3, 1)
    taken = Taken(tensors, set(), placement)
    assert len(taken.share.columns) > 3

    def at_parity(index: int) -> None:
        if index == 3:
            raise ReftError("failpoint")

    taken.job.at_parity = at_parity
    copier.begin(taken.job)
    copier.fence()
    assert taken.ended.wait(20) and "failpoint" in str(taken.error)
    assert taken.slot.reread().state is SlotState.WRITING
    Taken(tensors, set(), placement).by(copier)


def test_a_leaf_with_gaps_that_spans_chunks_and_shards():
    """Of two threads one could digest a chunk before the other has put the rest of such a leaf into it."""
    tensors = {"gaps": torch.randn(600, 300)[:, ::2], "after": torch.randn(30000)}
    for D, f in ((1, 0), (3, 1)):
        placement = placement_of(Bindings(tensors, set()), D, f)
        slots = {}
        for rank in range(D):
            copier = CpuCopier([0, 0])
            taken = Taken(tensors, set(), placement, rank).by(copier)
            copier.close()
            assert taken.slot.bad_chunks() == []
            slots[rank] = taken.slot.data
            assert D > 1 or taken.bytes_of("gaps") == bytes_in(tensors["gaps"]).tobytes()
        assert_any_survivors_have_it_all(placement, slots, tensors, f)


def test_slots_with_other_chunks_than_the_placement_are_refused(engine):
    copier, device = engine
    taken = Taken(tensors_on(device), set())
    taken.job.chunk_bytes = 8192
    with pytest.raises(ReftError, match="chunks of 8192 bytes, the placement of 4096"):
        copier.begin(taken.job)
    Taken(tensors_on(device), set()).by(copier)


def test_chunks_of_parity_are_not_gone_through_twice():
    tensors = tensors_on("cpu")
    copier = CpuCopier([0, 0])
    taken = Taken(tensors, set(), placement_of(Bindings(tensors, set()), 4, 2)).by(copier)
    copier.close()
    assert len(taken.share.parity_chunks) > 10
    assert set(taken.chunks) == set(range(taken.slot.chunks)) - set(taken.share.parity_chunks)


def test_threads_share_the_work_evenly():
    tensors = {"w": torch.randn(1 << 20)}
    plan = Plan.of(Taken(tensors, set(), placement_of(Bindings(tensors, set()), 4, 1)).share, 4096, 2)
    _, middle, end = plan.bounds(2)
    assert end == len(plan.work) and abs(int(plan.work[middle]) - int(plan.work[-1]) // 2) < 1 << 16


def test_on_cuda_the_fence_is_a_wait_of_the_stream_enqueued_after_the_last_copy():
    device = Inline()
    copier = CudaCopier(device)
    taken = Taken(tensors_on("cpu"), set())
    copier.begin(taken.job)
    copier.fence()
    assert taken.ended.wait(20)
    copier.close()
    order = [entry for entry in device.order if not entry.startswith("host")]
    assert order[:2] == ["record compute", "side waits for compute"], "what was gathered"
    last = f"compute waits for side {order.count('record side')}"
    assert order.index(last) > max(i for i, entry in enumerate(order) if entry == "record side")


def test_replicas_agree_on_their_cells_whatever_the_engine():
    tensors = {name: torch.randn(300, 70) for name in ("a", "b")}
    placement = placement_of(Bindings(tensors, set()), D=2, f=1)
    taken = [
        Taken(tensors, set(), placement, rank).by(engine)
        for rank in range(2)
        for engine in (CpuCopier([]), CudaCopier(Inline()))
    ]
    assert taken[0].cells and all(each.cells == taken[0].cells for each in taken)
    other = {**tensors, "b": tensors["b"] + 1}
    assert Taken(other, set(), placement, 1).by(CpuCopier([])).cells != taken[0].cells
