"""Tests the queue of changes, and the consumer that tells them."""

from __future__ import annotations

import asyncio
import itertools
import os
from types import SimpleNamespace

import pytest

from reft.core.commit.pins import Pins
from reft.core.commit.round import Outcome
from reft.core.membership.failure_detector import AgentPhase
from reft.wire.process import Process, stat_of
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import rounds, trainers
from reft_daemon.jobs.changes import ChangeKind, ChangeQueue, JobChange
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease
from reft_daemon.membership.job_monitor import JobMonitor, MembershipView
from reft_daemon.registry import Registry
from tests.support.jobs import decide_now, registry_of
from tests.support.trainer_forks import Trainer

RANKS, OUTCOME, EPOCH, AGENT = ChangeKind


async def take_all(changes: ChangeQueue) -> list[JobChange]:
    return [await changes.take() for _ in range(len(changes))]  # type: ignore[misc]


def test_changes_are_taken_in_the_order_of_their_first_put():
    async def run() -> None:
        changes = ChangeQueue()
        for job, kind in (("b", RANKS), ("a", OUTCOME), ("b", EPOCH), ("c", AGENT), ("a", OUTCOME)):
            changes.put(job, kind)
        assert await take_all(changes) == [
            JobChange("b", {RANKS, EPOCH}), JobChange("a", {OUTCOME}), JobChange("c", {AGENT})
        ]  # fmt: skip
        changes.put("a", RANKS)
        assert await changes.take() == JobChange("a", {RANKS}), "a taken kind is not told again"

    asyncio.run(run())


def test_a_storm_of_changes_takes_one_entry_for_each_job():
    changes = ChangeQueue()
    for _, job, kind in itertools.product(range(1000), "abc", ChangeKind):
        changes.put(job, kind)
    assert len(changes) == 3


def test_each_order_of_puts_and_takes_loses_no_change():
    """All orders of three puts of two jobs, each followed by a take or by none."""

    async def told(actions: tuple[tuple[str, ChangeKind, bool], ...]) -> dict[str, set[ChangeKind]]:
        changes, kinds = ChangeQueue(), {}
        taken = []
        for job, kind, takes in actions:
            changes.put(job, kind)
            if takes:
                taken.append(await changes.take())
        for change in taken + await take_all(changes):
            kinds[change.job] = kinds.get(change.job, set()) | change.kinds
        return kinds

    for actions in itertools.product(itertools.product("ab", (RANKS, OUTCOME), (False, True)), repeat=3):
        expected: dict[str, set[ChangeKind]] = {}
        for job, kind, _ in actions:
            expected.setdefault(job, set()).add(kind)
        assert asyncio.run(told(actions)) == expected


def test_a_waiting_consumer_wakes_at_a_put_and_ends_at_the_close():
    async def run() -> None:
        changes = ChangeQueue()
        waiting = asyncio.ensure_future(changes.take())
        await asyncio.sleep(0)
        changes.put("a", RANKS)
        assert await waiting == JobChange("a", {RANKS})
        waiting = asyncio.ensure_future(changes.take())
        await asyncio.sleep(0)
        changes.close()
        assert await waiting is None
        changes.put("a", RANKS)
        assert await changes.take() is None

    asyncio.run(run())


# The consumer


class Told:
    """Stands for the heartbeats and for one job's senders; it notes what it is told."""

    def __init__(self, registry: Registry) -> None:
        self.looks: list[str] = []
        self.wakes: list[str] = []
        self.puts: list[tuple[str, ChangeKind]] = []  # changes to put during the next telling
        self._registry = registry
        registry.heartbeat_service = SimpleNamespace(look=self.look, monitors=SimpleNamespace(forget=lambda _: None))

    def look(self, job: str) -> None:
        self.looks.append(job)
        while self.puts:
            self._registry.changes.put(*self.puts.pop())
        if job == "broken":
            raise RuntimeError("a bug")

    def replicate(self, job: str) -> None:
        sender = SimpleNamespace(wake=lambda: self.wakes.append(job), close=lambda: None)
        self._registry._replicators[job] = sender  # type: ignore[assignment]


@pytest.fixture
def registry(tmp_path) -> Registry:
    return registry_of(Arena(tmp_path / "arena", 0))


def job_in(registry: Registry, name: str = "job") -> JobRecord:
    """Returns a job of a child node: the parent decides its steps."""
    manifest = pb.Manifest(job=name, world=2, nodes=[pb.Node(name="p", ranks=[1]), pb.Node(name="c", ranks=[0])])
    record = pb.JobRecord(manifest=manifest, node_index=1, decision=pb.Decision(), had_whole=True)
    job = registry.jobs[name] = JobRecord(registry.arena, record, registry.changes)
    rounds.start(job)
    return job


async def told_all(registry: Registry) -> None:
    """Lets the consumer run until nothing is pending."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not len(registry.changes)


@pytest.mark.parametrize(
    ("kind", "senders", "monitor", "reports"),
    [(RANKS, True, True, False), (OUTCOME, True, True, True), (EPOCH, False, False, True), (AGENT, False, True, False)],
)
def test_each_kind_is_told_to_those_of_the_table(registry, kind, senders, monitor, reports):
    async def run() -> None:
        job, told = job_in(registry), Told(registry)
        told.replicate("job")
        news, consumer = job.news, asyncio.ensure_future(registry.tell_changes())
        registry.changes.put("job", kind)
        await told_all(registry)
        assert (bool(told.wakes), bool(told.looks), news.is_set()) == (senders, monitor, reports)
        assert not job.news.is_set(), "later reports wait for later news"
        registry.changes.close()
        await consumer

    asyncio.run(run())


def test_a_change_made_while_another_is_told_is_told_too(registry):
    async def run() -> None:
        told = Told(registry)
        told.puts = [("job", OUTCOME), ("other", RANKS)]
        consumer = asyncio.ensure_future(registry.tell_changes())
        registry.changes.put("job", RANKS)
        await told_all(registry)
        assert told.looks == ["job", "other", "job"]
        registry.changes.close()
        await consumer

    asyncio.run(run())


def test_a_purge_while_a_change_is_pending_is_harmless(registry):
    async def run() -> None:
        job_in(registry)
        told = Told(registry)
        told.replicate("job")
        consumer = asyncio.ensure_future(registry.tell_changes())
        for kind in ChangeKind:
            registry.changes.put("job", kind)
        registry.purge("job")
        await told_all(registry)
        assert not told.wakes and not registry.jobs and not consumer.done()
        job, again = job_in(registry), Told(registry)
        again.replicate("job")
        news = job.news
        registry.changes.put("job", OUTCOME)
        await told_all(registry)
        assert again.wakes == ["job"] and news.is_set()
        registry.changes.close()
        await consumer

    asyncio.run(run())


def test_an_error_in_the_telling_of_one_job_is_logged_and_stops_no_other(registry, caplog):
    async def run() -> None:
        told = Told(registry)
        consumer = asyncio.ensure_future(registry.tell_changes())
        registry.changes.put("broken", RANKS)
        registry.changes.put("job", RANKS)
        await told_all(registry)
        assert told.looks == ["broken", "job"]
        registry.changes.close()
        await consumer

    asyncio.run(run())
    assert "job=broken a change can't be told" in caplog.text and "a bug" in caplog.text


def test_news_of_the_round_reach_waiting_reports_without_a_pause(registry):
    """They need three turns of the event loop: consumer, event, the waiting report."""

    async def run() -> None:
        job, _ = job_in(registry), Told(registry)
        consumer = asyncio.ensure_future(registry.tell_changes())
        waiting = asyncio.ensure_future(job.news.wait())
        await asyncio.sleep(0)
        rounds.hear_outcome(job, Outcome(Pins(whole=3), until=3))
        for _ in range(3):
            await asyncio.sleep(0)
        assert waiting.done()
        registry.changes.close()
        await consumer

    asyncio.run(run())


def test_the_registry_ends_its_consumer(registry):
    async def run() -> None:
        consumer = asyncio.ensure_future(registry.tell_changes())
        await asyncio.sleep(0)
        await registry.close(purge=False)
        await asyncio.wait_for(consumer, 20)

    asyncio.run(run())


def test_decisions_and_ends_put_their_changes(registry):
    async def run() -> None:
        job = job_in(registry)
        request = pb.DecideRequest(manifest=job.record.manifest, node_index=1, decision=pb.Decision())
        decide_now(job, request)
        assert not len(registry.changes), "the decision is in force already"
        request.decision.epoch.counter = 1
        decide_now(job, request)
        assert await take_all(registry.changes) == [JobChange("job", {EPOCH})]
        process = Process(os.getpid(), stat_of(os.getpid()).start)
        trainers.watch(job, 0, Lease(process, 1))
        assert not len(registry.changes)
        trainers.release(job, pb.ReleaseRequest(epoch=request.decision.epoch, rank=0), os.getpid())
        assert await take_all(registry.changes) == [JobChange("job", {RANKS})]

    asyncio.run(run())


def test_the_end_of_an_agent_puts_its_change():
    async def run() -> None:
        view = MembershipView("launch", 1, bytes(32), {"n": pb.Node(id="n")})
        changes, child = ChangeQueue(), Trainer()
        monitor = JobMonitor("run", "n", view, changes)
        monitor.agent_beat(child.pid, AgentPhase.TRAINING, None)
        child.kill()
        assert await asyncio.wait_for(changes.take(), 20) == JobChange("run", {AGENT})
        assert monitor.own_report(None).reason == f"its agent, process {child.pid}, has ended."

    asyncio.run(run())


def test_reports_and_outcomes_put_their_changes(registry):
    async def run() -> None:
        job = job_in(registry)
        rounds.report_sealed_slots(job, 0)
        assert await take_all(registry.changes) == [JobChange("job", {RANKS})]
        rounds.hear_outcome(job, Outcome(Pins(whole=3), until=3))
        assert await take_all(registry.changes) == [JobChange("job", {OUTCOME})]
        rounds.hear_outcome(job, Outcome(Pins(whole=3), until=3))
        assert not len(registry.changes), "a repeated outcome is no news"

    asyncio.run(run())
