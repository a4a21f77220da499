"""Tests gradient records: each mark's gradients are kept bit for bit, or the mark is a gap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
import torch

from reft.client.records.record_copy import DeviceRecordCopy, HostRecordCopy
from reft.client.records.record_plan import plan_records
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.commit.gradient_records import RecordDigests, chain_gap
from reft.core.commit.pins import Pins
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch
from reft.errors import UnsupportedState
from reft.wire.record_format import NO_PARAMETER, NO_RECORD
from tests.support.gradient_records import CHUNK, RecordingRank, gradient_of, parameter_of, tensor_of
from tests.support.streams import Inline, Late

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OWNED = {"model.0.p1", "model.0.p3", "model.0.p5"}


@pytest.fixture
def made() -> Iterator[Callable[..., RecordingRank]]:
    ranks: list[RecordingRank] = []

    def make(*arguments: Any, **values: Any) -> RecordingRank:
        ranks.append(RecordingRank(*arguments, **values))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def assert_recorded(rank: RecordingRank, mark: int) -> None:
    """Asserts that a mark's record has the gradients, parameters and values of the last step."""
    record, _, slot = rank.records()[mark]
    (update,) = record.updates
    assert (record.mark, update.optimizer, update.kind) == (mark, "optimizer.0", type(rank.optimizer).__name__)
    keys = rank.optimizer.defaults.keys()
    assert update.groups == tuple({key: group[key] for key in keys} for group in rank.optimizer.param_groups)
    assert {leaf.name for leaf in update.leaves} == OWNED & rank.seen.keys()
    for leaf in update.leaves:
        gradient, parameter = rank.seen[leaf.name]
        assert leaf.owner == 1 and gradient_of(leaf, slot) == gradient
        member = rank.parameters[rank.names.index(leaf.name)]
        group = rank.optimizer.param_groups[leaf.group]
        assert any(each is member for each in group["params"])
        reads = group["weight_decay"] and update.kind != "AdamW"
        assert parameter_of(leaf, slot) == parameter if reads else leaf.param_offset == NO_PARAMETER


OPTIMIZERS = [
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (AdamW, {"foreach": False}),
    (AdamW, {"fused": True}),
]


@pytest.mark.parametrize(("kind", "values"), OPTIMIZERS)
def test_each_mark_is_recorded_bit_for_bit(made, kind, values):
    rank = made(kind, **values)
    for mark in range(1, 6):
        rank.step()
        rank.mark()
        rank.protect()
        assert_recorded(rank, mark)
    assert rank.recorder.stats() == {
        "records": 5, "records_torn": 0, "records_missed": 0, "record_bytes": rank.plan.layout.data_bytes,
        "recorded_mark": 5,
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), OPTIMIZERS)
def test_the_state_of_the_owner_follows_from_the_records(made, kind, values):
    """torch's own optimizer, fed from records alone, makes the moments of undisturbed training."""
    rank = made(kind, groups=2, **values)
    twins: dict[str, Any] = {}
    for mark in range(1, 7):
        for group in rank.optimizer.param_groups:
            group["lr"] *= 0.9
        rank.backward()
        torch.nn.utils.clip_grad_norm_(rank.parameters, 0.5)
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        rank.mark()
        rank.protect()
        record, _, slot = rank.records()[mark]
        (update,) = record.updates
        for leaf in update.leaves:
            if leaf.name not in twins:
                parameter = torch.nn.Parameter(torch.zeros(leaf.shape))
                twins[leaf.name] = parameter, getattr(torch.optim, update.kind)([parameter], lr=0.0)
            parameter, optimizer = twins[leaf.name]
            parameter.grad = tensor_of(gradient_of(leaf, slot), leaf)
            optimizer.param_groups[0].update(update.groups[leaf.group])
            if leaf.param_offset != NO_PARAMETER:
                parameter.data = tensor_of(parameter_of(leaf, slot), leaf)
            optimizer.step()
    assert twins.keys() == OWNED
    for name, (parameter, optimizer) in twins.items():
        own = rank.optimizer.state[rank.parameters[rank.names.index(name)]]
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, own[key]), (name, key)


def test_gradients_are_those_after_clipping_and_accumulation(made):
    rank = made(AdamW)
    for mark in range(1, 4):
        rank.backward()
        rank.backward()
        torch.nn.utils.clip_grad_norm_(rank.parameters, 0.1)
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        rank.mark()
        assert_recorded(rank, mark)


def test_a_step_that_a_scaler_skips_gives_a_record_without_updates(made):
    rank = made(Adam)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))  # makes the scale
    for mark, factor in ((1, 1.0), (2, float("inf")), (3, 1.0)):
        rank.backward(float(scaler.get_scale()) * factor)
        scaler.step(rank.optimizer)
        scaler.update()
        rank.optimizer.zero_grad()
        rank.mark()
        if factor == 1.0:
            assert_recorded(rank, mark)
    record, _, slot = rank.records()[2]
    assert record.updates == () and slot.header.data_bytes == 0
    assert chained(rank, 0, 3) == ""


def test_a_parameter_without_a_gradient_is_left_out_and_its_place_is_zeros(made):
    rank = made(AdamW, shapes=((40, 30), (30,), (3000,), (70, 20), (1,), (9000,)))
    rank.parameters[3].requires_grad_(requires_grad=False)
    rank.step()
    rank.mark()
    assert_recorded(rank, 1)
    record, _, slot = rank.records()[1]
    assert {leaf.name for leaf in record.updates[0].leaves} == OWNED - {"model.0.p3"}
    used = [(leaf.offset, leaf.offset + leaf.nbytes) for leaf in record.updates[0].leaves]
    data = slot.data[: slot.header.data_bytes].copy()
    for begin, end in used:
        data[begin:end] = 0
    assert not data.any()


def chained(rank: RecordingRank, protected: int, turn: int) -> str:
    links = {mark: RecordDigests(record.previous, digest) for mark, (record, digest, _) in rank.records().items()}
    return chain_gap(links, protected, turn)


def test_records_form_a_chain(made):
    rank = made(SGD, momentum=0.9)
    for _ in range(4):
        rank.step()
        rank.mark()
    records = rank.records()
    assert records[1][0].previous == NO_RECORD
    assert [records[mark][0].previous for mark in (2, 3, 4)] == [records[mark][1] for mark in (1, 2, 3)]
    assert chained(rank, 0, 4) == ""


def test_several_optimizers_step_in_some_marks_each(made):
    rank = made(AdamW, optimizers=2)
    steps: dict[int, tuple[int, ...]] = {1: (0, 1), 2: (1,), 3: (), 4: (1, 0)}
    for indexes in steps.values():
        rank.backward()
        for index in indexes:
            rank.optimizers[index].step()
        rank.mark()
    records = rank.records()
    for mark, indexes in steps.items():
        record, _, slot = records[mark]
        assert [update.optimizer for update in record.updates] == [f"optimizer.{index}" for index in indexes]
        names = {leaf.name for update in record.updates for leaf in update.leaves}
        assert names == {item.name for item in rank.plan.layout.items if item.optimizer in indexes}
        for leaf in (leaf for update in record.updates for leaf in update.leaves):
            assert mark < 4 or gradient_of(leaf, slot) == rank.seen[leaf.name][0]
    first, end = rank.plan.layout.parts[0]
    assert not records[2][2].data[first * CHUNK : end * CHUNK].any(), "what has not stepped is zeros"
    assert chained(rank, 0, 4) == ""


# Gaps


class SlowCopy(HostRecordCopy):
    """A copy that lasts until `may_go` is set."""

    def __init__(self) -> None:
        self.may_go, self.has_begun = threading.Event(), threading.Event()

    def copy(self, *arguments: Any) -> list[int]:
        self.has_begun.set()
        assert self.may_go.wait(20)
        return super().copy(*arguments)


def test_a_gradient_that_is_overwritten_tears_the_record_and_later_ones_are_cloned(made, caplog):
    slow = SlowCopy()
    rank = made(AdamW, copy=slow)
    rank.step(set_to_none=False)
    rank.recorder.mark(1, calls_hooks=True)
    slow.may_go.set()
    rank.wait()
    assert rank.records() == {} and rank.recorder.stats()["records_torn"] == 1
    assert "written before it was copied" in caplog.text
    rank.step_number = 1
    for mark in (2, 3):
        slow.may_go.clear()
        rank.step(set_to_none=False)
        rank.recorder.mark(mark, calls_hooks=True)
        slow.may_go.set()
        rank.wait()
        assert_recorded(rank, mark)
    assert rank.records()[2][0].previous == NO_RECORD and chained(rank, 1, 3) == ""
    assert rank.recorder.stats()["records_torn"] == 1


@pytest.mark.parametrize("device", [Inline, Late])
def test_a_device_copies_the_same_bytes_on_its_side_stream(made, device):
    rank = made(Adam, copy=DeviceRecordCopy(device()), weight_decay=0.1)
    rank.parameters[3].requires_grad_(requires_grad=False)
    for mark in range(1, 4):
        rank.step()
        rank.mark()
        assert_recorded(rank, mark)
    host = made(Adam, weight_decay=0.1)
    host.parameters[3].requires_grad_(requires_grad=False)
    for _ in range(3):
        host.step()
        host.mark()
    assert {mark: digest for mark, (_, digest, _) in rank.records().items()} == {
        mark: digest for mark, (_, digest, _) in host.records().items()
    }


def test_gradients_in_a_bucket_are_cloned_at_once(made):
    """As DDP keeps them with gradient_as_bucket_view."""
    slow = SlowCopy()
    rank = made(AdamW, copy=slow)
    bucket = torch.zeros(sum(each.numel() for each in rank.parameters))
    begin = 0
    for each in rank.parameters:
        each.grad = bucket[begin : begin + each.numel()].view(each.shape)
        begin += each.numel()
    rank.backward()
    rank.optimizer.step()
    bucket.fill_(7.0)
    rank.recorder.mark(1, calls_hooks=True)
    slow.may_go.set()
    rank.wait()
    assert_recorded(rank, 1)


def test_training_waits_for_no_copy_and_at_most_two_marks_are_held(made):
    slow = SlowCopy()
    rank = made(AdamW, copy=slow)
    for mark in range(1, 7):
        rank.step()
        rank.recorder.mark(mark, calls_hooks=True)
    slow.may_go.set()
    rank.wait()
    assert sorted(rank.records()) == [1, 2]
    assert rank.recorder.stats()["records_missed"] == 4
    rank.step_number = 6
    rank.step()
    rank.mark()
    assert rank.records()[7][0].previous == NO_RECORD


def test_without_a_free_slot_the_mark_is_a_gap_until_a_step_is_protected(made, caplog):
    rank = made(AdamW)
    rank.reporter.pins = Pins(0, 0, -1, 0)
    for _ in range(6):
        rank.step()
        rank.mark()
    assert sorted(rank.records()) == [1, 2, 3, 4]
    assert rank.recorder.stats()["records_missed"] == 2 and "all 4 record slots are kept" in caplog.text
    rank.reporter.pins = Pins(0, 6, -1, 2)
    rank.step()
    rank.mark()
    assert sorted(rank.records())[-1] == 7, "with the gap at 5, no turn folds the records before it"
    rank.protect()
    caplog.clear()
    rank.step()
    rank.mark()
    assert_recorded(rank, 8)
    assert rank.records()[8][0].previous == rank.records()[7][1]


def test_nothing_is_recorded_once_no_turn_folds_records(made):
    rank = made(AdamW)
    rank.step()
    rank.mark()
    rank.reporter.reply.records_over = True
    rank.writer.add = lambda update: pytest.fail("a gradient is held")
    for _ in range(3):
        rank.step()
        rank.mark()
    assert sorted(rank.records()) == [1]
    assert rank.recorder.stats()["records_missed"] == 0


def test_two_steps_of_an_optimizer_in_a_mark_are_a_gap(made):
    rank = made(AdamW)
    rank.step()
    rank.step()
    rank.mark()
    assert rank.records() == {} and "more than once" in rank.writer.counts.reason
    rank.step()
    rank.mark()
    assert_recorded(rank, 2)


def test_a_mark_whose_steps_call_no_hooks_is_a_gap(made):
    rank = made(AdamW)
    rank.mark(calls_hooks=False)
    assert rank.records() == {} and "no hooks" in rank.writer.counts.reason


def test_after_a_mark_that_does_not_follow_the_mark_is_a_gap(made):
    """As when calls of the optimizer were counted, until the first mark came."""
    rank = made(AdamW)
    for _ in range(2):
        rank.step()
        rank.mark()
    rank.step()
    rank.step_number = 0
    rank.mark()
    assert "mark 1 follows mark 2" in rank.writer.counts.reason
    assert rank.records() == {}, "they have marks that are counted anew"
    rank.step()
    rank.mark()
    assert_recorded(rank, 2)
    assert rank.records()[2][0].previous == NO_RECORD
    rank.step()
    rank.mark()
    assert chained(rank, 1, 3) == "" and chained(rank, 0, 3) != ""


def test_recording_begins_behind_the_first_mark_if_the_steps_before_are_unknown(made):
    rank = made(AdamW, mark=None)
    rank.step_number = 6
    rank.step()
    rank.mark()
    assert rank.records() == {} and rank.recorder.stats()["records_missed"] == 0
    rank.step()
    rank.mark()
    assert_recorded(rank, 8)


def test_records_of_an_earlier_epoch_are_written_on(made):
    earlier = made(AdamW, epoch=Epoch(2, b"2" * 16))
    for _ in range(4):
        earlier.step()
        earlier.mark()
    rank = made(AdamW, slots=earlier.slots)
    rank.reporter.pins = Pins(0, 0, -1, 0)
    assert rank.records() == {}
    rank.step()
    rank.mark()
    assert_recorded(rank, 1)


def test_a_record_that_a_dead_trainer_left_open_is_written_on(made):
    rank = made(AdamW, count=1)
    rank.reporter.pins = Pins(0, 0, -1, 0)
    rank.step()
    rank.wait()
    assert rank.slots[0].map.header.state is SlotState.WRITING and rank.records() == {}
    again = made(AdamW, slots=rank.slots)
    again.step()
    again.mark()
    assert_recorded(again, 1)


def test_nothing_is_written_once_a_newer_attach_owns_the_job(made):
    rank = made(AdamW)
    rank.reporter.is_stale = True
    rank.step()
    rank.mark()
    assert all(slot.map.header.state is SlotState.EMPTY for slot in rank.slots)
    assert "a newer attach" in rank.writer.counts.reason


# A new layout


def test_a_held_recorder_writes_nothing_and_goes_on_after_the_next_mark(made):
    rank = made(AdamW)
    rank.step()
    rank.mark()
    rank.step()
    rank.recorder.hold(20)
    rank.mark()
    rank.step()
    assert sorted(rank.records()) == [1]
    rank.recorder.resume()
    rank.mark()
    assert sorted(rank.records()) == [1] and "a new layout" in rank.writer.counts.reason
    rank.step()
    rank.mark()
    assert_recorded(rank, 4)
    rank.recorder.hold(20)
    rank.recorder.close()
    rank.step()
    rank.step_number += 1
    rank.recorder.mark(rank.step_number, calls_hooks=True)


def test_hold_ends_after_its_deadline(made):
    slow = SlowCopy()
    rank = made(AdamW, copy=slow)
    rank.step()
    assert slow.has_begun.wait(20)
    with pytest.raises(FutureTimeout):
        rank.recorder.hold(0.01)
    slow.may_go.set()


# Failures never reach training


class BrokenCopy(HostRecordCopy):
    """A copy that fails."""

    def copy(self, *arguments: Any) -> list[int]:
        raise OSError("the slot's file was cut")


def test_a_failure_of_the_copy_is_a_gap(made):
    rank = made(AdamW, copy=BrokenCopy())
    rank.step()
    rank.mark()
    assert rank.writer.counts.missed == 1 and "the slot's file was cut" in rank.writer.counts.reason


def test_a_failure_in_the_hook_is_a_gap(made, monkeypatch):
    rank = made(AdamW)
    monkeypatch.setattr(rank.copy, "ready", lambda: 1 / 0, raising=False)
    rank.step()
    rank.mark()
    assert rank.writer.counts.missed == 1 and "ZeroDivisionError" in rank.writer.counts.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rank: rank.optimizer.param_groups[0].update(lr=torch.tensor(0.1)), "lr of the optimizer's group"),
        (lambda rank: rank.optimizer.param_groups[0].update(weight_decay=0.5), "began after attach"),
        (lambda rank: setattr(rank.optimizer, "found_inf", torch.zeros(1)), "GradScaler"),
        (
            lambda rank: setattr(rank.parameters[3], "grad", rank.parameters[3].grad.t().contiguous().t()),
            "does not lie",
        ),
    ],
)
def test_what_a_record_can_not_hold_is_a_gap(made, change, reason):
    rank = made(Adam, fused=False)
    rank.backward()
    change(rank)
    rank.recorder.before_step(0)
    rank.mark()
    assert rank.records() == {} and reason in rank.writer.counts.reason


def test_an_optimizer_of_another_package_is_a_gap(made):
    class Own(Adam):
        pass

    Own.__module__ = "mine"
    rank = made(Own)
    rank.step()
    rank.mark()
    assert rank.records() == {} and "not one of torch's own" in rank.writer.counts.reason


def test_a_section_that_gradients_do_not_explain_is_refused(made):
    rank = made(AdamW)
    assert [item.name for item in rank.plan.layout.items] == sorted(OWNED)
    fewer = torch.optim.AdamW([each for i, each in enumerate(rank.parameters) if i != 1])
    tracked = TrackedObjects({"model.0": rank.model}, (fewer,), {})
    with pytest.raises(UnsupportedState, match=r"model.0.p1 of rank 1 can't be recomputed"):
        plan_records(rank.placement, 0, [1], tracked)
