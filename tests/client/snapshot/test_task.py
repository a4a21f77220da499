"""A snapshot as an object: its moves, its story, and the sums over all snapshots."""

from __future__ import annotations

import itertools

import pytest

from reft.client.snapshot.task import (
    EVENTS_MAX,
    MOVES,
    TASKS_MAX,
    InvalidMove,
    SnapshotHistory,
    SnapshotState,
    SnapshotTask,
)
from reft.client.snapshot.timeline import SNAPSHOTS, snapshot_spans

PATH = {
    SnapshotState.COPYING: lambda task: task.copying(1.5, 2),
    SnapshotState.LANDED: lambda task: task.landed(2.0),
    SnapshotState.SEALED: lambda task: task.sealed(3.0),
    SnapshotState.VOID: lambda task: task.void(4.0, "torn"),
}


def task_in(state: SnapshotState) -> SnapshotTask:
    task = SnapshotTask(17, 1.0)
    for each in [SnapshotState.COPYING, SnapshotState.LANDED, SnapshotState.SEALED]:
        if task.state is not state and state is not SnapshotState.VOID:
            PATH[each](task)
    if state is SnapshotState.VOID:
        PATH[state](task)
    assert task.state is state
    return task


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SnapshotState, PATH)))
def test_a_task_moves_along_the_arrows_only(before, after):
    task = task_in(before)
    events = list(task.events)
    if after in MOVES[before]:
        PATH[after](task)
        assert task.state is after
    else:
        with pytest.raises(InvalidMove, match=f"from {before.name} to {after.name}: step 17: OPENING"):
            PATH[after](task)
        assert (task.state, list(task.events)) == (before, events), "a refused move changes nothing"
    assert task.is_over == (task.state in (SnapshotState.SEALED, SnapshotState.VOID))


def test_the_story_says_where_the_snapshot_stood_and_when():
    task = task_in(SnapshotState.LANDED)
    task.void(1.0125, "the capsule is too large")
    story = "step 17: OPENING +0.0 ms, COPYING into slot 2 +500.0 ms, LANDED +1000.0 ms, VOID +12.5 ms"
    assert task.story() == story
    assert task.facts() == {
        "step": 17, "state": "VOID", "slot": 2, "reason": "the capsule is too large", "story": story,
    }  # fmt: skip


def test_a_task_keeps_its_last_events():
    task = SnapshotTask(1, 0.0)
    for index in range(100):
        task.note(float(index), str(index))
    assert [event.text for event in task.events] == [str(index) for index in range(100 - EVENTS_MAX, 100)]


def test_the_timeline_shows_each_state_for_as_long_as_it_lasted():
    spans = snapshot_spans(task_in(SnapshotState.SEALED))
    assert [(span.name, span.begin_s, span.end_s) for span in spans] == [
        ("step 17 OPENING", 1.0, 1.5),
        ("step 17 COPYING into slot 2", 1.5, 2.0),
        ("step 17 LANDED", 2.0, 3.0),
    ]
    assert {span.track for span in spans} == {SNAPSHOTS}


def ended(history: SnapshotHistory, step: int, state: SnapshotState) -> None:
    task = history.begin(step, 0.0)
    if state is SnapshotState.VOID:
        task.void(0.0, "torn")
    else:
        task.copying(0.0, step % 3)
        task.landed(0.0)
        task.sealed(0.0)
    history.ended(task)


def test_the_history_sums_up_tasks_that_it_has_forgotten():
    history = SnapshotHistory()
    for step in range(1, 201):
        ended(history, step, SnapshotState.VOID if step % 4 == 0 else SnapshotState.SEALED)
    assert (history.sealed, history.skipped, history.sealed_step) == (150, 50, 199)
    assert [task.step for task in history.tasks()] == list(range(201 - TASKS_MAX, 201))


def test_a_slot_is_busy_until_its_task_is_over_however_many_tasks_follow():
    history = SnapshotHistory()
    slow = history.begin(1, 0.0)
    slow.copying(0.0, 2)
    for step in range(2, 2 + 2 * TASKS_MAX):
        ended(history, step, SnapshotState.VOID)
    assert slow not in history.tasks() and history.busy_slots() == {2}
    slow.void(0.0, "torn")
    history.ended(slow)
    assert history.busy_slots() == set()


@pytest.mark.parametrize("read", [SnapshotTask.facts, snapshot_spans], ids=["facts", "spans"])
def test_a_task_is_read_while_the_snapshot_thread_adds_events(read):
    class Growing(str):
        """An event's text that adds another event as it is read."""

        def __format__(self, spec: str) -> str:
            task.note(3.0, "ticked")
            return str(self)

    task = SnapshotTask(17, 1.0)
    for _ in range(3):
        task.note(2.0, Growing("held"))
    assert "held" in str(read(task))
