"""Ranges of a checkpoint's files, from a folder and from an object store, and their server."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from reft.errors import FormatError
from reft.wire import range_pipe
from reft.wire.range_pipe import FileRequest
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.file_reader import CheckpointFileReader, serve
from reft_daemon.persist.storage_root import AnyFolder, open_root
from tests.daemon.persist.test_checkpoint_store import GEOMETRY, LINEAGE, Slot, _persist
from tests.daemon.persist.test_macs import KEY, NAME
from tests.support.objects import object_server

FILE, HEAD = GEOMETRY.file_bytes, GEOMETRY.data_offset


@pytest.fixture(scope="module", params=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Makes empty storages."""
    if request.param == "folder":
        yield lambda: str(tmp_path_factory.mktemp("storage"))
        return
    with object_server() as server:
        yield lambda: f"s3://{server.new_bucket()}"


@pytest.fixture
def root(place: Callable[[], str]) -> AnyFolder:
    return open_root(place())


@pytest.fixture
def slots(root: AnyFolder) -> Iterator[list[Slot]]:
    """Four slots, with a signed checkpoint of them in the storage."""
    made = [Slot(rank) for rank in range(4)]
    _persist(CheckpointStore(root, "run", KEY), made)
    yield made
    for slot in made:
        os.close(slot.source.descriptor)


def reader_of(root: AnyFolder) -> CheckpointFileReader:
    store = CheckpointStore(root, "run", KEY)
    return CheckpointFileReader(store.indexes(store.checkpoints(LINEAGE)[0]))


def node_of(root: AnyFolder) -> AnyFolder:
    return root.folder("run").folder(LINEAGE).folder(NAME).folder("node-0.0")


def replace(root: AnyFolder, rank: int, change: Callable[[bytearray], object]) -> None:
    """Changes the bytes of a rank's file or object as one without the key can."""
    folder, name = node_of(root), f"rank-{rank}.slot"
    data = bytearray(folder.read(name, 1 << 30))
    change(data)
    folder.remove(name)
    folder.write(name, bytes(data))


def flip(data: bytearray, at: int) -> None:
    data[at] ^= 1


def test_ranges_are_those_of_the_slots_with_zeros_for_parity(root: AnyFolder, slots: list[Slot]) -> None:
    reader, dice = reader_of(root), random.Random(0)
    ranges = [(0, 8192), (0, HEAD), (HEAD, FILE - HEAD), (HEAD + 2 * 4096, 2 * 4096), (HEAD + 3 * 4096, 8192)]
    for _ in range(20):
        begin = dice.randrange(HEAD, FILE)
        ranges.append((begin, dice.randrange(FILE - begin)))
    for offset, nbytes in ranges:
        rank = dice.randrange(4)
        expected = slots[rank].stored_bytes()[offset : offset + nbytes]
        assert reader.read(FileRequest(rank, offset, nbytes)).tobytes() == expected, (rank, offset, nbytes)


def test_head_that_its_index_does_not_name_is_refused(root: AnyFolder, slots: list[Slot]) -> None:
    """The other slot is sound in itself: only the index, which has a MAC, tells it apart."""
    other = Slot(0)
    other.map.data[:] = 7
    other.seal(other.map.header.version)
    other.map.put_capsule(b"another")
    forged = bytearray(os.pread(other.source.descriptor, HEAD, 0))
    os.close(other.source.descriptor)
    replace(root, 0, lambda data: data.__setitem__(slice(0, HEAD), forged))
    reader = reader_of(root)
    for offset in (0, HEAD):
        with pytest.raises(FormatError, match="head of rank 0's file does not fit"):
            reader.read(FileRequest(0, offset, 4096))
    assert reader.read(FileRequest(1, HEAD, 64)).tobytes() == slots[1].stored_bytes()[HEAD : HEAD + 64]


def test_head_changed_after_its_first_read_is_refused(root: AnyFolder, slots: list[Slot]) -> None:
    reader = reader_of(root)
    reader.read(FileRequest(0, 0, 8192))
    reader.read(FileRequest(1, 0, 8192))
    replace(root, 0, lambda data: flip(data, 9000))
    with pytest.raises(FormatError, match="does not fit"):
        reader.read(FileRequest(0, 0, 8192))


@pytest.mark.parametrize("change", [lambda data: data.append(0), lambda data: data.pop()])
def test_file_of_another_length_is_refused(
    root: AnyFolder, slots: list[Slot], change: Callable[[bytearray], object]
) -> None:
    replace(root, 0, change)
    with pytest.raises(FormatError, match="another length"):
        reader_of(root).read(FileRequest(0, HEAD, 64))


@pytest.mark.parametrize("wanted", [(9, 0, 1), (0, FILE, 1), (0, 0, FILE + 1), (0, HEAD - 1, 2)])
def test_bytes_that_no_file_has_are_refused(root: AnyFolder, slots: list[Slot], wanted: tuple[int, int, int]) -> None:
    with pytest.raises(FormatError):
        reader_of(root).read(FileRequest(*wanted))


def test_answers_come_in_order_and_an_error_ends_nothing(root: AnyFolder, slots: list[Slot]) -> None:
    node_of(root).remove("rank-1.slot")
    wanted = [FileRequest(0, HEAD, 100), FileRequest(1, 0, 8192), FileRequest(9, 0, 1), FileRequest(3, HEAD, 4096)]
    wanted += [FileRequest(2, HEAD + at, 1) for at in range(64)]
    read_end, write_end = os.pipe()
    with open(write_end, "wb") as answers:
        serve(reader_of(root), io.BytesIO(b"".join(each.encode() for each in wanted)), answers)
    results = []
    for _ in wanted:
        answer = range_pipe.receive_answer(read_end, 5.0)
        into = np.empty(answer.nbytes, np.uint8)
        range_pipe.receive_into(read_end, into.data, 5.0)
        results.append((answer.is_error, into.tobytes()))
    os.close(read_end)
    for number in (1, 2):
        assert results[number][0] and b'"is_damage": true' in results[number][1]
    for request, (is_error, data) in zip(wanted, results, strict=True):
        begin, end = request.offset, request.offset + request.nbytes
        assert is_error or data == slots[request.rank].stored_bytes()[begin:end]
