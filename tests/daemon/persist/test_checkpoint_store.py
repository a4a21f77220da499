"""Checkpoints on storage under every crash, and under storage that fails."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.persist import stored_names
from reft.core.persist.retention import RetentionSettings
from reft.errors import FormatError
from reft.wire import messages
from reft.wire import stored_format as stored
from reft.wire.shm import map_file
from reft.wire.slot_format import Geometry, SlotMap, chunk_digest
from reft_daemon.persist import checkpoint_store
from reft_daemon.persist.checkpoint_store import CheckpointStore, StaleCoordinator, discard_attempts
from reft_daemon.persist.slot_copy import SlotRange, SlotSource, copy_slot, verify_file
from reft_daemon.persist.storage_folder import StorageFolder
from tests.support import storage
from tests.support.storage import FaultyStorage, Killed

LINEAGE = "0123456789abcdef"
EPOCH = Epoch(1, bytes(range(16)))
VERSION = Version(EPOCH, 40)
DECISION = Decision(EPOCH, None)
CHUNK = 4096
GEOMETRY = Geometry(256, 6 * CHUNK, CHUNK)
RANGES = (SlotRange(0, 2 * CHUNK), SlotRange(4 * CHUNK, 5 * CHUNK + 100))


class Slot:
    """A sealed slot of one rank, in a memfd."""

    def __init__(self, rank: int, version: Version = VERSION) -> None:
        self.source = SlotSource(rank, os.memfd_create("slot"), RANGES)
        os.ftruncate(self.source.descriptor, GEOMETRY.file_bytes)
        self.map = SlotMap.create(map_file(self.source.descriptor, GEOMETRY.file_bytes)[1], GEOMETRY, "run", rank)
        self.seal(version)

    def seal(self, version: Version) -> None:
        slot = self.map
        slot.begin(version, bytes(16), b"table", 5 * CHUNK + 100)
        slot.data[:] = np.random.default_rng(slot.header.rank + version.step).integers(
            1, 255, slot.data.nbytes, np.uint8
        )
        slot.put_capsule(b"capsule")
        slot.landed()
        slot.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64))

    def stored_bytes(self) -> bytes:
        """What storage must have of the slot."""
        whole = bytearray(os.pread(self.source.descriptor, GEOMETRY.file_bytes, 0))
        begin = GEOMETRY.data_offset
        whole[begin + 2 * CHUNK : begin + 4 * CHUNK] = bytes(2 * CHUNK)
        return bytes(whole[: begin + 5 * CHUNK + 100]).ljust(GEOMETRY.file_bytes, b"\0")


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    """The slots of four ranks on two nodes."""
    made = [Slot(rank) for rank in range(4)]
    yield made
    for slot in made:
        os.close(slot.source.descriptor)


def _drain(work: Generator[int, None, stored.StoredNode]) -> stored.StoredNode:
    while True:
        try:
            next(work)
        except StopIteration as end:
            node: stored.StoredNode = end.value
            return node


def _manifest(nodes: list[stored.StoredNode], version: Version = VERSION) -> stored.StoredManifest:
    decision = messages.decision_to(DECISION).SerializeToString()
    return stored.StoredManifest(version, "run", LINEAGE, os.urandom(16).hex(), b"manifest", decision, tuple(nodes))


def _persist(store: CheckpointStore, slots: list[Slot], version: Version = VERSION, attempt: int = 0) -> None:
    store.put_decision(LINEAGE, DECISION)
    nodes = [
        _drain(
            store.write_node(LINEAGE, version, node, attempt, [slot.source for slot in slots[2 * node : 2 * node + 2]])
        )
        for node in range(2)
    ]
    store.commit(_manifest(nodes, version), DECISION)


def _store(path: Path, calls: FaultyStorage | None = None) -> CheckpointStore:
    return CheckpointStore(StorageFolder(path, calls or os), "run")


def _check_complete(path: Path, slots: list[Slot], version: Version = VERSION) -> None:
    """Reads the checkpoint back, byte for byte and by its digests."""
    store = _store(path)
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


def _is_complete(path: Path) -> bool:
    store = _store(path)
    return LINEAGE in store.lineages() and bool(store.checkpoints(LINEAGE))


def test_slots_come_back_byte_for_byte(tmp_path: Path, slots: list[Slot]) -> None:
    _persist(_store(tmp_path), slots)
    _check_complete(tmp_path, slots)


def test_parity_takes_no_space(tmp_path: Path, slots: list[Slot]) -> None:
    _persist(_store(tmp_path), slots)
    files = sorted(tmp_path.rglob("rank-*.slot"))
    assert len(files) == 4
    assert all(each.stat().st_size == GEOMETRY.file_bytes for each in files)
    whole = GEOMETRY.file_bytes // 512
    assert all(each.stat().st_blocks < whole for each in files)


@pytest.mark.parametrize("ending", ["process", "machine"])
def test_killed_at_each_call_leaves_a_complete_checkpoint_or_none(
    tmp_path: Path, slots: list[Slot], ending: str
) -> None:
    dry = tmp_path / "dry"
    dry.mkdir()
    counter = FaultyStorage(dry)
    _persist(_store(dry, counter), slots)
    outcomes = set()
    for number in range(len(counter.calls)):
        path = tmp_path / str(number)
        path.mkdir()
        faulty = FaultyStorage(path, storage.kill_at(number))
        with pytest.raises(Killed):
            _persist(_store(path, faulty), slots)
        faulty.stop_machine() if ending == "machine" else faulty.close_all()
        outcomes.add(complete := _is_complete(path))
        if complete:
            _check_complete(path, slots)
        _persist(_store(path, FaultyStorage(path)), slots, attempt=1)  # the next attempt, on what was left
        _check_complete(path, slots)
    assert outcomes == {True, False}
    faulty = FaultyStorage(tmp_path / "whole")
    faulty.root.mkdir()
    _persist(_store(faulty.root, faulty), slots)
    faulty.stop_machine()
    _check_complete(faulty.root, slots)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("write", errno.ENOSPC), ("sync", errno.EIO), ("sync data", errno.EIO), ("close", errno.EDQUOT), ("create", errno.EROFS),
        ("create", errno.ENOSPC), ("mkdir", errno.EDQUOT), ("link", errno.EIO), ("sync folder", errno.EIO),
        ("truncate", errno.ENOSPC),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_refusing_storage_is_said_and_the_older_checkpoint_stays(
    tmp_path: Path, slots: list[Slot], call: str, code: int, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reft_daemon.persist.storage_folder.SYNC_BYTES", CHUNK)
    _persist(_store(tmp_path), slots)
    for slot in slots:
        slot.seal(replace(VERSION, step=50))
    faulty = FaultyStorage(tmp_path, storage.fail(call, code, nth))
    try:
        _persist(_store(tmp_path, faulty), slots, replace(VERSION, step=50))
    except OSError as error:
        assert error.errno == code
        faulty.close_all()
        assert _store(tmp_path).lineage(LINEAGE).restorable() == [VERSION]
    else:
        assert faulty.calls.count(call) <= nth
        _check_complete(tmp_path, slots, replace(VERSION, step=50))


def test_failed_fsync_is_never_tried_again_on_the_same_file(tmp_path: Path, slots: list[Slot]) -> None:
    faulty = FaultyStorage(tmp_path, storage.fail("sync", errno.EIO, 2))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        _persist(_store(tmp_path, faulty), slots)
    assert faulty.calls.count("sync") == 3
    assert faulty.calls[-1] == "close"


def test_short_writes_are_continued(tmp_path: Path, slots: list[Slot]) -> None:
    _persist(_store(tmp_path, FaultyStorage(tmp_path, largest_write=1000)), slots)
    _check_complete(tmp_path, slots)


def test_storage_that_takes_nothing_is_an_error(tmp_path: Path, slots: list[Slot]) -> None:
    with pytest.raises(OSError, match="takes no more"):
        _persist(_store(tmp_path, FaultyStorage(tmp_path, largest_write=0)), slots)


@pytest.mark.parametrize("code", [errno.EIO, errno.EEXIST, errno.ETIMEDOUT])
def test_link_whose_reply_was_lost_counts(tmp_path: Path, slots: list[Slot], code: int) -> None:
    _persist(_store(tmp_path, FaultyStorage(tmp_path, after=storage.lose_reply("link", code))), slots)
    _check_complete(tmp_path, slots)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_storage_without_links(tmp_path: Path, slots: list[Slot], code: int) -> None:
    store = _store(tmp_path, FaultyStorage(tmp_path, storage.fail("link", code)))
    _persist(store, slots)
    _check_complete(tmp_path, slots)
    store.put_decision(LINEAGE, DECISION)  # a repeated one changes nothing


def test_full_storage_without_links_keeps_no_part_of_a_decision(tmp_path: Path) -> None:
    """Else each later attach would find a damaged decision."""

    def before(number: int, call: str) -> None:
        if call == "link":
            raise OSError(errno.EPERM, "no links")
        if call == "write" and "link" in calls.calls:
            raise OSError(errno.ENOSPC, "full")

    calls = FaultyStorage(tmp_path)
    calls.before = before
    with pytest.raises(OSError, match="full"):
        _store(tmp_path, calls).put_decision(LINEAGE, DECISION)
    assert not os.listdir(tmp_path / "run" / LINEAGE)
    _store(tmp_path).put_decision(LINEAGE, DECISION)
    assert _store(tmp_path).decisions(LINEAGE) == [DECISION]


def test_index_that_becomes_visible_late_is_awaited(
    tmp_path: Path, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "LOOKUP_PAUSE_S", 0.0)
    store = _store(tmp_path)
    nodes = [_drain(store.write_node(LINEAGE, VERSION, node, 0, [slots[node].source])) for node in range(2)]
    hidden = [0]

    def before(_: int, name: str) -> None:
        if name == "open" and hidden[0] < 5:
            hidden[0] += 1
            code = errno.ENOENT if hidden[0] % 2 else errno.ESTALE
            raise OSError(code, os.strerror(code))

    store.put_decision(LINEAGE, DECISION)
    _store(tmp_path, FaultyStorage(tmp_path, before)).commit(_manifest(nodes), DECISION)
    assert hidden == [5]
    assert _is_complete(tmp_path)


def test_index_that_never_comes_is_an_error(tmp_path: Path, slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "LOOKUP_S", 0.0)
    store = _store(tmp_path)
    store.put_decision(LINEAGE, DECISION)
    node = _drain(store.write_node(LINEAGE, VERSION, 0, 0, [slots[0].source]))
    missing = stored.StoredNode(1, 0, "ab" * 16)
    with pytest.raises(FileNotFoundError):
        store.commit(_manifest([node, missing]), DECISION)
    assert not _is_complete(tmp_path)


def test_index_of_another_attempt_does_not_count(tmp_path: Path, slots: list[Slot]) -> None:
    store = _store(tmp_path)
    store.put_decision(LINEAGE, DECISION)
    first, second = (
        _drain(store.write_node(LINEAGE, VERSION, 0, attempt, [slots[attempt].source])) for attempt in range(2)
    )
    with pytest.raises(FormatError, match="not the one"):
        store.commit(_manifest([replace(first, attempt=second.attempt)]), DECISION)
    assert not _is_complete(tmp_path)


def test_slot_that_its_trainer_took_again_is_never_stored(tmp_path: Path, slots: list[Slot]) -> None:
    folder = StorageFolder(tmp_path)
    slots[0].map.data[CHUNK] ^= 1
    file = folder.create("changed")
    with ThreadPoolExecutor(1) as writer, pytest.raises(FormatError, match="chunk 1 of rank 0"):
        for _ in copy_slot(slots[0].source, VERSION, file, writer):
            pass
    file.abandon()
    with pytest.raises(FormatError, match="not step 41"):
        _drain(_store(tmp_path).write_node(LINEAGE, Version(EPOCH, 41), 0, 0, [slots[1].source]))
    slots[1].map.begin(Version(EPOCH, 44), bytes(16), b"table", 5 * CHUNK)
    with pytest.raises(FormatError, match="holds step 44"):
        _drain(_store(tmp_path).write_node(LINEAGE, VERSION, 0, 1, [slots[1].source]))


def _damage(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size - CHUNK)
    elif how == "zeros at the end":
        size = path.stat().st_size
        os.truncate(path, size // 2)
        os.truncate(path, size)
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[GEOMETRY.data_offset + 7] ^= 1
        path.write_bytes(data)
    elif how == "swapped":
        other = path.with_name("rank-1.slot" if path.name == "rank-0.slot" else "rank-0.slot")
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)


@pytest.mark.parametrize("how", ["truncated", "zeros at the end", "flipped", "swapped"])
def test_damaged_file_is_found(tmp_path: Path, slots: list[Slot], how: str) -> None:
    _persist(_store(tmp_path), slots)
    _damage(next(tmp_path.rglob("rank-0.slot")), how)
    store = _store(tmp_path)
    folder, file = store.indexes(store.checkpoints(LINEAGE)[0])[0]
    with pytest.raises(FormatError):
        descriptor = store.open(folder, file)
        for _ in verify_file(descriptor, file, RANGES):
            pass


def test_foreign_files_are_neither_read_nor_removed(tmp_path: Path, slots: list[Slot]) -> None:
    store = _store(tmp_path)
    _persist(store, slots)
    lineage = tmp_path / "run" / LINEAGE
    for name in ("notes.txt", "e1-zz-s40", "DECISION-1"):
        (lineage / name).write_bytes(b"x")
    (lineage / str(stored_names.CheckpointName.of(VERSION)) / "mine").write_bytes(b"x")
    for slot in slots:
        slot.seal(replace(VERSION, step=50))
    _persist(store, slots, replace(VERSION, step=50))
    assert store.prune(LINEAGE, DECISION, RetentionSettings(keep=1)) == ["e1-00010203-s40"]
    assert sorted(os.listdir(lineage / "e1-00010203-s40")) == ["mine"]
    assert (lineage / "notes.txt").exists()
    _check_complete(tmp_path, slots, replace(VERSION, step=50))


def test_checkpoint_whose_manifest_can_not_be_read_is_not_removed(tmp_path: Path, slots: list[Slot]) -> None:
    """A person may repair it, or storage gives other bytes the next time."""
    store, newer = _store(tmp_path), replace(VERSION, step=50)
    _persist(store, slots)
    for slot in slots:
        slot.seal(newer)
    _persist(store, slots, newer)
    checkpoint = tmp_path / "run" / LINEAGE / str(stored_names.CheckpointName.of(VERSION))
    manifest = checkpoint / stored_names.MANIFEST
    text = manifest.read_bytes()
    manifest.write_bytes(text.replace(b"40", b"41"))
    part = tmp_path / "run" / LINEAGE / str(stored_names.CheckpointName.of(replace(VERSION, step=30)))
    part.mkdir()
    for path in (checkpoint, part):
        os.utime(path, (1.0, 1.0))  # years ago
    assert store.prune(LINEAGE, DECISION, RetentionSettings(keep=1)) == [part.name]
    manifest.write_bytes(text)
    _check_complete(tmp_path, slots, newer)
    assert VERSION in store.lineage(LINEAGE).restorable()


def test_killed_while_it_removes_never_leaves_a_manifest_without_files(tmp_path: Path, slots: list[Slot]) -> None:
    newer = replace(VERSION, step=50)

    def prepare(path: Path) -> None:
        path.mkdir()
        for version in (VERSION, newer):
            for slot in slots:
                slot.seal(version)
            _persist(_store(path, FaultyStorage(path)), slots, version)

    prepare(tmp_path / "dry")
    counter = FaultyStorage(tmp_path / "dry")
    _store(counter.root, counter).prune(LINEAGE, DECISION, RetentionSettings(keep=1))
    for number in range(len(counter.calls)):
        path = tmp_path / str(number)
        prepare(path)
        faulty = FaultyStorage(path, storage.kill_at(number))
        with pytest.raises(Killed):
            _store(path, faulty).prune(LINEAGE, DECISION, RetentionSettings(keep=1))
        faulty.close_all()
        for listed in _store(path).checkpoints(LINEAGE):
            assert sorted(_store(path).indexes(listed)) == [0, 1, 2, 3]
        _check_complete(path, slots, newer)


def test_only_the_attempts_of_the_failed_run_are_discarded(tmp_path: Path, slots: list[Slot]) -> None:
    store, lineage = _store(tmp_path), StorageFolder(tmp_path / "run" / LINEAGE)
    _persist(store, slots)
    (checkpoint,) = (each.name for each in store.checkpoints(LINEAGE))
    kept = lineage.folder(checkpoint).names()
    for name in ("node-0.8", "node-1.10", "node-1.11"):
        lineage.folder(checkpoint).folder(name).make()
        lineage.folder(checkpoint).folder(name).write("rank-0.slot", b"bytes")
    discard_attempts(lineage, VERSION, range(8, 11))
    assert lineage.folder(checkpoint).names() == sorted([*kept, "node-1.11"])
    assert [each.name for each in store.checkpoints(LINEAGE)] == [checkpoint]
    discard_attempts(lineage, Version(EPOCH, VERSION.step + 1), range(8))  # there is no such checkpoint


def test_stale_coordinator_neither_commits_nor_removes(tmp_path: Path, slots: list[Slot]) -> None:
    store = _store(tmp_path)
    _persist(store, slots)
    later = Decision(Epoch(2, bytes(16)), VERSION, (EPOCH,))
    store.put_decision(LINEAGE, later)
    for slot in slots:
        slot.seal(replace(VERSION, step=50))
    with pytest.raises(StaleCoordinator, match="went on in epoch 2"):
        _persist(store, slots, replace(VERSION, step=50))
    with pytest.raises(StaleCoordinator):
        store.prune(LINEAGE, DECISION, RetentionSettings(keep=1))
    assert store.lineage(LINEAGE).restorable() == [VERSION]


def test_damaged_decision_is_an_error_and_not_a_missing_one(tmp_path: Path, slots: list[Slot]) -> None:
    store = _store(tmp_path)
    _persist(store, slots)
    path = tmp_path / "run" / LINEAGE / stored_names.decision_file(EPOCH)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="damaged"):
        store.lineage(LINEAGE)


def test_storage_that_can_not_be_listed_is_not_empty(tmp_path: Path) -> None:
    assert _store(tmp_path).lineages() == []
    with pytest.raises(FileNotFoundError):
        _store(tmp_path / "not mounted").lineages()
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        _store(tmp_path, FaultyStorage(tmp_path, storage.fail("list", errno.ESTALE))).lineages()


def test_storage_that_is_gone_is_not_made_anew(tmp_path: Path, slots: list[Slot]) -> None:
    root = tmp_path / "mount"
    root.mkdir()
    store = _store(root)
    _persist(store, slots)
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        store.put_decision(LINEAGE, DECISION)
    with pytest.raises(FileNotFoundError):
        _drain(store.write_node(LINEAGE, replace(VERSION, step=50), 0, 0, [slots[0].source]))
    assert not root.exists()


def test_checkpoint_of_another_job_or_name_is_not_read(tmp_path: Path, slots: list[Slot]) -> None:
    _persist(_store(tmp_path), slots)
    lineage = tmp_path / "run" / LINEAGE
    (lineage / "e1-00010203-s40").rename(lineage / "e1-00010203-s90")
    assert _store(tmp_path).checkpoints(LINEAGE) == []
    (tmp_path / "run").rename(tmp_path / "other")
    assert CheckpointStore(StorageFolder(tmp_path), "other").checkpoints(LINEAGE) == []


def test_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, slots: list[Slot]) -> None:
    _persist(_store(tmp_path), slots)
    path = next(tmp_path.rglob("rank-0.slot"))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    store = _store(tmp_path)
    folder, file = store.indexes(store.checkpoints(LINEAGE)[0])[0]
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        store.open(folder, file)


def test_ended_lineage_is_marked(tmp_path: Path, slots: list[Slot]) -> None:
    store = _store(tmp_path)
    _persist(store, slots)
    store.end(LINEAGE)
    store.end(LINEAGE)
    assert store.lineage(LINEAGE).has_ended


def test_older_memory_ends_no_lineage_with_which_another_attach_went_on(tmp_path: Path, slots: list[Slot]) -> None:
    store = _store(tmp_path)
    _persist(store, slots)
    later = Decision(Epoch(2, bytes(16)), VERSION, (EPOCH,))
    store.put_decision(LINEAGE, later)
    assert not store.end(LINEAGE, DECISION) and not store.lineage(LINEAGE).has_ended
    assert store.end(LINEAGE, later) and store.lineage(LINEAGE).has_ended


def test_a_lineage_with_a_damaged_decision_can_be_ended(tmp_path: Path, slots: list[Slot]) -> None:
    store = _store(tmp_path)
    _persist(store, slots)
    (tmp_path / "run" / LINEAGE / stored_names.decision_file(Epoch(2, bytes(16)))).write_bytes(b"damaged")
    assert store.end(LINEAGE, DECISION)


def test_lineage_without_anything_on_storage_is_ended_by_a_purge_if_storage_is_there(tmp_path: Path) -> None:
    """A job that crashed before its first whole step."""
    assert _store(tmp_path).end(LINEAGE) and _store(tmp_path).end(LINEAGE, DECISION)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):  # not mounted: the lineage may have checkpoints
        _store(tmp_path / "unmounted").end(LINEAGE)


def _marks(path: Path, decision: Decision) -> tuple[bool, bool]:
    """Returns whether the lineage has the decision, and whether it has the mark of a purge."""
    names = StorageFolder(path / "run" / LINEAGE).names()
    return stored_names.decision_file(decision.epoch) in names, stored_names.ENDED in names


@pytest.mark.parametrize("call", ["unlink", "link", "sync folder", "create"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_decision_that_storage_refused_at_first_is_of_no_ended_lineage(
    tmp_path: Path, slots: list[Slot], call: str, is_lost: bool
) -> None:
    _persist(_store(tmp_path), slots)
    _store(tmp_path).end(LINEAGE)
    later = Decision(Epoch(2, bytes(16)), VERSION, (EPOCH,))
    faulty = FaultyStorage(tmp_path, storage.fail(call, errno.EIO))
    if is_lost:
        faulty = FaultyStorage(tmp_path, after=storage.lose_reply(call))
    with contextlib.suppress(OSError):
        _store(tmp_path, faulty).put_decision(LINEAGE, later)
    is_decided, has_ended = _marks(tmp_path, later)
    assert not (is_decided and has_ended)
    _store(tmp_path).put_decision(LINEAGE, later)
    assert _marks(tmp_path, later) == (True, False)
    _store(tmp_path).end(LINEAGE)
    _store(tmp_path).put_decision(LINEAGE, later)  # again, by a coordinator that was started again
    assert _marks(tmp_path, later) == (True, True)


def test_machine_that_stops_leaves_no_ended_lineage_with_a_new_decision(tmp_path: Path, slots: list[Slot]) -> None:
    later, seen = Decision(Epoch(2, bytes(16)), VERSION, (EPOCH,)), []
    is_killed = True
    while is_killed:
        path = tmp_path / str(len(seen))
        path.mkdir()
        faulty = FaultyStorage(path)
        store = _store(path, faulty)
        _persist(store, slots)
        store.end(LINEAGE)
        faulty.before = storage.kill_at(len(faulty.calls) + len(seen))
        try:
            store.put_decision(LINEAGE, later)
            is_killed = False
        except Killed:
            pass
        faulty.stop_machine()
        seen.append(_marks(path, later))
    assert seen[-1] == (True, False) and set(seen) == {(False, True), (False, False), (True, False)}
