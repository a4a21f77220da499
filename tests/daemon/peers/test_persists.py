"""The coordinator of a checkpoint, and a node's part in it, with scripted nodes and storage."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.pins import Pins
from reft.core.commit.version import Version
from reft.errors import ConfigError, NoRoom
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.job_files import JobFiles
from reft_daemon.jobs import rounds, trainers
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease
from reft_daemon.peers import persist_run, persists
from reft_daemon.peers.persists import PersistService
from reft_daemon.persist import node_writer
from reft_daemon.persist.persister import PersistSettings, StorageFailed, StoredStep
from tests.support.jobs import decide_now, epoch_of
from tests.support.saying import SEALED, report_of

LINEAGE = "0123456789abcdef"
DIGEST = "d" * 32
DONE = pb.PersistReply(written_bytes=7, total_bytes=7, index_digest=DIGEST)


class Unavailable(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__("it has no answer")
        self.code = lambda: code


class Storage:
    """Stands for the persister: notes commands, and fails where it is told to."""

    def __init__(self) -> None:
        self.done: list[tuple] = []
        self.failing: dict[str, str] = {}
        self.root = "/storage"
        self.looked = asyncio.Event()
        self.stored: StoredStep | None = None
        self.writing = asyncio.Event()
        self.writing.set()

    def _do(self, name: str, *facts: object) -> None:
        if name in self.failing:
            raise StorageFailed(self.failing[name])
        self.done.append((name, *facts))

    async def look(self):
        self.looked.set()
        if "look" in self.failing:
            raise StorageFailed(self.failing["look"])

    async def decide(self, job, lineage, decision):
        self._do("decide", decision.epoch.counter)

    async def newest(self, job, lineage):
        return self.stored

    async def write(self, job, lineage, version, folder, slots, note):
        self._do("write", version.step, folder)
        await self.writing.wait()
        return DIGEST

    async def commit(self, manifest, decision):
        self._do("commit", manifest.version.step, tuple((each.node, each.attempt) for each in manifest.nodes))

    async def discard(self, job, lineage, version, attempts):
        self._do("discard", version.step, attempts)

    async def prune(self, *_):
        self._do("prune")
        return 0

    def close(self) -> None:
        pass

    def of(self, name: str) -> list[tuple]:
        return [each[1:] for each in self.done if each[0] == name]


class Node:
    """Stands for node 1: answers with the scripted replies, the last one again and again."""

    def __init__(self, *replies: object) -> None:
        self.replies = list(replies) or [DONE]
        self.attempts: list[int] = []

    async def call(self, node, token, service, method, request, deadline_s, reconnect=False):
        assert method == "Persist"
        self.attempts.append(request.attempt)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture
def job() -> Iterator[JobRecord]:
    """A job of two nodes, without an exchange, on its coordinator."""
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        nodes = [pb.Node(name="n", id="n", ranks=[0]), pb.Node(name="o", id="o", ranks=[1])]
        manifest = pb.Manifest(
            job="job", named=True, world=2, nodes=nodes, slots=4, chunk_bytes=4096, lineage=LINEAGE, token=bytes(32)
        )
        each = JobRecord(Arena(Path(path), 64 << 20), pb.JobRecord(manifest=manifest), ChangeQueue())
        attach(each, 1)
        yield each


def attach(job: JobRecord, counter: int) -> None:
    decision = messages.decision_to(Decision(epoch_of(counter), None))
    decide_now(job, pb.DecideRequest(manifest=job.record.manifest, decision=decision))


def whole(job: JobRecord, step: int) -> None:
    job.round.hear_rank(0, report_of({step: SEALED}))
    rounds.hear_node(job, pb.GatherRequest(node_index=1, steps=messages.report_to(report_of({step: SEALED}))))
    assert job.round.outcome.whole == step


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module, name in ((persists, "LOOK_S"), (persist_run, "POLL_S"), (persist_run, "POLL_MIN_S")):
        monkeypatch.setattr(module, name, 0.001)
    monkeypatch.setattr(node_writer, "slots_to_store", lambda job, version, ranges: ([], 7))


def running(
    job: JobRecord, act: Callable[[PersistService, Storage], Awaitable[None]], node: Node | None = None,
    **settings: object,
) -> None:  # fmt: skip
    """Runs the service while `act` does."""

    async def run() -> None:
        service = PersistService(
            {"job": job}, node or Node(), PersistSettings(Path("/storage"), **settings), Failpoints()
        )
        storage = service._persister = service.writer.persister = Storage()
        looking = asyncio.ensure_future(service.run())
        try:
            await asyncio.wait_for(act(service, storage), 30)
        finally:
            looking.cancel()
            await service.close()

    asyncio.run(run())


async def reached(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def ask(service: PersistService, job: JobRecord, **facts: object) -> pb.PersistJobReply:
    return await service.request(job, pb.PersistJobRequest(job="job", **facts))


async def ended(service: PersistService, job: JobRecord) -> pb.PersistJobReply:
    """Asks for a checkpoint; returns the last reply."""
    asked = reply = await ask(service, job)
    while not (reply.done or reply.trouble):
        await asyncio.sleep(0.001)
        reply = await ask(service, job, step=asked.step, epoch=asked.epoch)
    return reply


def pinned(job: JobRecord) -> int:
    return job.round.outcome.pins.persist


@pytest.mark.parametrize("is_there", [True, False])
def test_storage_that_is_not_there_is_said_at_the_start(job, caplog, is_there):
    async def act(service: PersistService, storage: Storage) -> None:
        if not is_there:
            storage.failing["look"] = "No such file or directory."
        await storage.looked.wait()

    running(job, act)
    assert ("no checkpoint can be written to /storage now: No such file" in caplog.text) == (not is_there)


def test_the_decision_goes_first_and_the_manifest_last(job):
    async def act(service: PersistService, storage: Storage) -> None:
        await asyncio.sleep(0.02)
        assert not storage.done, "no step of the epoch is whole: its attach may still be refused, and undone"
        whole(job, 3)
        await reached(lambda: storage.of("decide"))
        assert (await ended(service, job)).done and pinned(job) == -1
        await reached(lambda: storage.of("prune"))
        assert [each[0] for each in storage.done] == ["decide", "write", "commit", "prune"]

    running(job, act)


def test_an_error_that_nobody_foresaw_is_an_error_of_this_nodes_attempt(job, monkeypatch):
    """Else the coordinator would ask for ever, and its pin would take a slot of each rank."""

    async def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        await reached(lambda: storage.of("decide"))
        monkeypatch.setattr(node_writer.asyncio, "to_thread", no_thread)
        assert "node n: can't start new thread" in (await ended(service, job)).trouble
        await reached(lambda: pinned(job) == -1)

    running(job, act)


def test_the_step_is_pinned_and_recorded_before_a_node_hears_of_it(job):
    seen = []

    class Watching(Node):
        async def call(self, *arguments, **rest):
            (record,) = JobFiles(job.arena.folder, job.arena.write_files).read()
            seen.append((pinned(job), messages.pins_from(record.pins).persist))
            return await super().call(*arguments, **rest)

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        assert (await ended(service, job)).done

    running(job, act, Watching())
    assert set(seen) == {(3, 3)}


def test_pins_that_cannot_be_recorded_write_nothing(job, monkeypatch):
    def refuse(*_: object) -> None:
        raise NoRoom("the tmpfs is full.")

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "write_pins", refuse)
            await ask(service, job)
            await asyncio.sleep(0.02)
            assert not storage.of("write") and pinned(job) == -1
        await reached(lambda: storage.of("commit"))

    running(job, act)


def test_a_failed_node_alone_tries_again_under_another_attempt(job):
    node = Node(pb.PersistReply(), pb.PersistReply(error="EIO"), pb.PersistReply(error="EIO"), DONE)

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        assert (await ended(service, job)).done
        (first,) = {attempt for _, (_, attempt) in storage.of("write")}
        assert node.attempts == [first, first, first + 1, first + 2]
        assert storage.of("commit") == [(3, ((0, first), (1, first + 2)))]

    running(job, act, node)


def test_after_three_failures_the_step_is_given_up_until_the_next_interval(job):
    node = Node(pb.PersistReply(error="no space is left."))

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        reply = await ended(service, job)
        assert reply.trouble == "step 3 is not on storage: node o: no space is left." and not reply.done
        assert len(set(node.attempts)) == persist_run.ATTEMPTS and pinned(job) == -1
        assert service.status(job).trouble == reply.trouble and not storage.of("commit")
        await asyncio.sleep(0.02)
        first = min(node.attempts)
        assert storage.of("discard") == [(3, range(first, first + persist_run.ATTEMPTS))]
        assert len(set(node.attempts)) == persist_run.ATTEMPTS, "nothing is tried again by itself"
        node.replies = [DONE]
        whole(job, 4)
        assert (await ended(service, job)).done and not service.status(job).trouble
        assert min(storage.of("write")[-1][1]) >= 0 and storage.of("commit")[0][0] == 4
        assert len(storage.of("discard")) == 1

    running(job, act, node)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, "node o is silent for 0 s"),
        (grpc.StatusCode.INVALID_ARGUMENT, "node o does not write"),
    ],
)
def test_a_node_that_is_silent_or_refuses_ends_the_checkpoint(job, monkeypatch, code, text):
    monkeypatch.setattr(persist_run, "SILENCE_S", 0)

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        assert text in (await ended(service, job)).trouble and pinned(job) == -1

    running(job, act, Node(Unavailable(code)))


def test_a_lost_answer_is_asked_for_again(job):
    node = Node(Unavailable(), Unavailable(), DONE)

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        assert (await ended(service, job)).done and len(set(node.attempts)) == 1

    running(job, act, node)


def test_without_its_decision_nothing_is_committed(job, monkeypatch):
    monkeypatch.setattr(persists, "RETRY_S", 0)

    async def act(service: PersistService, storage: Storage) -> None:
        storage.failing["decide"] = "no answer."
        whole(job, 3)
        await reached(lambda: service.status(job).trouble)
        assert service.status(job).trouble == "the decision of this attach is not on storage: no answer."
        assert "no answer" in (await ended(service, job)).trouble and not storage.done
        del storage.failing["decide"]
        await reached(lambda: not service.status(job).trouble)
        assert storage.of("decide") == [(1,)]

    running(job, act)


def test_a_checkpoint_counts_though_old_ones_cannot_be_removed(job):
    async def act(service: PersistService, storage: Storage) -> None:
        storage.failing["prune"] = "a file is held."
        whole(job, 3)
        assert (await ended(service, job)).done
        await reached(lambda: service.status(job).trouble)
        status = service.status(job)
        assert (status.persisted, status.nbytes) == (3, 14)
        assert status.trouble == "old checkpoints are not removed: a file is held."

    running(job, act)


def test_a_restarted_coordinator_goes_on_with_the_recorded_step(job):
    whole(job, 3)
    assert rounds.pin_persist(job, 3)
    before = job.round.outcome.pins
    whole(job, 5)
    rounds.start(job)  # from the record, as after a restart
    assert job.round.outcome.pins == before == Pins(1, 3, persist=3)
    rounds.hear_node(job, pb.GatherRequest(node_index=1, steps=pb.StepReport(since=5, until=5)))

    async def act(service: PersistService, storage: Storage) -> None:
        await reached(lambda: storage.of("commit"))
        ((step, ((_, attempt), _)),) = storage.of("commit")
        assert step == 3 and attempt == (persist_run.ATTEMPTS + 1) * (before.seq + 1)
        await reached(lambda: pinned(job) == -1)

    running(job, act)


def test_a_restarted_coordinator_gives_up_an_exports_step_of_a_job_that_it_does_not_persist(job):
    job.record.manifest.named = False
    whole(job, 3)
    assert rounds.pin_persist(job, 3)
    rounds.start(job)  # from the record, as after a restart
    whole(job, 5)

    async def act(service: PersistService, storage: Storage) -> None:
        await reached(lambda: pinned(job) == -1)
        held = await service.holds.hold(job, pb.HoldRequest(job="job", seconds=60))
        service._look(job)
        assert held.version.step == pinned(job) == 5, "the step of an export that lives stays"

    running(job, act)


def test_a_restarted_coordinator_knows_what_is_on_storage(job):
    async def act(service: PersistService, storage: Storage) -> None:
        storage.stored = StoredStep(Version(job.epoch, 3), time.time() - 60)
        whole(job, 3)
        assert rounds.pin_persist(job, 3), "it was killed between the manifest and the unpinning"
        await reached(lambda: pinned(job) == -1)
        status = service.status(job)
        assert status.persisted == 3 and 60 <= status.age_s < 90
        assert (await ended(service, job)).done and not storage.of("write")

    running(job, act)


def test_an_attach_ends_a_checkpoint_and_the_interval_goes_on(job):
    async def act(service: PersistService, storage: Storage) -> None:
        storage.writing.clear()
        whole(job, 3)
        asked = await ask(service, job)
        await reached(lambda: storage.of("write"))
        attach(job, 2)
        service.wake(job)
        storage.writing.set()
        with pytest.raises(Exception, match="was started again meanwhile"):
            await ask(service, job, step=asked.step, epoch=asked.epoch)
        assert pinned(job) == -1 and not storage.of("commit")
        whole(job, 4)
        assert (await ended(service, job)).done
        assert storage.of("decide")[-1] == (2,) and [step for step, _ in storage.of("commit")] == [4]

    running(job, act)


def test_the_end_of_the_last_trainer_is_followed_by_one_flush(job, monkeypatch):
    monkeypatch.setattr(persists, "FLUSH_AFTER_S", 0.02)
    job.record.manifest.slots = 2

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        assert service.needs(job), "its slots outlive --ttl"
        await reached(lambda: storage.of("commit"))
        await reached(lambda: not service.needs(job))
        assert [step for step, _ in storage.of("commit")] == [3]
        whole(job, 4)
        await asyncio.sleep(0.05)
        assert len(storage.of("commit")) == 1, "once an epoch"

    running(job, act, flushes=True)


def test_a_flush_ends_if_all_trainers_ended_while_a_new_layout_was_decided(job, monkeypatch):
    monkeypatch.setattr(persists, "FLUSH_AFTER_S", 0)
    monkeypatch.setattr(persists, "HOLD_S", 0.01)

    async def act(service: PersistService, storage: Storage) -> None:
        job.leases = {0: Lease(Process(7, 70), 1, object()), 1: Lease(Process(8, 80), 1, object())}
        whole(job, 3)
        rounds.pin(job, pb.PinRequest(job="job", epoch=messages.epoch_to(job.epoch)))
        trainers.note_end(job, 0, job.leases[0])
        assert job.round.is_pinned, "the other trainer may go on"
        trainers.note_end(job, 1, job.leases[1])
        await reached(lambda: storage.of("commit"))
        await reached(lambda: not service.needs(job))

    running(job, act, flushes=True)


def test_without_the_flag_the_end_of_a_job_writes_nothing(job, monkeypatch):
    monkeypatch.setattr(persists, "FLUSH_AFTER_S", 0)

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        await asyncio.sleep(0.03)
        await service.flush()
        assert not storage.of("commit")

    running(job, act)


def test_a_flush_takes_the_newest_whole_step_and_its_grace_at_most(job):
    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        await service.flush()
        assert [step for step, _ in storage.of("commit")] == [3]
        storage.writing.clear()
        whole(job, 4)
        await service.flush()
        assert len(storage.of("commit")) == 1, "the storage hangs"

    running(job, act, flushes=True, grace_s=0.2)


def test_a_node_that_flushes_is_answered_once_the_checkpoint_has_ended(job):
    """The coordinator's daemon may end right after that."""

    async def act(service: PersistService, storage: Storage) -> None:
        whole(job, 3)
        storage.writing.clear()
        first = await ask(service, job, flush=True)
        assert (first.step, first.done) == (3, False)
        held = asyncio.ensure_future(ask(service, job, flush=True, step=3, epoch=first.epoch))
        await reached(lambda: storage.of("write"))
        assert not (await ask(service, job, step=3, epoch=first.epoch)).done, "others are not held"
        assert not held.done()
        storage.writing.set()
        assert (await held).done

    running(job, act)


# A node's part


def test_a_repeated_call_begins_once_and_a_late_one_changes_nothing(job):
    async def act(service: PersistService, storage: Storage) -> None:
        storage.writing.clear()
        request = pb.PersistRequest(
            job="job", epoch=job.record.decision.epoch, version=messages.version_to(Version(job.epoch, 3)),
            lineage=LINEAGE, attempt=8,
        )  # fmt: skip
        for _ in range(3):
            assert not (await service.writer.persist(job, request)).index_digest
            await reached(lambda: storage.of("write"))
        late = pb.PersistRequest()
        late.CopyFrom(request)
        late.attempt = 7
        assert "attempt 8 is under way" in (await service.writer.persist(job, late)).error
        storage.writing.set()
        while not (reply := await service.writer.persist(job, request)).index_digest:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert (reply.written_bytes, reply.total_bytes) == (7, 7)
        assert storage.of("write") == [(3, (0, 8))]
        request.attempt = 9
        await service.writer.persist(job, request)
        await reached(lambda: len(storage.of("write")) == 2)

    running(job, act)


def test_a_daemon_without_storage_refuses(job):
    service = PersistService({"job": job}, SimpleNamespace(), None, Failpoints())
    with pytest.raises(ConfigError, match="can't persist job job"):
        asyncio.run(service.writer.persist(job, pb.PersistRequest(lineage=LINEAGE)))
    with pytest.raises(ConfigError, match="writes no checkpoints"):
        asyncio.run(service.request(job, pb.PersistJobRequest(job="job")))
    assert service.status(job) is None
