"""Checkpoints in an object store: moto's S3 server on loopback, as it is and with faults."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.persist.retention import RetentionSettings
from reft.errors import ConfigError, FormatError, NoRoom
from reft.wire import stored_format as stored
from reft.wire.shm import map_file
from reft.wire.slot_format import Geometry, SlotMap, chunk_digest
from reft_daemon.persist import object_folder
from reft_daemon.persist.checkpoint_store import CheckpointStore, StaleCoordinator
from reft_daemon.persist.slot_copy import SlotRange, SlotSource, verify_file
from reft_daemon.persist.storage_root import open_root
from tests.daemon.persist.test_checkpoint_store import (
    DECISION,
    EPOCH,
    GEOMETRY,
    LINEAGE,
    RANGES,
    VERSION,
    Slot,
    _drain,
    _manifest,
    _persist,
)  # fmt: skip
from tests.support.objects import ENVIRONMENT, ObjectRequest, ObjectServer, Refusal, RequestCheck, object_server

NEWER = replace(VERSION, step=50)
FOLDER = f"prefix/run/{LINEAGE}/e1-00010203-s40"


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The server, without faults; the client repeats nothing."""
    monkeypatch.setattr(object_folder, "RETRIES", 0)
    running.check, running.requests = RequestCheck(), []
    running.released.clear()
    yield running
    running.check = RequestCheck()
    running.released.set()


@pytest.fixture
def bucket(server: ObjectServer) -> str:
    return server.new_bucket()


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    made = [Slot(rank) for rank in range(4)]
    yield made
    for slot in made:
        os.close(slot.source.descriptor)


def _store(bucket: str) -> CheckpointStore:
    return CheckpointStore(open_root(f"s3://{bucket}/prefix"), "run")


def _seal(slots: list[Slot], version: Version) -> None:
    for slot in slots:
        slot.seal(version)


def _check_complete(bucket: str, slots: list[Slot], version: Version = VERSION) -> None:
    store = _store(bucket)
    assert store.lineage(LINEAGE).restorable()[0] == version
    listed = next(each for each in store.checkpoints(LINEAGE) if each.manifest.version == version)
    files = store.indexes(listed)
    assert sorted(files) == [0, 1, 2, 3]
    for slot in slots:
        folder, file = files[slot.source.rank]
        descriptor = store.open(folder, file)
        try:
            assert os.pread(descriptor, GEOMETRY.file_bytes + 1, 0) == slot.stored_bytes()
            for _ in verify_file(descriptor, file, RANGES):
                pass
        finally:
            os.close(descriptor)


def test_slots_come_back_byte_for_byte(server: ObjectServer, bucket: str, slots: list[Slot]) -> None:
    _persist(_store(bucket), slots)
    _check_complete(bucket, slots)
    assert all(key.startswith(f"prefix/run/{LINEAGE}/") for key in server.keys(bucket))


def test_parity_is_not_sent(server: ObjectServer, bucket: str, slots: list[Slot]) -> None:
    _persist(_store(bucket), slots)
    sizes = {
        each["Size"]
        for each in server.client().list_objects_v2(Bucket=bucket)["Contents"]
        if each["Key"].endswith(".slot")
    }
    assert sizes == {GEOMETRY.data_offset + 2 * 4096 + 4096 + 100}


def large_slot() -> tuple[SlotSource, Geometry]:
    """Returns a sealed slot with 27 MiB for storage, in a memfd, and its geometry."""
    size = 1 << 20
    geometry = Geometry(256, 40 * size, size)
    ranges = (SlotRange(0, 17 * size), SlotRange(30 * size, 1 << 60))
    source = SlotSource(0, os.memfd_create("slot"), ranges)
    os.ftruncate(source.descriptor, geometry.file_bytes)
    slot = SlotMap.create(map_file(source.descriptor, geometry.file_bytes)[1], geometry, "run", 0)
    slot.begin(VERSION, bytes(16), b"table", 40 * size - 5)
    slot.data[:] = np.random.default_rng(1).integers(1, 255, slot.data.nbytes, np.uint8)
    slot.put_capsule(b"capsule")
    slot.landed()
    slot.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64))
    return source, geometry


def test_large_file_is_sent_and_fetched_in_parts(server: ObjectServer, bucket: str) -> None:
    source, geometry = large_slot()
    ranges, size = source.ranges, geometry.chunk_bytes
    store = _store(bucket)
    store.put_decision(LINEAGE, DECISION)
    store.commit(_manifest([_drain(store.write_node(LINEAGE, VERSION, 0, 0, [source]))]), DECISION)
    parts = [each for each in server.requests if each.method == "PUT" and "partNumber" in each.query]
    assert len(parts) == 4
    ((folder, file),) = store.indexes(store.checkpoints(LINEAGE)[0]).values()
    assert [run.offset for run in file.runs] == [0, geometry.data_offset + 30 * size]
    fetched: list[int] = []
    descriptor = store.open(folder, file, fetched.append)
    assert sum(fetched) == sum(run.nbytes for run in file.runs) and len(fetched) > 3
    for _ in verify_file(descriptor, file, ranges):
        pass
    assert os.fstat(descriptor).st_blocks * 512 < geometry.file_bytes - 12 * size
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    os.close(descriptor)
    os.close(source.descriptor)


def test_two_coordinators_commit_one_version(bucket: str, slots: list[Slot]) -> None:
    store = _store(bucket)
    store.put_decision(LINEAGE, DECISION)
    nodes = [
        _drain(store.write_node(LINEAGE, VERSION, node, 0, [slot.source for slot in slots[2 * node : 2 * node + 2]]))
        for node in range(2)
    ]
    manifests = [_manifest(nodes), _manifest(nodes)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: _store(bucket).commit(each, DECISION), manifests))
    (listed,) = store.checkpoints(LINEAGE)
    assert listed.manifest in manifests
    _check_complete(bucket, slots)


def test_one_of_two_puts_wins(bucket: str) -> None:
    folder = open_root(f"s3://{bucket}/prefix")
    with ThreadPoolExecutor(2) as pool:
        wins = list(pool.map(lambda text: folder.put_if_absent("name", text), [b"one", b"two"]))
    assert sorted(wins) == [False, True]
    assert folder.read("name", 9) == (b"one", b"two")[wins.index(True)]


def _is_put(request: ObjectRequest) -> bool:
    return request.method == "PUT"


def test_put_whose_reply_was_lost_counts(server: ObjectServer, bucket: str, slots: list[Slot]) -> None:
    store = _store(bucket)
    for skip in range(8):
        server.check = Refusal(500, _is_put, skip, count=1, is_late=True)
        try:
            _persist(store, slots, replace(VERSION, step=40 + skip), attempt=skip)
        except OSError:  # of a rank's file, which is only an attempt more
            assert 1 <= skip <= 4
        except FormatError as error:  # the slots hold one step only
            assert "not step" in error.message


def test_stale_coordinator_neither_commits_nor_removes(bucket: str, slots: list[Slot]) -> None:
    store = _store(bucket)
    _persist(store, slots)
    store.put_decision(LINEAGE, Decision(Epoch(2, bytes(16)), VERSION, (EPOCH,)))
    _seal(slots, NEWER)
    with pytest.raises(StaleCoordinator, match="went on in epoch 2"):
        _persist(store, slots, NEWER)
    with pytest.raises(StaleCoordinator):
        store.prune(LINEAGE, DECISION, RetentionSettings(keep=1))
    assert store.lineage(LINEAGE).restorable() == [VERSION]


@pytest.mark.parametrize("status", [503, 403])
def test_refused_at_each_request_the_older_checkpoint_stays(
    server: ObjectServer, bucket: str, slots: list[Slot], status: int
) -> None:
    _persist(_store(bucket), slots)
    newest, outcomes = VERSION, []
    for number in range(100):
        _seal(slots, version := replace(VERSION, step=50 + number))
        server.check = check = Refusal(status, skip=number, count=1)
        try:
            _persist(_store(bucket), slots, version)
        except OSError as error:
            assert error.errno in (errno.EIO, errno.EACCES) and "signature" not in str(error)
            outcomes.append(False)
        else:
            outcomes.append(True)
        server.check = RequestCheck()
        found = _store(bucket).lineage(LINEAGE).restorable()[0]
        assert found == version if outcomes[-1] else found in (newest, version)
        newest = found
        if check.count:
            break
    assert outcomes[-1] and outcomes.count(False) > 10
    _check_manifested(bucket)
    assert not server.client().list_multipart_uploads(Bucket=bucket).get("Uploads")


def _check_manifested(bucket: str) -> None:
    """Every checkpoint that has a manifest has all its files."""
    store = _store(bucket)
    for listed in store.checkpoints(LINEAGE):
        for folder, file in store.indexes(listed).values():
            os.close(store.open(folder, file))


def test_store_that_is_busy_for_a_moment_is_asked_again(
    server: ObjectServer, bucket: str, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_folder, "RETRIES", 3)
    server.check = Refusal(503, skip=5, count=2)
    _persist(_store(bucket), slots)
    _check_complete(bucket, slots)


def test_store_that_hangs_is_an_error(
    server: ObjectServer, bucket: str, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_folder, "TIMEOUT", timedelta(milliseconds=200))
    server.check = Refusal(-1)
    with pytest.raises(OSError, match=f"s3://{bucket}/prefix"):
        _store(bucket).lineages()
    with pytest.raises(OSError, match="s3://"):
        _drain(_store(bucket).write_node(LINEAGE, VERSION, 0, 0, [slots[0].source]))


def test_store_that_is_down_is_an_error(bucket: str, slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(bucket)
    _persist(store, slots)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        down = _store(bucket)
    for act in (
        down.lineages,
        lambda: down.put_decision(LINEAGE, DECISION),
        lambda: _drain(down.write_node(LINEAGE, NEWER, 0, 0, [slots[0].source])),
        lambda: down.commit(_manifest([], NEWER), DECISION),
        lambda: down.prune(LINEAGE, DECISION, RetentionSettings(1)),
        lambda: down.end(LINEAGE),
    ):
        with pytest.raises(OSError) as error:
            act()
        assert error.value.errno == errno.EIO
    _check_complete(bucket, slots)


def test_failed_upload_is_aborted_and_shows_nothing(
    server: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_folder, "RETRIES", 5)  # moto may refuse an abort while a part is under way
    folder = open_root(f"s3://{bucket}/prefix")
    file = folder.create("large")
    block = memoryview(bytes(object_folder.PART_BYTES))
    for number in range(4):
        file.write(block, number * len(block))
    file.abandon()
    file.abandon()
    assert server.keys(bucket) == []
    assert not server.client().list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_attempt_that_exists_is_not_written_again(bucket: str, slots: list[Slot]) -> None:
    _persist(_store(bucket), slots)
    with pytest.raises(FileExistsError):
        _persist(_store(bucket), slots)
    _check_complete(bucket, slots)


def test_missing_object_is_an_erasure(server: ObjectServer, bucket: str, slots: list[Slot]) -> None:
    _persist(_store(bucket), slots)
    server.client().delete_object(Bucket=bucket, Key=f"{FOLDER}/node-0.0/rank-1.slot")
    store = _store(bucket)
    files = store.indexes(store.checkpoints(LINEAGE)[0])
    with pytest.raises(FileNotFoundError) as error:
        store.open(*files[1])
    assert error.value.errno == errno.ENOENT
    os.close(store.open(*files[0]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mine, other: mine[:-4096], "another length"),
        (lambda mine, other: mine + b"x", "another length"),
        (lambda mine, other: other, "does not fit its digest"),
        (lambda mine, other: mine[:-7] + b"\0" + mine[-6:], "wrong digest"),
    ],
)
def test_damaged_object_is_found(server: ObjectServer, bucket: str, slots: list[Slot], change, words: str) -> None:
    _persist(_store(bucket), slots)
    client, keys = server.client(), [f"{FOLDER}/node-0.0/rank-{rank}.slot" for rank in range(2)]
    mine, other = (client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys)
    client.put_object(Bucket=bucket, Key=keys[0], Body=change(mine, other))
    store = _store(bucket)
    folder, file = store.indexes(store.checkpoints(LINEAGE)[0])[0]
    with pytest.raises(FormatError, match=words):
        descriptor = store.open(folder, file)
        for _ in verify_file(descriptor, file, RANGES):
            pass


def test_object_that_shrinks_while_it_is_fetched_is_an_error(
    server: ObjectServer, bucket: str, slots: list[Slot]
) -> None:
    _persist(_store(bucket), slots)
    store = _store(bucket)
    folder, file = store.indexes(store.checkpoints(LINEAGE)[0])[0]
    server.check = Refusal(404, lambda request: request.method == "GET")
    with pytest.raises(FileNotFoundError):
        store.open(folder, file)


def test_foreign_objects_are_neither_read_nor_removed(server: ObjectServer, bucket: str, slots: list[Slot]) -> None:
    store, client = _store(bucket), server.client()
    _persist(store, slots)
    mine = [f"prefix/run/{LINEAGE}/notes.txt", f"{FOLDER}/mine", f"{FOLDER}/node-0.0/mine", f"{FOLDER}/x/y"]
    for key in (*mine, f"prefix/run/{LINEAGE}/DECISION-1", "prefix-2/run/other"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    _seal(slots, NEWER)
    _persist(store, slots, NEWER)
    assert store.prune(LINEAGE, DECISION, RetentionSettings(keep=1)) == ["e1-00010203-s40"]
    assert set(mine) <= set(server.keys(bucket))
    assert [key for key in server.keys(bucket) if key.startswith(FOLDER)] == sorted(mine[1:])
    _check_complete(bucket, slots, NEWER)


def test_refused_at_each_removal_no_manifest_is_without_files(
    server: ObjectServer, bucket: str, slots: list[Slot]
) -> None:
    _persist(_store(bucket), slots)
    _seal(slots, NEWER)
    _persist(_store(bucket), slots, NEWER)
    for number in range(100):
        server.check = check = Refusal(503, skip=number, count=1)
        try:
            _store(bucket).prune(LINEAGE, DECISION, RetentionSettings(keep=1))
        except OSError:
            pass
        server.check = RequestCheck()
        _check_manifested(bucket)
        if check.count:
            break
    assert number > 5
    assert _store(bucket).lineage(LINEAGE).restorable() == [NEWER]


def test_store_that_can_not_be_listed_is_not_empty(server: ObjectServer, bucket: str) -> None:
    assert _store(bucket).lineages() == []
    with pytest.raises(OSError, match="NoSuchBucket"):
        _store("no-such-bucket").lineages()
    for status in (403, 500, 503):
        server.check = Refusal(status)
        with pytest.raises(OSError, match=r"Refused|without"):
            _store(bucket).lineages()


def test_words_have_no_secret(server: ObjectServer, bucket: str) -> None:
    for status in (403, 503):
        server.check = Refusal(status)
        with pytest.raises(OSError) as error:
            _store(bucket).lineages()
        assert "signature" not in str(error.value) and "list-type" not in str(error.value)
        assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in str(error.value)
        assert f"s3://{bucket}/prefix/run" in str(error.value)


def test_object_that_does_not_fit_into_memory_is_refused(
    server: ObjectServer, bucket: str, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    _persist(_store(bucket), slots)
    store = _store(bucket)
    folder, file = store.indexes(store.checkpoints(LINEAGE)[0])[0]
    limit = object_folder.limits(1, 0)[1]
    monkeypatch.setattr(object_folder, "limits", lambda *_: [limit])
    server.requests.clear()
    with pytest.raises(NoRoom, match=r"fetched into memory, needs .*--memory leaves 1 B"):
        store.open(folder, file)
    assert [request.method for request in server.requests] == ["HEAD"]


def test_index_of_a_folder_is_not_one_of_objects(bucket: str) -> None:
    folder = open_root(f"s3://{bucket}/prefix")
    folder.put_if_absent("rank-0.slot", b"12345")
    with pytest.raises(FormatError, match="another length"):
        folder.open("rank-0.slot", 5, ())
    with pytest.raises(ConfigError):
        open_root("s3://key:secret@bucket/prefix")
    assert stored.StoredFile(0, 5, "ab").runs == ()


def test_ended_lineage_is_marked(bucket: str, slots: list[Slot]) -> None:
    store = _store(bucket)
    _persist(store, slots)
    store.end(LINEAGE)
    store.end(LINEAGE)
    assert store.lineage(LINEAGE).has_ended


def test_memory_of_a_block_may_be_used_again_at_once(server: ObjectServer, bucket: str) -> None:
    block = bytearray(b"a" * 1000)
    file = open_root(f"s3://{bucket}/prefix").create("name")
    for number, letter in enumerate(b"abc"):
        block[:] = bytes([letter]) * 1000
        file.write(memoryview(block), 1000 * number)
    block[:] = bytes(1000)
    file.complete(3000)
    body = server.client().get_object(Bucket=bucket, Key="prefix/name")["Body"].read()
    assert body == b"a" * 1000 + b"b" * 1000 + b"c" * 1000


def test_bytes_that_come_too_late_are_refused(bucket: str) -> None:
    file = open_root(f"s3://{bucket}/prefix").create("name")
    file.write(memoryview(b"12345"), 100)
    with pytest.raises(OSError, match="come after those at 105"):
        file.write(memoryview(b"1"), 104)
    file.abandon()
