"""Tests of the session in a user's loop: steps, marks, window and fence."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import reft
from reft import errors
from reft.client.memory import streaming
from reft.client.session import _finish_at_exit
from reft.client.snapshot.cpu_engine import CpuCopyEngine
from reft.config import Config
from reft.core.pipeline.pacing import Tier
from reft.wire import timeline_socket
from reft.wire.v1 import daemon_pb2 as pb
from tests.client.attach.test_run import make
from tests.scenarios.test_state_kinds import state_bytes, step_once, train
from tests.support.daemons import DaemonProcess, until


def test_steps_are_marked_iterations(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    seen = []
    for step in session.steps(4):
        seen.append((step, session.step))
        step_once(model, optimizer)
        step_once(model, optimizer)  # two optimizer calls, one step
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)] and session.step == 4
    assert session.seal(timeout=60).step == 4


def test_a_finished_job_that_is_run_again_says_so(attach, capsys):
    model, optimizer = make()
    for _ in (session := attach(model, optimizer)).steps(3):
        step_once(model, optimizer)
    session.seal(timeout=60)
    assert "has completed all" not in capsys.readouterr().err

    again = attach(*make())
    assert list(again.steps(3)) == []
    said = capsys.readouterr().err
    assert "has completed all 3 steps of this loop: step 3 was restored, and the loop trains nothing." in said
    assert "To train from step 0: reft-cli purge job-" in said
    assert next(again.steps(4)) == 3 and "has completed all" not in capsys.readouterr().err


def test_step_end_marks_a_step(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(5):
        step_once(model, optimizer)
        session.step_end()
    assert session.step == 5 and session.seal(timeout=60).step == 5


def test_without_marks_each_call_of_the_optimizer_is_a_step(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(5):
        step_once(model, optimizer)
    assert session.step == 5 and session.seal(timeout=60)
    expected = state_bytes(model, optimizer)
    other, another = make()
    session = attach(other, another)
    assert session.step == 5 and state_bytes(other, another) == expected
    with pytest.raises(errors.RestoreError, match="counted calls of the optimizer as steps"):
        next(session.steps(9))


def test_calls_before_the_first_mark_are_discarded(attach):
    """Several calls in one marked step: steps counted by calls never become marked steps."""
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(3):
        step_once(model, optimizer)
    session.step_end()
    assert session.step == 1
    for _ in range(9):
        step_once(model, optimizer)
        session.step_end()
    assert session.seal(timeout=60).step == 10
    assert attach(*make()).step == 10


def test_a_run_without_its_first_mark_is_refused_with_a_remedy(attach):
    """The loop calls the optimizer several times a step, and never finished its first step."""
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(3):
        step_once(model, optimizer)
    assert session.seal(timeout=60)
    session = attach(*make())
    with pytest.raises(
        errors.RestoreError, match=r"(?s)reft-cli purge job-.*session\.begin_marking\(\) right after attach"
    ):
        session.step_end()


def test_a_subclass_that_calls_its_parents_step_counts_one_step(attach):
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.clamp_(-1, 1)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    model = nn.Linear(4, 4)
    optimizer = Twice(model.parameters(), lr=0.1)
    session = attach(model, optimizer)
    for _ in range(4):
        step_once(model, optimizer)
    assert session.step == 4


class Twice(torch.optim.SGD):
    """Calls the parent's step, which also calls the hooks; raises an error on request."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("kind", [torch.optim.SGD, Twice])
def test_a_step_that_raises_does_not_count_and_later_steps_do(attach, kind):
    """A loop may catch an out-of-memory error, and go on with a smaller batch."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch wraps a class's step when its first object is made
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    session = attach(model, optimizer)
    for call in range(6):
        broken = pytest.MonkeyPatch()
        if call == 2:
            broken.setattr(Twice, "fails", True)
            broken.setattr(torch.optim.SGD, "_init_group", lambda *_: 1 / 0)
        with contextlib.suppress(RuntimeError, ZeroDivisionError):
            step_once(model, optimizer)
        broken.undo()
    assert session.step == 5 and session.seal(timeout=60).step == 5


def test_torch_compile_does_not_compile_the_hooks(attach):
    """Otherwise the compiler traces some 200 functions of marks and hooks, and warns of most."""
    model, optimizer = make()
    session = attach(model, optimizer)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        compiled()
    assert session.step == 4 and session.seal(timeout=60)
    assert 0 < torch._dynamo.utils.counters["frames"]["total"] < 10
    other, another = make()
    assert attach(other, another).step == 4 and state_bytes(other, another) == state_bytes(model, optimizer)


def test_seal_takes_a_step_that_is_not_due(attach):
    model, optimizer = make()
    session = attach(model, optimizer, every=3)
    for _ in session.steps(8):
        step_once(model, optimizer)
    assert session.stats()["snapshots"] in (1, 2)
    assert session.seal(timeout=60).step == 8


def test_a_snapshot_with_a_write_in_its_window_is_discarded(attach, monkeypatch, caplog):
    model, optimizer = make()
    session = attach(model, optimizer)
    train(session, model, optimizer)
    original = CpuCopyEngine._run_tasks

    def scribble(self, *arguments):
        original(self, *arguments)
        with torch.no_grad():
            model.weight.add_(1)

    monkeypatch.setattr(CpuCopyEngine, "_run_tasks", scribble)
    with caplog.at_level(logging.WARNING, "reft"):
        step_once(model, optimizer)
        session.step_end()
        assert not session.seal(timeout=5)
    assert "model.0.weight was written between the mark" in caplog.text
    assert attach(*make()).step == 3


def test_the_fence_waits_until_all_bytes_are_copied(attach, monkeypatch):
    """The optimizer must not start before all bytes are read. Fails without the fence."""
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session = attach(model, optimizer, slots=16)  # enough for all steps, even if a busy daemon answers none
    original = CpuCopyEngine._run_tasks
    entered = []

    def held_back(self, *arguments):
        torch.randn(1500, 1500) @ torch.randn(1500, 1500)  # long enough for an unfenced optimizer to overtake
        before = model.weight.clone()
        original(self, *arguments)
        entered.append(torch.equal(before, model.weight))

    monkeypatch.setattr(CpuCopyEngine, "_run_tasks", held_back)
    for _ in session.steps(6):
        step_once(model, optimizer)
    assert session.seal(timeout=60)
    assert entered == [True] * 6 * (1 + len(session._window.snapshots.engine._threads))
    assert session.stats()["stall_ms"] > 0


def test_a_failure_inside_reft_never_stops_a_step(attach, monkeypatch, caplog):
    model, optimizer = make()
    session = attach(model, optimizer)
    train(session, model, optimizer)
    monkeypatch.setattr(session._window.snapshots.host, "take", lambda step, names: 1 / 0)
    with caplog.at_level(logging.WARNING, "reft"):
        for _ in session.steps(20):
            step_once(model, optimizer)
    assert session.step == 20 and session.stats()["skipped"] == 17
    assert caplog.text.count("ZeroDivisionError") == 1, "logged when it changes, not each step"
    monkeypatch.undo()
    train(session, model, optimizer, steps=5)
    assert session.seal(timeout=60).step == 25


def test_a_capsule_over_its_limit_voids_the_snapshot(attach, caplog):
    model, optimizer = make()
    keeper = type(
        "Grows", (), {"state_dict": lambda self: {"x": self.x}, "load_state_dict": lambda self, s: None, "x": b""}
    )()
    session = attach(model, optimizer, state={"grows": keeper})
    train(session, model, optimizer)
    keeper.x = bytes(2 << 20)
    with caplog.at_level(logging.WARNING, "reft"):
        for _ in session.steps(6):
            step_once(model, optimizer)
    assert "the limit is 1048576" in caplog.text and session.stats()["sealed_step"] == 3
    keeper.x = b""
    assert attach(*make(), state={"grows": keeper}).step == 3


def test_bytes_copied_in_idle_are_counted_as_gap_bytes(attach):
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer)
    for _ in session.steps(3):
        with session.idle():
            session._window.snapshots.engine.fence()
        step_once(model, optimizer)
    assert session.seal(timeout=60)
    assert 0 < session.stats()["bubble_fraction"] <= 1


def test_an_exception_ends_idle(attach):
    """A loader may be exhausted inside `idle()`: computation after that is no gap."""
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in session.steps(3):
        with contextlib.suppress(LookupError), session.idle():
            raise LookupError
        assert session._window.snapshots.engine._throttle.tier is Tier.COMPUTE
        step_once(model, optimizer)


def test_a_taken_timeline_socket_does_not_stop_training(attach, caplog):
    """Containers in the host's network share abstract socket names, and may have equal pids."""
    other = timeline_socket.TimelineServer(dict)
    with caplog.at_level(logging.WARNING, "reft"):
        session = attach(*make())
    other.close()
    assert "reft-cli timeline will not find rank 0" in caplog.text
    session.close()


def test_stats_are_numbers_and_a_closed_session_takes_nothing(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    with session:
        train(session, model, optimizer)
        stats = session.stats()
    assert all(isinstance(value, (int, float)) for value in stats.values())
    assert {"sealed_step", "snapshots", "skipped", "bytes", "stall_ms", "bubble_fraction"} <= set(stats)
    assert stats["bytes"] == sum(len(value) for value in state_bytes(model, optimizer).values())
    assert (stats["none_bytes"], stats["exchange_bytes"], stats["protected_step"]) == (stats["bytes"], 0, -1)
    step_once(model, optimizer)
    session.step_end()
    assert session.stats()["snapshots"] == 0 and set(session.stats()) == set(stats)


@pytest.mark.parametrize("is_past_caches", [True, False])
def test_stats_report_streaming_copy(attach, monkeypatch, is_past_caches):
    monkeypatch.setattr(streaming, "is_past_caches", is_past_caches)
    session = attach(*make())
    assert session.stats()["streaming_copy"] == is_past_caches
    session.close()
    assert session.stats()["streaming_copy"] == is_past_caches


def test_stats_tell_that_reviews_have_ended(attach):
    session = attach(*make())
    assert session.stats()["reviews_over"] == 0, "a single rank has no reviews"
    reviews = SimpleNamespace(is_over=False, at=lambda step, snapshots: snapshots, end=lambda snapshots: snapshots)
    session.review(reviews)
    assert session.stats()["reviews_over"] == 0
    reviews.is_over = True
    assert session.stats()["reviews_over"] == 1


def test_persist_without_storage_only_warns(attach, caplog):
    model, optimizer = make()
    session = attach(model, optimizer)
    step_once(model, optimizer)
    session.step_end()
    assert session.seal(timeout=60).step == 1
    session.persist()
    until(lambda: "no checkpoint was begun: " in caplog.text, what="the warning")
    assert "writes no checkpoints" in caplog.text
    step_once(model, optimizer)
    session.step_end()
    assert session.seal(timeout=60).step == 2


def test_persist_asks_for_a_checkpoint_of_the_newest_whole_step(tmp_path):
    (tmp_path / "storage").mkdir()
    daemon = DaemonProcess("--persist", str(tmp_path / "storage"))
    try:
        model, optimizer = make()
        with reft.attach(model, optimizer, daemon=daemon.address, job="run1") as session:
            step_once(model, optimizer)
            session.step_end()
            assert session.seal(timeout=60).step == 1
            session.persist()
            until(lambda: list(tmp_path.glob("storage/run1/*/e1-*-s1/MANIFEST.json")), what="the checkpoint")
        (lineage,) = (path.name for path in tmp_path.glob("storage/run1/*"))
        with reft.attach(model, optimizer, daemon=daemon.address, job="run1") as session:
            assert session.step == 1
        inventory = daemon.call("Inventory", pb.InventoryRequest(job="run1"))
        assert inventory.manifest.lineage == lineage and inventory.decision.epoch.counter == 2
    finally:
        daemon.close()


def test_an_unsealed_slot_is_not_reused_even_if_its_step_is_void(attach, monkeypatch):
    """On CUDA the digests of one snapshot may be made while the next one begins.

    The digests must not be written into the slot of the next one.
    """
    model, optimizer = make()
    session = attach(model, optimizer)
    train(session, model, optimizer)
    thread, history = session._window.snapshots.thread, session._window.snapshots.history
    free, task = thread._free_slot(), history.begin(99, 0.0)
    task.copying(0.0, free.index)
    assert thread._free_slot() is None or thread._free_slot().index != free.index
    task.void(0.0, "over")
    history.ended(task)
    assert thread._free_slot().index == free.index
    train(session, model, optimizer)
    assert session.seal(timeout=60) and not history.busy_slots()


@pytest.mark.parametrize(
    ("error", "failed"), [(None, False), (SystemExit(0), False), (SystemExit(1), True), (RuntimeError("boom"), True)]
)
def test_a_session_that_an_exception_ends_is_closed_as_failed(attach, shared_daemon, error, failed):
    model, optimizer = make()
    with contextlib.suppress(SystemExit, RuntimeError), attach(model, optimizer) as session:
        job = session._window.snapshots.reporter.facts.job
        if error is not None:
            raise error
    assert shared_daemon.call("Inventory", pb.InventoryRequest(job=job)).failed is failed


@pytest.mark.parametrize("error", [None, RuntimeError("a step failed")])
def test_the_exit_of_a_script_releases_its_session_only_after_success(attach, shared_daemon, monkeypatch, error):
    """Runs the exit handler; Python stores the error of a failed script in `sys.last_value`."""
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in session.steps(2):
        step_once(model, optimizer)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    _finish_at_exit(weakref.ref(session))
    job = session._window.snapshots.reporter.facts.job
    assert shared_daemon.status(job).ranks[0].closed is (error is None)


def test_the_exit_of_a_script_waits_for_the_snapshot_under_way(attach, monkeypatch):
    """A thread that waits for a device while the interpreter ends would abort the process."""
    session, order, asked = attach(*make()), [], threading.Event()
    thread = session._window.snapshots.thread
    idle = thread.idle
    monkeypatch.setattr(thread, "idle", lambda: asked.set() or idle())
    thread._thread.submit(lambda: asked.wait(20) and order.append("snapshot"))
    _finish_at_exit(weakref.ref(session))
    assert order == ["snapshot"]
    asked.set()  # or the session could not be closed


def test_calls_before_the_first_mark_do_not_replace_a_marked_version(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    session.begin_marking()
    for _ in range(4):
        for _ in range(9):
            step_once(model, optimizer)
        session.step_end()
    assert session.seal(timeout=60).step == 4
    other, another = make()
    session = attach(other, another)
    for _ in range(9):
        step_once(other, another)
    assert session.step == 4, "calls are no steps"
    third = attach(*make())
    assert third.step == 4 and third.restored_from == "memory"


def test_a_resumed_loop_without_marks_gets_a_warning(attach, caplog, monkeypatch):
    monkeypatch.setattr("reft.client.schedule.optimizer_hooks.CALLS_WITHOUT_MARK", 3)
    model, optimizer = make()
    session = attach(model, optimizer)
    step_once(model, optimizer)
    session.step_end()
    assert session.seal(timeout=60)
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(5):
        step_once(model, optimizer)
    assert session.step == 1 and sum("without a mark" in each for each in caplog.messages) == 1


def test_a_discarded_step_is_not_whole(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(5):
        step_once(model, optimizer)
        session._window.snapshots.reporter.wait(session.step, 10)
    assert session.stats()["whole_step"] == 5
    session.step_end()
    assert session.step == 1 and not session.seal(timeout=10) and session.stats()["whole_step"] == -1


def test_seal_after_the_optimizer_step_takes_no_snapshot(attach):
    model, optimizer = make()
    session = attach(model, optimizer, every=10)
    for step in session.steps(12):
        step_once(model, optimizer)
        if step == 11:
            session._window.snapshots.reporter.wait(10, 10)
            sealed = session.seal(timeout=10)
            assert not sealed and sealed.step == 10
            break
    assert attach(*make()).step == 10


def test_without_marks_a_scheduler_one_step_behind_is_logged(attach, caplog):
    model, optimizer = make()
    attach(model, optimizer, state={"lr": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)})
    for _ in range(4):
        step_once(model, optimizer)
    assert sum("one step behind" in each and "lr" in each for each in caplog.messages) == 1


def test_a_mark_between_micro_batches_gives_no_snapshot(attach, caplog):
    def micro_batch(model, optimizer, index):
        model(torch.full((2, 8), index + 1.0)).square().mean().backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make()
    session = attach(model, optimizer)
    for index in range(5):
        before = state_bytes(model, optimizer)
        micro_batch(model, optimizer, index)
        session.step_end()
        assert bool(session.seal(timeout=10)) == bool(index % 2)
    assert "Snapshots hold no gradients" in caplog.text
    other, another = make()
    assert attach(other, another).step == 4 and state_bytes(other, another) == before


def test_marks_without_gradients_and_without_a_step_are_taken(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in session.steps(3):
        model.weight.data.add_(1.0)
    assert session.seal(timeout=60).step == 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_foreign_optimizer_is_detected(attach, caplog, fused):
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in session.steps(2):
        step_once(model, optimizer)
    expected = state_bytes(model, optimizer)
    assert session.seal(timeout=60)
    another = torch.optim.AdamW(model.parameters(), fused=fused)
    for _ in session.steps(4):
        step_once(model, another)
    assert not session.seal(timeout=10) and session.stats()["whole_step"] == 2
    assert "updated by a AdamW that was not passed to attach" in caplog.text
    other, one = make()
    assert attach(other, one).step == 2 and state_bytes(other, one) == expected


def test_without_marks_a_foreign_optimizer_is_logged_once(attach, caplog):
    model, optimizer = make()
    session = attach(model, optimizer)
    for each in [optimizer] * 2 + [torch.optim.SGD(model.parameters(), lr=0.1)] * 5:
        step_once(model, each)
    assert session.step == 2
    assert caplog.text.count("no step is counted: parameters were updated by a SGD that was not passed to attach") == 1


def test_optimizers_of_other_parameters_or_inside_a_step_are_not_foreign(attach, caplog):
    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            torch.optim.SGD(self.param_groups, lr=0.1).step(closure)

    model, elsewhere = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer, another = Outer(model.parameters(), lr=0.1), torch.optim.SGD(elsewhere.parameters(), lr=0.1)
    session = attach(model, optimizer)
    for _ in session.steps(4):
        step_once(elsewhere, another)
        step_once(model, optimizer)
    assert session.seal(timeout=60).step == 4 and "that was not passed" not in caplog.text


def test_a_foreign_optimizer_ends_the_window(attach, monkeypatch):
    model, optimizer = make()
    session = attach(model, optimizer)
    events = []
    step_once(model, optimizer)
    session.step_end()
    monkeypatch.setattr(CpuCopyEngine, "fence", lambda _: events.append("fence"))
    another = torch.optim.SGD(model.parameters(), lr=0.1)
    another.register_step_pre_hook(lambda *_: events.append("writes"))
    step_once(model, another)
    monkeypatch.undo()
    assert events == ["fence", "writes"]


def test_a_closed_or_deleted_session_hooks_no_optimizer(attach):
    from torch.optim import optimizer as torchs

    def count():
        return [len(torchs._global_optimizer_pre_hooks), len(torchs._global_optimizer_post_hooks)]

    before = count()
    session = attach(*make())
    assert count() == [each + 1 for each in before]
    session.close()
    assert count() == before


@pytest.mark.parametrize("is_in_turn", [True, False])
def test_without_marks_the_optimizer_that_steps_last_must_be_the_last_one(attach, caplog, is_in_turn):
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
    session = attach(model, optimizers if is_in_turn else optimizers[::-1])
    for _ in range(4):
        step_once(model, *optimizers)
    assert session.step == 4 and bool(session.seal(timeout=10)) == is_in_turn
    assert ("stepped before others" in caplog.text) != is_in_turn


def test_without_marks_an_average_one_step_behind_is_logged(attach, caplog):
    model, optimizer = make()
    average = torch.optim.swa_utils.AveragedModel(model)
    attach(model, optimizer, state={"average": average})
    for _ in range(2):
        step_once(model, optimizer)
        average.update_parameters(model)
    assert "no step is marked: a snapshot holds average as they are when optimizer.step returns" in caplog.text


def test_the_third_slot_joins_during_training_after_a_change_of_slots(attach, shared_daemon):
    """Slots with chunks of another size do not fit, like those of another shape."""

    def rank():
        return shared_daemon.status(session._window.snapshots.reporter.facts.job).ranks[0]

    model, optimizer = make()
    session = attach(model, optimizer, config=Config(chunk_bytes=1 << 20))
    train(session, model, optimizer)
    assert session.seal(timeout=60)
    at, before = session.step, rank()
    model, optimizer = make()
    session = attach(model, optimizer, config=Config(chunk_bytes=1 << 16))
    assert session.step == at and (rank().slots, rank().wanted_slots) == (2, 3)
    assert rank().bytes <= before.bytes, "the base and two new slots"
    for _ in session.steps(at + 500):
        step_once(model, optimizer)
        session.seal(timeout=60)
        if len(session._window.snapshots.slots) == 3:
            break
    assert rank().slots == 3 and rank().bytes <= before.bytes
    expected, at = state_bytes(model, optimizer), session.step
    session.step_end()
    assert session.seal(timeout=60)
    model, optimizer = make()
    session = attach(model, optimizer, config=Config(chunk_bytes=1 << 16))
    assert session.step == at + 1 and state_bytes(model, optimizer) == expected
    assert (rank().slots, rank().bytes <= before.bytes) == (3, True)
