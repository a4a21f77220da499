"""Objects of checkpoints that a daemon has fetched, by a real persister from a real server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from reft.errors import AttachError
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist import stored_reader
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.persister import Persister
from reft_daemon.persist.storage_root import open_root
from reft_daemon.persist.stored_reader import PENDING_S, StoredReader
from tests.daemon.persist.test_checkpoint_store import GEOMETRY, LINEAGE, VERSION, Slot, _persist
from tests.daemon.persist.test_object_folder import large_slot
from tests.daemon.persist.test_stored_reader import NAME, request
from tests.support.objects import ENVIRONMENT, ObjectServer, Refusal, RequestCheck, object_server


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def server(running: ObjectServer) -> Iterator[ObjectServer]:
    running.check, running.requests = RequestCheck(), []
    running.released.clear()
    yield running
    running.released.set()


@pytest.fixture
def storage(server: ObjectServer) -> str:
    """A prefix with one checkpoint of four ranks."""
    url, slots = f"s3://{server.new_bucket()}/checkpoints", [Slot(rank) for rank in range(4)]
    _persist(CheckpointStore(open_root(url), "run"), slots)
    for slot in slots:
        os.close(slot.source.descriptor)
    return url


def reading(url: str, act: Callable[[StoredReader, Any], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        persister, memory = Persister(url), SimpleNamespace(held_bytes=0)
        reader = StoredReader(persister, memory)  # type: ignore[arg-type]
        try:
            return await act(reader, memory)
        finally:
            reader.close()
            persister.close()
            assert memory.held_bytes == 0

    return asyncio.run(run())


def test_objects_are_slots_and_are_counted_as_memory(storage: str) -> None:
    async def act(reader: StoredReader, memory: Any) -> None:
        assert not (await reader.open(request(1, 3))).damage
        slots = reader.opened["run"]
        assert sorted(slots) == ["stored-1.slot-40", "stored-3.slot-40"]
        for slot in slots.values():
            assert slot.map.capsule() == b"capsule" and slot.map.table() == b"table"
            assert next(slot.map.digests_of(0, 1)) == int(slot.map.digests[0])
            assert len(await slot.pread(GEOMETRY.file_bytes + 1, 0)) == GEOMETRY.file_bytes
        assert memory.held_bytes == 2 * (GEOMETRY.data_offset + 3 * 4096 + 100)
        assert reader._persister is not None
        child = (await reader._persister.child.ensure()).process.pid
        assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in " ".join(psutil.Process(child).cmdline())
        reader.close_pending("run")
        assert memory.held_bytes == 0

    reading(storage, act)


def test_answer_comes_before_all_is_fetched(
    server: ObjectServer, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.check = Refusal(-1, lambda request: request.key.endswith("rank-3.slot") and request.method == "GET")

    async def act(reader: StoredReader, memory: Any) -> None:
        monkeypatch.setattr(stored_reader, "HOLD_S", 0.05)
        while not (reply := await reader.open(request(0, 3))).fetched_bytes:
            assert reply.opening and not reader.opened
        monkeypatch.setattr(stored_reader, "HOLD_S", 30.0)
        server.check = RequestCheck()
        server.released.set()
        assert not (await reader.open(request(0, 3))).opening
        assert sorted(reader.opened["run"]) == ["stored-0.slot-40", "stored-3.slot-40"]

    reading(storage, act)


def test_old_trainer_gets_its_answer_once_all_is_fetched(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_reader, "HOLD_S", 0.0)

    async def act(reader: StoredReader, memory: Any) -> None:
        once = request(0, 3)
        once.asks_again = False
        reply = await reader.open(once)
        assert not reply.opening and not reply.damage and len(reader.opened["run"]) == 2

    reading(storage, act)


def test_fetch_that_nobody_asks_for_ends(server: ObjectServer, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.check = Refusal(-1, lambda request: request.key.endswith("rank-3.slot") and request.method == "GET")

    async def act(reader: StoredReader, memory: Any) -> None:
        monkeypatch.setattr(stored_reader, "HOLD_S", 0.05)
        assert (await reader.open(request(3))).opening
        task = reader._opening["run"].task
        reader.expire(asyncio.get_running_loop().time() + PENDING_S / 2)
        assert reader._opening
        reader.expire(1e12)
        server.released.set()
        await asyncio.wait({task})
        assert task.cancelled() and not reader.opened

    reading(storage, act)


def test_killed_in_an_upload_nothing_is_visible(server: ObjectServer) -> None:
    """The next attempt is whole."""
    bucket, (source, _) = server.new_bucket(), large_slot()
    server.check = Refusal(-1, lambda request: "partNumber=3" in request.query)

    async def run() -> None:
        persister = Persister(f"s3://{bucket}")

        def write(attempt: int) -> asyncio.Task[str]:
            work = persister.write("run", LINEAGE, VERSION, (0, attempt), [source], lambda nbytes: None)
            return asyncio.ensure_future(work)

        task = write(0)
        while not any("partNumber=3" in request.query for request in server.requests):
            await asyncio.sleep(0)
            assert not task.done()
        (await persister.child.ensure()).process.kill()
        with pytest.raises(AttachError):
            await task
        server.check = RequestCheck()
        server.released.set()
        assert server.keys(bucket) == []
        await write(1)
        persister.close()

    asyncio.run(run())
    os.close(source.descriptor)
    assert [key.rpartition("/")[2] for key in server.keys(bucket)] == ["index.json", "rank-0.slot"]


def test_missing_object_is_damage(server: ObjectServer, storage: str) -> None:
    bucket = storage.split("/")[2]
    server.client().delete_object(Bucket=bucket, Key=f"checkpoints/run/{LINEAGE}/{NAME}/node-0.0/rank-1.slot")

    async def act(reader: StoredReader, memory: Any) -> None:
        reply = await reader.open(request(0, 1, version=VERSION))
        assert "No such file" in reply.damage and not reader.opened and not memory.held_bytes

    reading(storage, act)


def test_store_that_refuses_or_hangs_is_an_error(
    server: ObjectServer, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(reader: StoredReader, memory: Any) -> None:
        server.check = Refusal(403)
        with pytest.raises(AttachError, match=f"storage {storage} can't be read: .*Refused") as error:
            await reader.stored(pb.StoredRequest(job="run"))
        assert "credentials in this daemon's environment" in str(error.value)
        server.check = Refusal(-1)
        monkeypatch.setattr(stored_reader, "LIST_S", 0.1)
        with pytest.raises(AttachError, match=f"storage {storage} does not answer"):
            await reader.stored(pb.StoredRequest(job="run"))
        server.check = RequestCheck()
        monkeypatch.undo()
        assert (await reader.stored(pb.StoredRequest(job="run"))).lineages, "another persister is started"

    reading(storage, act)


def test_only_checkpoint_with_a_damaged_manifest_is_no_empty_storage(server: ObjectServer, storage: str) -> None:
    bucket = storage.split("/")[2]
    key = f"checkpoints/run/{LINEAGE}/{NAME}/MANIFEST.json"
    server.client().put_object(Bucket=bucket, Key=key, Body=b"{}" * 40)

    async def act(reader: StoredReader, memory: Any) -> None:
        with pytest.raises(AttachError, match=f"{NAME} is the only checkpoint"):
            await reader.stored(pb.StoredRequest(job="run"))

    reading(storage, act)
