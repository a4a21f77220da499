"""Files of checkpoints that a daemon has open, read by a real persister."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reft.core.commit.version import Version
from reft.errors import AttachError, ConfigError, FormatError
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist import stored_reader
from reft_daemon.persist.persister import Persister
from reft_daemon.persist.reader_pool import ReaderPool
from reft_daemon.persist.stored_reader import PENDING_S, StoredReader
from tests.daemon.persist.test_checkpoint_store import EPOCH, LINEAGE, VERSION, Slot, _persist, _store

NAME = "e1-00010203-s40"
NODE = f"run/{LINEAGE}/{NAME}/node-0.0"


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    """A folder with one checkpoint of four ranks."""
    slots = [Slot(rank) for rank in range(4)]
    _persist(_store(tmp_path), slots)
    yield tmp_path
    for slot in slots:
        os.close(slot.source.descriptor)


def reading(storage: Path | None, act: Callable[[StoredReader], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        persister = Persister(storage) if storage else None
        reader = StoredReader(persister)
        try:
            return await act(reader)
        finally:
            reader.close()
            if persister is not None:
                persister.close()

    return asyncio.run(run())


def request(*ranks: int, version: Version = VERSION) -> pb.OpenStoredRequest:
    return pb.OpenStoredRequest(
        job="run", lineage=LINEAGE, name=NAME, version=messages.version_to(version), ranks=ranks, asks_again=True
    )


def test_files_are_slots_and_are_read_without_a_mapping(storage: Path) -> None:
    async def act(reader: StoredReader) -> None:
        assert not (await reader.open(request(1, 3))).damage
        slots = reader.opened["run"]
        assert sorted(slots) == ["stored-1.slot-40", "stored-3.slot-40"]
        for slot in slots.values():
            assert slot.map.capsule() == b"capsule" and slot.map.table() == b"table"
            assert next(slot.map.digests_of(0, 1)) == int(slot.map.digests[0])
            assert await slot.pread(100, 0) == os.pread(slot.descriptor, 100, 0)
            os.truncate(f"/proc/self/fd/{slot.descriptor}", 0)
            with pytest.raises(FormatError, match="ends after"):
                next(slot.map.digests_of(0, 1))
        capsule = reader.capsule("run", 3, VERSION)
        assert capsule is not None and capsule.capsule == b"capsule"
        assert reader.capsule("run", 0, VERSION) is None

    reading(storage, act)


def test_again_closes_what_was_open(storage: Path) -> None:
    async def act(reader: StoredReader) -> None:
        await reader.open(request(0, 1, 2, 3))
        first = list(reader.opened["run"].values())
        await reader.open(request(2))
        assert [slot.descriptor for slot in first] == [-1] * 4 and list(reader.opened["run"]) == ["stored-2.slot-40"]
        reader.expire(1e12)
        assert not reader.opened

    reading(storage, act)


def test_an_attach_whose_files_another_one_replaces_gets_an_answer(storage: Path) -> None:
    async def act(reader: StoredReader) -> None:
        first = asyncio.ensure_future(reader.open(request(0, 1, 2, 3)))
        await asyncio.sleep(0)  # it has begun
        await reader.open(request(2))
        with pytest.raises(AttachError, match="opened for another attach now"):
            await first
        assert list(reader.opened["run"]) == ["stored-2.slot-40"]

    reading(storage, act)


def test_opened_files_stay_for_a_while(storage: Path) -> None:
    async def act(reader: StoredReader) -> None:
        await reader.open(request(0))
        reader.expire(asyncio.get_running_loop().time() + PENDING_S / 2)
        assert "run" in reader.opened

    reading(storage, act)


def _swap(node: Path) -> None:
    os.rename(node / "rank-0.slot", node / "x")
    os.rename(node / "rank-1.slot", node / "rank-0.slot")
    os.rename(node / "x", node / "rank-1.slot")


def _flip_head(node: Path) -> None:
    with open(node / "rank-1.slot", "r+b") as file:
        file.seek(9000)
        file.write(b"\xff")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_swap, "does not fit its digest"),
        (_flip_head, "does not fit its digest"),
        (lambda node: os.truncate(node / "rank-1.slot", 5000), "another length"),
        (lambda node: (node / "rank-1.slot").unlink(), "No such file"),
        (lambda node: (node / "index.json").write_bytes(b"{}" * 40), "digest at their end"),
        (lambda node: (node.parent / "MANIFEST.json").unlink(), "no complete checkpoint"),
    ],
)
def test_damaged_files_are_not_opened(storage: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(storage / NODE)

    async def act(reader: StoredReader) -> None:
        reply = await reader.open(request(0, 1))
        assert words in reply.damage and not reader.opened

    reading(storage, act)


def test_file_of_another_version_is_not_opened(storage: Path) -> None:
    async def act(reader: StoredReader) -> None:
        assert "step 40" in (await reader.open(request(0, version=Version(EPOCH, 41)))).damage

    reading(storage, act)


def test_listing_names_lineages_decisions_and_checkpoints(storage: Path) -> None:
    async def act(reader: StoredReader) -> None:
        (lineage,) = (await reader.stored(pb.StoredRequest(job="run"))).lineages
        assert lineage.ident == LINEAGE and not lineage.has_ended and len(lineage.decisions) == 1
        assert [each.name for each in lineage.checkpoints] == [NAME]
        assert not (await reader.stored(pb.StoredRequest(job="other"))).lineages
        for asked, found in ((LINEAGE, [LINEAGE]), ("fedcba9876543210", [])):
            reply = await reader.stored(pb.StoredRequest(job="run", lineage=asked))
            assert [each.ident for each in reply.lineages] == found
        gone = await reader.stored(pb.StoredRequest(job="run", lineage=LINEAGE, name="e1-00010203-s41"))
        assert "no complete checkpoint" in gone.damage

    reading(storage, act)


def test_missing_storage_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match=r"storage .*/none can't be read"):
        reading(tmp_path / "none", lambda reader: reader.stored(pb.StoredRequest(job="run")))
    with pytest.raises(ConfigError, match="no storage"):
        reading(None, lambda reader: reader.stored(pb.StoredRequest(job="run")))


def test_storage_that_hangs_is_an_error(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped persister stands for one that waits for storage."""

    async def act(reader: StoredReader) -> None:
        await reader.stored(pb.StoredRequest(job="run"))
        assert reader._persister is not None
        running = await reader._persister.child.ensure()
        running.process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(stored_reader, "LIST_S", 0.1)
        with pytest.raises(AttachError, match=f"storage {storage} does not answer"):
            await reader.stored(pb.StoredRequest(job="run"))
        monkeypatch.undo()
        assert (await reader.stored(pb.StoredRequest(job="run"))).lineages, "another persister is started"

    reading(storage, act)


HELD_READ = """
import asyncio, os, threading
from reft_daemon.persist.stored_reader import StoredReader, StoredSlotFile

held = threading.Event()

def pread(*_):
    held.set()
    threading.Event().wait()

async def main():
    reader = StoredReader(None)
    slot = StoredSlotFile("stored-0.slot-1", 0, 0, None, 1, None, pool=reader._pool)
    read = asyncio.ensure_future(slot.pread(1, 0))
    await asyncio.to_thread(held.wait)
    read.cancel()
    reader.close()

os.pread = pread
asyncio.run(main())
"""


def test_end_of_the_daemon_does_not_wait_for_a_read() -> None:
    subprocess.run([sys.executable, "-c", HELD_READ], check=True, timeout=60)


def test_reads_that_have_not_begun_are_given_up_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, threads = threading.Semaphore(0), threading.Event(), []

    def pread(*arguments: int) -> bytes:
        threads.append(threading.current_thread())
        begun.release()
        goes_on.wait()
        return b"bytes"

    async def run() -> None:
        pool = ReaderPool(2)
        reads = [asyncio.ensure_future(pool.pread(0, 1, 0)) for _ in range(3)]
        for _ in range(2):
            await asyncio.to_thread(begun.acquire)
        pool.close()
        goes_on.set()
        assert await asyncio.gather(*reads[:2]) == [b"bytes"] * 2
        with pytest.raises(asyncio.CancelledError):
            await reads[2]

    monkeypatch.setattr(os, "pread", pread)
    asyncio.run(run())
    for thread in threads:
        thread.join(60)
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)
