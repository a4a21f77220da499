"""A rank's snapshots: the capsule, leaves that come and go, slots that are kept, and failures."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from reft.client.schedule.snapshot_window import UNPROTECTED
from reft.client.snapshot.cpu_engine import CpuCopyEngine
from reft.client.snapshot.cuda_engine import CudaCopyEngine
from reft.client.snapshot.rank_slots import RankSlots
from reft.client.snapshot.save_planner import SavePlanner
from reft.client.snapshot.snapshot_thread import NO_SLOT, SnapshotFacts
from reft.client.snapshot.snapshotter import Snapshotter, protection_stats
from reft.client.snapshot.task import SnapshotHistory
from reft.client.state.host_state import HostState
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import place
from reft.core.commit.decision import Decision
from reft.core.commit.pins import Pins
from reft.core.commit.relayout import LayoutOutcome, LayoutReport
from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import Slot, SlotState
from reft.core.commit.snapshot_interval import SnapshotInterval
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import divide
from reft.core.layout.layout import pack
from reft.core.membership.log_debounce import TroubleLog
from reft.core.pipeline.course import PacingPlan, Phase
from reft.core.pipeline.pacing import Tier
from reft.core.status.protection import protection_counts
from reft.errors import NoRoom, ReftError
from reft.failpoints import Failpoints
from reft.wire import capsule_format
from reft.wire.capsule_format import NO_NAMES
from reft.wire.messages import places_from
from reft.wire.slot_format import Geometry, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import until
from tests.support.streams import Inline

OLD, NEW = Epoch(1, b"o" * 16), Epoch(2, b"n" * 16)


class FakeReporter:
    """A reporter without a daemon; the test sets `pins`."""

    is_stale = False

    def __init__(self) -> None:
        self.pins, self.reply = Pins(), pb.ReportReply()
        self.answers: dict[int, tuple[StepAnswer, str]] = {}
        self.answered = threading.Semaphore(0)
        self.news, self.woken, self.waits = 0, threading.Semaphore(0), threading.Event()

    def voids(self, version):
        return False

    def wait_news(self, seen):
        self.waits.set()
        assert self.woken.acquire(timeout=20), "nobody woke the snapshot thread"

    def wait(self, step, deadline_s):
        return True

    def wake(self) -> None:
        self.news += 1
        self.woken.release()

    mismatched = frozenset()
    layout, layout_report = LayoutOutcome(), LayoutReport()
    interval = SnapshotInterval()

    def outcome_delays(self, step):
        return None, 0

    def answer(self, step, answer, trouble="", digests=()) -> None:
        self.answers[step] = (answer, trouble)
        self.answered.release()


class FakeSlots:
    """Slots without a daemon."""

    def __init__(self, count: int, data_bytes: int) -> None:
        self.slots = []
        for index in range(count):
            geometry = Geometry(1 << 16, data_bytes, 4096)
            map_ = SlotMap.create(np.zeros(geometry.file_bytes, np.uint8), geometry, "job", 0)
            slot = SimpleNamespace(index=index, map=map_, descriptor=-1, leave=lambda: None)
            slot.view = lambda slot=slot: Slot(slot.index, slot.map.header.state, slot.map.header.version)
            self.slots.append(slot)


class Rank:
    """One rank of a job of three nodes; only this rank trains."""

    def __init__(self, base: Version | None = None, state=None, copy_engine=None, guard=None, slots=3) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(300, 70), nn.BatchNorm1d(70))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tracked = TrackedObjects({"model.0": self.model}, (self.optimizer,), {})
        self.leaves = pack([*self.tracked.bind().leaves(), *self.tracked.predict(self.tracked.names())]).leaves
        layout = pack(self.leaves)
        division = divide({layout.digest: layout}, [layout.digest] * 3)
        self.placement = place(division, range(3), "aec", 1, 4096)
        self.copy_engine, self.reporter = copy_engine or CpuCopyEngine([]), FakeReporter()
        self.slots = RankSlots(
            FakeSlots(slots, self.placement.rank_placement(0).data_bytes).slots, None, 0, wanted=slots
        )
        self.snapshots = Snapshotter(
            SnapshotFacts(0, NEW, self.placement, NO_NAMES, 0, Failpoints()),
            Decision(NEW, base, guard=guard),
            SavePlanner(self.tracked, self.placement, 0, self.copy_engine.parity_tiling),
            HostState(self.tracked, state or {}), self.copy_engine, self.reporter, self.slots, SnapshotHistory(),
        )  # fmt: skip

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 300)).sum().backward()
        self.optimizer.step()

    def take(self, step: int) -> tuple[StepAnswer, str]:
        self.snapshots.take(step, is_marked=True)
        self.snapshots.fence()
        assert self.reporter.answered.acquire(timeout=20)
        return self.reporter.answers[step]

    def slot(self, step: int) -> SlotMap:
        return next(slot.map for slot in self.slots._slots if slot.map.header.version == Version(NEW, step))


@pytest.fixture
def rank():
    rank = Rank()
    yield rank
    rank.snapshots.thread.close()
    rank.copy_engine.close()


@pytest.mark.parametrize("make_engine", [lambda: CpuCopyEngine([]), lambda: CudaCopyEngine(Inline())])
def test_the_first_snapshots_digest_whole_cells_on_every_engine(make_engine, monkeypatch):
    rank = Rank(copy_engine=make_engine())
    rank.snapshots.facts = replace(rank.snapshots.facts, compares_all_until=2)
    begin, in_whole = rank.copy_engine.begin, []

    def record(order, slot):
        in_whole.append(order.compares_all)
        return begin(order, slot)

    monkeypatch.setattr(rank.copy_engine, "begin", record)
    assert [rank.take(step) for step in (1, 2, 3)] == [(StepAnswer.SEALED, "")] * 3
    assert in_whole == [True, True, False]
    rank.snapshots.thread.close()
    rank.copy_engine.close()


def test_steps_of_a_new_layout_are_void_until_the_round_has_named_their_start(rank, monkeypatch):
    """A rank that has passed the start without hearing of it takes no snapshot, and says the same.

    Once it holds, the first snapshots digest whole cells, at the same steps on each rank.
    """
    rank.snapshots.facts = replace(rank.snapshots.facts, compares_all_for=1)
    begin, in_whole = rank.copy_engine.begin, {}

    def record(order, slot):
        in_whole[order.step] = order.compares_all
        return begin(order, slot)

    monkeypatch.setattr(rank.copy_engine, "begin", record)
    assert [rank.take(step) for step in (5, 6)] == [
        (StepAnswer.VOID, "not all ranks are ready for the new layout.")
    ] * 2
    assert rank.reporter.layout_report.ready == 5, "the round names one start, so each rank keeps its answer"
    rank.reporter.layout = LayoutOutcome(start=8)
    assert [rank.take(step)[0] for step in (7, 8, 9, 10)] == [StepAnswer.VOID, *[StepAnswer.SEALED] * 3]
    assert in_whole == {8: True, 9: True, 10: False}


def test_the_capsule_has_the_inline_leaves_and_the_absent_names(rank):
    assert rank.take(1) == (StepAnswer.SEALED, "")
    before = {name: tensor.numpy().tobytes() for name, tensor in rank.model.named_buffers()}
    slot = rank.slot(1)
    tree = capsule_format.decode(slot.capsule())
    assert {name.removeprefix("model.0."): data for name, data in tree["riders"].items()} == before
    assert len(tree["absent"]) == 12 and all(name.startswith("optimizer.0.") for name in tree["absent"])
    assert set(places_from(slot.table()).values()) == {pb.CELL, pb.INLINE} and not slot.bad_chunks()
    rank.step()
    assert rank.take(2) == (StepAnswer.SEALED, "")
    assert capsule_format.decode(rank.slot(2).capsule())["absent"] == []
    assert rank.slot(2).header.layout != slot.header.layout and rank.slot(2).header.data_bytes == slot.header.data_bytes


def test_a_predicted_save_plan_is_used(rank):
    planner = rank.snapshots.planner = SavePlanner(
        rank.tracked, rank.placement, 0, rank.copy_engine.parity_tiling, rank.leaves
    )
    rank.step()
    rank.take(1)
    plan = planner.current().save_plan
    assert plan.runs is planner._predicted.runs and plan.unplanned == plan.absent == ()
    assert planner.bytes_per_snapshot() == plan.written_bytes + sum(plan.leaves[i].nbytes for i in plan.inline_leaves)


@pytest.mark.parametrize("is_current", [True, False])
def test_the_index_that_a_restore_has_bound_serves_the_first_plan_while_it_is_current(rank, is_current):
    """The first step may make tensors that the restore did not know."""
    if is_current:
        rank.step()
    bound = rank.tracked.bind()
    planner = SavePlanner(rank.tracked, rank.placement, 0, rank.copy_engine.parity_tiling, rank.leaves, bound=bound)
    rank.step()
    plan = planner.current()
    assert (plan.tensor_index is bound) is is_current
    assert {*plan.tensor_index.tensors} == {leaf.name for leaf in rank.leaves}
    assert list(plan.versions) == list(rank.tracked.bind().versions())


def test_without_a_free_slot_at_the_fence_the_snapshot_is_void_at_once(rank):
    rank.step()
    assert [rank.take(step)[0] for step in (1, 2, 3)] == [StepAnswer.SEALED] * 3
    rank.snapshots.take(4, is_marked=True)
    assert rank.reporter.waits.wait(20)
    rank.snapshots.fence()
    assert rank.reporter.answered.acquire(timeout=20)
    answer, trouble = rank.reporter.answers[4]
    assert answer is StepAnswer.VOID and "all slots are in use" in trouble


def test_a_missing_slot_is_said_only_if_it_lasts_and_without_names_of_states(rank, caplog, monkeypatch):
    log, times = TroubleLog(), iter((0.0, 0.9, 1.1, 1.2))
    clocked = SimpleNamespace(heard=lambda trouble, _, lasted_s: log.heard(trouble, next(times), lasted_s))
    rank.step()
    assert [rank.take(step)[0] for step in (1, 2, 3)] == [StepAnswer.SEALED] * 3
    monkeypatch.setattr(rank.snapshots.thread, "_trouble_log", clocked)
    said = []
    for step in (4, 5, 6, 7):
        assert rank.take(step) == (StepAnswer.VOID, NO_SLOT)
        said.append(len(caplog.messages))
    assert said == [0, 0, 1, 1] and caplog.messages == [f"rank 0 skips snapshots: {NO_SLOT} Training goes on."]


def test_a_slot_that_frees_up_in_the_window_is_taken(rank):
    rank.step()
    assert [rank.take(step)[0] for step in (1, 2, 3)] == [StepAnswer.SEALED] * 3
    rank.snapshots.take(4, is_marked=True)
    assert rank.reporter.waits.wait(20)
    rank.reporter.pins = Pins(whole=3)
    rank.reporter.wake()
    assert rank.reporter.answered.acquire(timeout=20), "without a fence"
    rank.snapshots.fence()
    assert rank.reporter.answers[4] == (StepAnswer.SEALED, "")


def test_what_the_optimizer_writes_after_the_fence_tears_no_snapshot():
    """On CUDA the snapshot thread may check the state long after the fence."""
    rank, may_go = Rank(copy_engine=CudaCopyEngine(Inline())), threading.Event()
    rank.step()
    rank.snapshots.thread._thread.submit(lambda: may_go.wait(20) and None)
    rank.snapshots.take(1, is_marked=True)
    rank.snapshots.fence()
    rank.step()
    may_go.set()
    assert rank.reporter.answered.acquire(timeout=20)
    assert rank.reporter.answers[1] == (StepAnswer.SEALED, "")
    rank.snapshots.thread.close()


def test_a_write_in_the_window_voids_the_snapshot(rank):
    rank.step()
    rank.snapshots.engine.enter(0, Tier.COMPUTE)
    plan = PacingPlan((Phase(Tier.COMPUTE, 100.0), Phase(Tier.GAP, 100.0)), 1e9, 1e9, 0.0)
    rank.snapshots.take(1, True, plan)  # copies wait for the fence
    with torch.no_grad():
        rank.model[0].weight.add_(1)
    rank.snapshots.fence()
    assert rank.reporter.answered.acquire(timeout=20)
    answer, trouble = rank.reporter.answers[1]
    assert answer is StepAnswer.VOID and "model.0.0.weight was written between the mark and the next" in trouble


def test_unplanned_leaves_are_logged_and_stored(rank, caplog):
    rank.step()
    rank.take(1)
    rank.model[0].register_buffer("late", torch.randn(4))
    rank.slots._slots[:] = FakeSlots(3, 1 << 20).slots
    with caplog.at_level(logging.WARNING, "reft"):
        assert rank.take(2) == (StepAnswer.SEALED, "")
    assert "attach did not predict 1 leaves, e.g. model.0.0.late. They are lost with their node." in caplog.text
    assert places_from(rank.slot(2).table())["model.0.0.late"] == pb.UNREPLICATED
    caplog.clear()
    rank.take(3)
    assert not caplog.records, "the warning comes once"


def test_a_too_large_capsule_voids_the_snapshot_with_a_reason():
    big = SimpleNamespace(state_dict=lambda: {"x": bytes(2 << 20)}, load_state_dict=None)
    rank = Rank(state={"big": big})
    answer, trouble = rank.take(1)
    assert answer is StepAnswer.VOID and "the capsule has 2" in trouble and "Fix: keep less" in trouble
    rank.snapshots.thread.close()
    rank.copy_engine.close()


def test_a_new_snapshot_of_the_base_step_survives_discard():
    rank = Rank(base=Version(OLD, 7))
    rank.step()
    base_slot = rank.slots._slots[0].map
    base_slot.begin(Version(OLD, 7), b"x" * 16, b"", 0)
    base_slot.landed()
    assert rank.take(7) == (StepAnswer.SEALED, "")
    assert base_slot.header.version == Version(OLD, 7), "the base stays until the new version is whole"
    assert rank.take(8) == (StepAnswer.SEALED, "")
    rank.snapshots.discard(8)
    states = {slot.map.header.version: slot.map.header.state for slot in rank.slots._slots}
    assert states[Version(NEW, 7)] is SlotState.SEALED and Version(NEW, 8) not in states
    rank.snapshots.thread.close()
    rank.copy_engine.close()


def test_old_slots_are_not_used_while_larger_ones_are_leased(rank):
    made, larger = threading.Event(), FakeSlots(3, 1 << 20).slots

    def lease(*sizes):
        made.wait(20)
        return larger

    rank.slots._leases = SimpleNamespace(lease=lease)
    rank.step()
    assert rank.take(1) == (StepAnswer.SEALED, "")
    rank.model[0].register_buffer("late", torch.randn(1 << 10))
    assert rank.take(2)[0] is StepAnswer.VOID
    del rank.model[0].late
    answer, trouble = rank.take(3)
    assert answer is StepAnswer.VOID and "are being made" in trouble, (
        "the old slot fits again, but the daemon may free it at any time"
    )
    made.set()
    rank.slots._thread.join(20)
    assert rank.take(4) == (StepAnswer.SEALED, "") and rank.slots._slots is larger


def test_a_failed_lease_of_larger_slots_is_logged_and_tried_again(rank, caplog):
    refused = threading.Semaphore(0)

    def lease(*sizes):
        refused.release()
        raise NoRoom("the arena is full.")

    rank.slots._leases = SimpleNamespace(lease=lease)
    rank.step()
    rank.model[0].register_buffer("late", torch.randn(1 << 20))
    with caplog.at_level(logging.WARNING, "reft"):
        assert rank.take(1)[0] is StepAnswer.VOID
        rank.slots._thread.join(20)
    assert "rank 0 gets no slots for its new layout: the arena is full." in caplog.text
    assert rank.take(2)[0] is StepAnswer.VOID
    rank.slots._thread.join(20)
    assert refused.acquire(timeout=20) and refused.acquire(timeout=20)
    rank.slots._leases = SimpleNamespace(lease=lambda *sizes: FakeSlots(3, 8 << 20).slots)
    assert rank.take(3)[0] is StepAnswer.VOID
    rank.slots._thread.join(20)
    assert rank.take(4) == (StepAnswer.SEALED, "")


@pytest.mark.parametrize("method", ["begin", "put_capsule", "landed", "sealed"])
def test_a_slot_whose_header_could_not_be_written_is_reported_and_used_again(rank, caplog, monkeypatch, method):
    monkeypatch.setattr(FakeReporter, "voids", lambda _, version: version.step < 5)
    rank.step()
    broken = pytest.MonkeyPatch()
    broken.setattr(SlotMap, method, lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "reft"):
        assert [rank.take(step) for step in (1, 2, 3, 4)] == [(StepAnswer.VOID, "division by zero")] * 4
    (logged,) = caplog.messages
    assert logged.startswith("rank 0 skips snapshots: division by zero Training goes on. (step 1: OPENING +0.0 ms, ")
    assert logged.endswith(" ms)") and "VOID" in logged
    rank.snapshots.thread._note_trouble("the slot is full.\nFix: slots=4")
    assert caplog.messages[-1] == "rank 0 skips snapshots: the slot is full. Training goes on.\nFix: slots=4"
    broken.undo()
    assert [rank.take(step) for step in (5, 6, 7)] == [(StepAnswer.SEALED, "")] * 3


def test_an_object_whose_state_dict_raises_skips_the_snapshot_only(caplog):
    """At attach the object had a state: it is a loader whose worker has died since."""
    loader = SimpleNamespace(state_dict=lambda: {"at": 1}, load_state_dict=lambda state: None)
    rank = Rank(state={"loader": loader})
    rank.step()
    assert rank.take(1) == (StepAnswer.SEALED, "")
    loader.state_dict = lambda: {}["worker"]
    with caplog.at_level(logging.WARNING, "reft"):
        assert rank.take(2) == (StepAnswer.VOID, "KeyError: 'worker'")
    assert "Training goes on" in caplog.text
    loader.state_dict = lambda: {"at": 3}
    assert rank.take(3) == (StepAnswer.SEALED, "")
    rank.snapshots.thread.close()
    rank.copy_engine.close()


def test_memory_that_a_restarted_daemon_refuses_is_logged(rank, caplog):
    rank.reporter.reply.slots_missing = True
    rank.slots._slots[0].descriptor = 7
    rank.slots._leases = SimpleNamespace(give_back=lambda kept: 1 / 0)
    rank.step()
    text = "could not be given the memory of its slots: division by zero"
    with caplog.at_level(logging.WARNING, "reft"):
        rank.take(1)
        until(lambda: text in caplog.text, what="the warning")
    until(lambda: rank.reporter.reply.slots_missing, what="another try at the next mark")
    rank.reporter.wait = lambda step, deadline_s: False
    rank.snapshots.wait(2, 0.2)
    assert rank.reporter.reply.slots_missing


def test_a_daemon_that_is_slow_to_take_memory_back_holds_up_no_snapshot(rank):
    """The fence of a snapshot waits for the snapshot thread, which must not wait for the daemon."""
    is_taken, begun, ended = threading.Event(), [], []

    def give_back(kept):
        begun.append(kept)
        is_taken.wait(10)
        ended.append(kept)

    rank.slots._slots[0].descriptor = 7
    rank.slots._leases = SimpleNamespace(give_back=give_back)
    for step in (1, 2):
        rank.reporter.reply.slots_missing = True
        rank.step()
        assert rank.take(step) == (StepAnswer.SEALED, "")
    assert len(begun) == 1 and not ended, "one at a time, beside the snapshots"
    is_taken.set()
    rank.snapshots.thread.close()
    assert len(ended) == 1, "closing waits: the descriptors are closed next"


def test_waiting_for_a_step_returns_memory_to_a_restarted_daemon(rank):
    returned = []
    rank.reporter.reply.slots_missing = True
    rank.slots._slots[0].descriptor = 7
    rank.slots._leases = SimpleNamespace(give_back=returned.append)
    assert rank.snapshots.wait(1, 20)
    assert [slot.index for slots in returned for slot in slots] == [0] and not rank.reporter.reply.slots_missing


def test_a_new_layout_holds_the_recorder_of_gradients_and_closing_ends_it(rank):
    acts = []
    rank.snapshots.recorder = SimpleNamespace(
        hold=lambda deadline_s: acts.append("hold"), resume=lambda: acts.append("resume"),
        close=lambda: acts.append("close"),
    )  # fmt: skip
    rank.reporter.close = rank.reporter.release = lambda *_: None
    rank.snapshots.hold(20)
    rank.snapshots.resume()
    rank.snapshots.release()
    assert acts == ["hold", "resume", "close"]

    def late(deadline_s: float) -> None:
        raise FutureTimeout

    rank.snapshots.recorder.hold = late
    with pytest.raises(ReftError, match="did not end within"):
        rank.snapshots.hold(0.1)
    assert acts[-1] == "resume", "snapshots and records go on"


def test_memfds_of_records_are_returned_with_those_of_slots(rank):
    returned = []
    rank.slots._slots[0].descriptor = 7
    rank.slots._records = [SimpleNamespace(index=0, descriptor=8), SimpleNamespace(index=1, descriptor=-1)]
    rank.slots._leases = SimpleNamespace(give_back=returned.append)
    rank.slots.give_back()
    assert [[slot.descriptor for slot in slots] for slots in returned] == [[7, 8]]
    rank.slots._records = []


def test_a_pinned_slot_is_never_written_again():
    """Whole, turn and protected fill three slots: the rank answers void until the turn ends."""
    rank = Rank(slots=3)
    rank.step()
    assert [rank.take(step)[0] for step in (1, 2, 3)] == [StepAnswer.SEALED] * 3
    rank.reporter.pins = Pins(2, whole=3, turn=2, protected=1)
    rank.snapshots.take(4, is_marked=True)
    assert rank.reporter.waits.wait(20)
    rank.snapshots.fence()
    assert rank.reporter.answered.acquire(timeout=20)
    assert rank.reporter.answers[4][0] is StepAnswer.VOID
    assert rank.snapshots.cadence_facts(5).slots == 1
    rank.reporter.pins = Pins(3, whole=3, protected=2)
    assert rank.snapshots.cadence_facts(5).slots == 2
    assert rank.take(5) == (StepAnswer.SEALED, "")
    assert {slot.map.header.version.step for slot in rank.slots._slots} == {2, 3, 5}
    rank.snapshots.thread.close()
    rank.copy_engine.close()


def test_the_guard_stays_until_a_step_is_protected():
    rank = Rank(base=Version(OLD, 7), guard=Version(OLD, 5), slots=4)
    for slot, version in zip(rank.slots._slots[:2], (Version(OLD, 5), Version(OLD, 7)), strict=True):
        slot.map.begin(version, b"x" * 16, b"", 0)
        slot.map.landed()
    rank.step()
    held = []
    for step, pins in ((8, Pins()), (9, Pins()), (10, Pins(whole=9)), (11, Pins(1, 10, 10)), (12, Pins(2, 11, 11, 10))):
        rank.reporter.pins = pins
        assert rank.take(step) == (StepAnswer.SEALED, "")
        held.append({slot.map.header.version.step for slot in rank.slots._slots if slot.map.header.version})
    assert held == [{5, 7, 8}, {5, 7, 8, 9}, {5, 8, 9, 10}, {5, 9, 10, 11}, {9, 10, 11, 12}]
    rank.snapshots.thread.close()
    rank.copy_engine.close()


def test_a_step_of_exchanged_state_is_protected_once_its_turn_has_ended(rank):
    own = [pack([replace(leaf, global_offset=(7 * i,) * len(leaf.shape)) for leaf in rank.leaves]) for i in range(2)]
    division = divide({layout.digest: layout for layout in own}, [layout.digest for layout in own])
    exchanging = place(division, range(2), "auto", 1, 4096, slots=4)
    assert exchanging.guard_lanes and not rank.placement.guard_lanes
    assert rank.snapshots.is_protected(5), "replicas are protected with the step itself"
    rank.snapshots.facts = replace(rank.snapshots.facts, placement=exchanging)
    rank.reporter.pins = Pins(3, whole=5, turn=5, protected=4)
    assert rank.snapshots.is_protected(4) and not rank.snapshots.is_protected(5)
    rank.reporter.pins = Pins(4, whole=5, protected=5)
    assert rank.snapshots.is_protected(5)
    rank.reporter.pins = Pins(5, whole=5, protected=5, is_exposed=True)
    assert not rank.snapshots.is_protected(5), "a lane was left out of the step's turn"
    rank.snapshots.facts = replace(rank.snapshots.facts, placement=replace(exchanging, slots=3))
    assert not rank.snapshots.is_protected(5), "with three slots nothing is exchanged"


def test_a_turn_is_timed_by_the_pins_that_are_known_at_snapshots(rank):
    meter = rank.snapshots.history.turn_meter
    for step, pins, is_timed in [
        (1, Pins(1, turn=1), False),
        (2, Pins(1, turn=1), False),
        (3, Pins(2, protected=1), True),
    ]:
        rank.reporter.pins = pins
        rank.take(step)
        assert (meter.last_s > 0) == is_timed
        rank.step()


def test_stats_say_what_is_protected_and_how(rank):
    own = [pack([replace(leaf, global_offset=(7 * i,) * len(leaf.shape)) for leaf in rank.leaves]) for i in range(2)]
    division = divide({layout.digest: layout for layout in own}, [layout.digest for layout in own])
    exchanging = place(division, range(2), "auto", 1, 4096, slots=4)
    rank.reporter.pins = Pins(3, whole=5, protected=4)
    rank.snapshots.history.turn_meter.last_s = 1.5
    stats = protection_stats(rank.snapshots)
    assert (stats["aec_bytes"] > 0, stats["exchange_bytes"], stats["protected_step"]) == (
        True,
        0,
        rank.snapshots.whole_step,
    )
    rank.snapshots.facts = replace(rank.snapshots.facts, placement=exchanging)
    stats = protection_stats(rank.snapshots)
    assert stats == protection_counts(exchanging, 0) | {"protected_step": 4, "turn_s": 1.5}
    assert set(stats) == set(UNPROTECTED), "also without snapshots"
    rank.reporter.pins = Pins(4, whole=5, protected=5, is_exposed=True)
    assert protection_stats(rank.snapshots)["protected_step"] == -1, "a lane was left out of the step's turn"
    rank.reporter.pins = Pins(3, whole=5, protected=4)
    rank.snapshots.facts = replace(rank.snapshots.facts, placement=replace(exchanging, slots=3))
    stats = protection_stats(rank.snapshots)
    assert stats["none_bytes"] > 0 and stats["protected_step"] == -1
