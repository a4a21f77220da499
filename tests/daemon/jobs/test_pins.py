"""Pins on a node: recorded before they are announced, and obeyed by slots and capsules."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from reft.core.coding.erasure import code_for
from reft.core.coding.exchange import GuardLane
from reft.core.commit.decision import Decision
from reft.core.commit.pins import LEFT_OUT_AFTER_S, GuardReport, Pins, UnguardedLane
from reft.core.commit.round import Outcome
from reft.core.commit.version import Version
from reft.errors import AttachError, NoRoom
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.job_files import JobFiles
from reft_daemon.jobs import epochs, leasing, rounds
from reft_daemon.jobs.capsule_replication import NodePlacement
from reft_daemon.jobs.changes import ChangeKind, ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from tests.daemon.jobs.test_capsules import all_whole, copies, held_job, seal
from tests.daemon.jobs.test_leases import lease_request
from tests.support.daemons import until
from tests.support.jobs import Job, decide_now, epoch_of, write
from tests.support.saying import SEALED, VOID, report_of

LANE = GuardLane((0, 1), (4096, 4096), code_for(1, 1), 4096)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        yield Arena(Path(path), 64 << 20)


def decide_request(counter: int, base: Version | None = None, guard: Version | None = None) -> pb.DecideRequest:
    nodes = [pb.Node(name="n", id="n", ranks=[0]), pb.Node(name="o", id="o", ranks=[1])]
    manifest = pb.Manifest(job="job", world=2, nodes=nodes, slots=4, chunk_bytes=4096)
    return pb.DecideRequest(
        manifest=manifest, decision=messages.decision_to(Decision(epoch_of(counter), base, (), guard))
    )


def coordinator(arena: Arena) -> JobRecord:
    """Returns a job on its coordinator: rank 0 trains here, rank 1 on node 1, in one lane."""
    request = decide_request(1)
    job = JobRecord(arena, pb.JobRecord(manifest=request.manifest), ChangeQueue(), guard_lanes=(LANE,))
    decide_now(job, request, NodePlacement(guard_lanes=(LANE,)))
    return job


def both_seal(job: JobRecord, step: int) -> None:
    """Rank 0 seals a step, and node 1 reports it of rank 1."""
    job.round.hear_rank(0, report_of({step: SEALED}))
    child_reports(job, {step: SEALED})


def child_reports(job: JobRecord, answers: dict, guard: GuardReport = GuardReport()) -> Pins:  # noqa: B008
    steps = messages.report_to(report_of(answers))
    request = pb.GatherRequest(node_index=1, steps=steps, guard=messages.guard_report_to(guard))
    return rounds.hear_node(job, request).pins


def recorded(arena: Arena) -> Pins:
    (record,) = JobFiles(arena.folder, arena.write_files).read()
    return messages.pins_from(record.pins) if record.HasField("pins") else Pins()


def test_the_coordinator_records_its_pins_before_it_announces_them(arena):
    job = coordinator(arena)
    both_seal(job, 1)
    assert job.round.outcome.pins == recorded(arena) == Pins(1, 1, 1, -1, 1)
    both_seal(job, 2)
    assert job.round.outcome.pins == recorded(arena) == Pins(1, 2, 1, -1, 1)
    rounds.note_guarded(job, 1)
    assert job.round.outcome.pins.protected == -1, "node 1 has not sealed its parity"
    assert child_reports(job, {}, GuardReport(1)) == recorded(arena) == Pins(2, 2, 2, 1, 2, 1)
    again = JobRecord(arena, job.record, ChangeQueue(), guard_lanes=(LANE,))
    rounds.start(again)
    assert again.round.outcome.pins == Pins(2, 2, 2, 1, 2, 1) and not again.round.outcome.voids(2)


def test_a_record_that_cannot_be_written_announces_nothing_new(arena, monkeypatch, caplog):
    job = coordinator(arena)
    both_seal(job, 1)
    before = job.round.outcome

    def refuse(*_: object) -> None:
        raise NoRoom("the memory is full.")

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "write_pins", refuse)
        both_seal(job, 2)
        assert job.round.outcome == before and not before.decides(2), "neither whole nor void"
        assert messages.pins_from(job.record.pins) == before.pins
        assert "no newer step becomes whole: the pins can't be recorded" in caplog.text
    job.round.hear_rank(0, report_of({3: VOID}))
    child_reports(job, {3: VOID})
    assert job.round.outcome.pins == recorded(arena) == Pins(1, 2, 1, -1, 1)


def test_pins_are_taken_of_the_records_epoch_only_and_as_they_were_written(arena, monkeypatch, caplog):
    job = coordinator(arena)
    record = (arena.folder / "job" / "record.0").read_bytes()
    both_seal(job, 1)
    assert (arena.folder / "job" / "record.0").read_bytes() != record, "a step is whole for the first time"
    with monkeypatch.context() as patch:
        patch.setattr(arena.job_files, "write", lambda record: pytest.fail("the whole record was written"))
        both_seal(job, 2)
    assert recorded(arena) == Pins(1, 2, 1, -1, 1)
    path = arena.folder / "job" / "pins"
    earlier = path.read_bytes()
    decide_now(job, decide_request(2, Version(epoch_of(1), 2)), NodePlacement(guard_lanes=(LANE,)))
    assert recorded(arena) == Pins() and path.read_bytes() == earlier, "of an earlier epoch"
    both_seal(job, 3)
    assert recorded(arena) == Pins(1, 3, 3, -1, 1)
    path.write_bytes(b"\xff" + path.read_bytes()[1:-1])
    assert arena.read_records() == [] and "its pins: copy 0" in caplog.text


def test_a_job_without_lanes_or_with_few_slots_records_nothing(arena):
    job = coordinator(arena)
    job.guard_lanes = ()
    rounds.start(job)
    both_seal(job, 1)
    assert job.round.outcome.pins == Pins(whole=1) and recorded(arena) == Pins()
    job.guard_lanes, job.record.manifest.slots = (LANE,), 3
    assert rounds.exchange_facts(job).lanes == 0


def test_a_lane_without_parity_ends_the_turn_or_demotes_the_protected_step(arena):
    job = coordinator(arena)
    both_seal(job, 1)
    rounds.note_unguarded(job, [UnguardedLane(1, 0, "a source is damaged", 1)])
    assert job.round.outcome.pins == Pins(2, 1, -1, -1, 1)
    both_seal(job, 2)
    rounds.note_guarded(job, 2)
    child_reports(job, {}, GuardReport(2))
    assert job.round.outcome.pins == Pins(4, 2, -1, 2, 2, 2)
    rounds.note_unguarded(job, [UnguardedLane(2, 0, "parity is gone", 2)])
    assert job.round.outcome.pins == recorded(arena) == Pins(5, 2, -1, -1, 2, 0, 2)
    assert Version(epoch_of(1), 2) in job.pinned
    for late in (1, 2):
        rounds.retry_turn(job, epoch_of(late), late)
        assert (job.round.outcome.pins.turn, job.round.outcome.pins.attempt) == (-1, 2), "of another turn or epoch"
    rounds.retry_turn(job, epoch_of(1), 2)
    assert job.round.outcome.pins == recorded(arena) == Pins(6, 2, 2, -1, 3, 0, 2)
    assert asyncio.run(job.changes.take()).kinds >= {ChangeKind.OUTCOME}


def test_a_lane_is_left_out_once_it_has_failed_for_a_while(arena, monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: now.s))
    request = decide_request(1)
    job = JobRecord(arena, pb.JobRecord(manifest=request.manifest), ChangeQueue(), guard_lanes=(LANE, LANE))
    decide_now(job, request, NodePlacement(guard_lanes=(LANE, LANE)))
    protected = []
    for step in range(1, 7):
        both_seal(job, step)
        attempt = job.round.outcome.pins.attempt
        if step > 1:
            rounds.note_unguarded(job, [UnguardedLane(step, 1, "a source is gone", attempt)])
        rounds.note_guarded(job, attempt)
        child_reports(job, {}, GuardReport(attempt))
        protected.append((job.round.outcome.pins.protected, job.round.outcome.pins.is_exposed))
        now.s += LEFT_OUT_AFTER_S if step == 4 else 0.1
    assert protected == [(1, False)] * 5 + [(6, True)] and recorded(arena) == job.round.outcome.pins


def test_retired_slots_of_pinned_versions_stay_until_the_pins_let_go(arena):
    async def run() -> None:
        job = coordinator(arena)
        first = lease_request(1)
        first.slots = 4
        slots = await leasing.lease(job, first, caller_process(os.getpid()))
        for step, slot in enumerate(slots[:3], 1):
            write(slot.map, Version(epoch_of(1), step), nbytes=4096)
        larger = lease_request(1)
        larger.data_bytes, larger.slots = 3 * 4096, 4
        new = await leasing.lease(job, larger, caller_process(os.getpid()))
        write(new[0].map, Version(epoch_of(1), 9), nbytes=4096)  # the trainer has left its old slots
        kept = []
        for pins in (
            Pins(1, 2, 2, 1, 2, 1),
            Pins(2, 3, 3, 2, 3, 2),
            Pins(3, 4, -1, 3, 3, 3),
            Pins(4, 9, -1, -1, 3, 0, 3),
            Pins(6, 9, -1, 9, 4, 4),
        ):
            rounds.hear_outcome(job, Outcome(pins, pins.whole))
            headers = [slot.map.reread() for slot in job.slots.retired.values()]
            kept.append(sorted(header.version.step for header in headers if header.version))
        assert kept == [[1, 2, 3], [2, 3], [3], [3], []]

    asyncio.run(run())


def test_a_lease_keeps_the_slots_of_base_and_guard(arena):
    async def run() -> None:
        job = coordinator(arena)
        request = lease_request(1)
        request.slots = 4
        slots = await leasing.lease(job, request, caller_process(os.getpid()))
        for step, slot in enumerate(slots, 1):
            write(slot.map, Version(epoch_of(1), step), nbytes=4096)
        job.leases.clear()
        after = decide_request(2, Version(epoch_of(1), 3), Version(epoch_of(1), 1))
        after.dropped.extend([slots[0].name, slots[3].name])
        decide_now(job, after)
        larger = lease_request(2)
        larger.data_bytes = 3 * 4096
        await leasing.lease(job, larger, caller_process(os.getpid()))
        headers = {name: slot.map.reread().version for name, slot in job.slots.retired.items()}
        assert headers == {slots[0].name: Version(epoch_of(1), 1), slots[2].name: Version(epoch_of(1), 3)}
        larger.slots = 4
        assert len(await leasing.lease(job, larger, caller_process(os.getpid()))) == 2, "older slots are held"

    asyncio.run(run())


def test_a_new_layout_is_refused_if_its_guard_may_be_freed_here(arena):
    job = coordinator(arena)
    rounds.hear_outcome(job, Outcome(Pins(3, 8, -1, 6), 8))
    base = Version(epoch_of(1), 8)
    epochs.check_kept(job, Decision(epoch_of(2), base, (), Version(epoch_of(1), 6)))
    with pytest.raises(AttachError, match=r"the guard of the new layout is step 5 .*, but step 6 .* was protected"):
        epochs.check_kept(job, Decision(epoch_of(2), base, (), Version(epoch_of(1), 5)))


# On daemons


def decide_with_guard(job: Job, base: Version, guard: Version) -> None:
    job.counter += 1
    decision = job.decision(base)
    decision.guard.CopyFrom(messages.version_to(guard))
    for i, daemon in enumerate(job.daemons):
        daemon.call("Decide", pb.DecideRequest(manifest=job.manifest, decision=decision, node_index=i))


def test_capsules_of_the_guard_are_sent_again_and_stay(start, trainer):
    job = held_job([start("--listen", "127.0.0.1:0") for _ in range(2)])
    for step in (1, 2):
        seal(job, trainer, step)
        all_whole(job, step)
    until(lambda: copies(job, 0) == [(1, 2)], what="the removal of step 1")
    guard, base = job.version(1), job.version(2)
    decide_with_guard(job.close(), base, guard)
    for daemon in job.daemons:
        daemon.call("Secure", pb.SecureRequest(job="job", epoch=job.epoch))
    assert copies(job, 0) == [(1, 1), (1, 2)]
    for step in (3, 4):
        seal(job, trainer, step)
        all_whole(job, step)
        until(lambda step=step: copies(job, 0) == [(1, 1), (1, step)], what="the removal of older steps")
    job.daemons[0].kill()
    job.daemons[0].start()
    assert (1, 1) in copies(job, 0)


def test_the_manifest_of_the_guard_is_kept(daemon):
    job = Job([(daemon, [0])]).decide()
    first = job.version(3)
    for script in ("second", "third"):
        job.manifest.script = script
        decide_with_guard(job, job.version(5), first)
    daemon.kill()
    daemon.start()
    reply = daemon.call("Inventory", pb.InventoryRequest(job="job"))
    manifests = messages.manifests_from(reply)
    scripts = {epoch.counter: manifest.script for epoch, manifest in manifests.items()}
    assert scripts == {1: "", 2: "second", 3: "third"}
    assert messages.decision_from(reply.decision).guard == first
    decide_with_guard(job, job.version(5), job.version(5, 2))
    reply = daemon.call("Inventory", pb.InventoryRequest(job="job"))
    assert {epoch.counter for epoch in messages.manifests_from(reply)} == {2, 3, 4}
