"""Tests the two copies of jobs' records: flipped, cut, swapped, older, missing, without room."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import xxhash
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.cli.main import main
from reft.errors import AttachError, FormatError, NoRoom
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import job_files
from reft_daemon.arena.arena import DRAFT, SLICED_DRAFT, Arena, write_pins
from reft_daemon.arena.job_files import (
    HEAD,
    MAJOR,
    PINS,
    PINS_APART,
    RECORDS,
    SEQUENCE_MAX,
    FileCopy,
    JobFiles,
    decode_copy,
    encode_copy,
    newest_copy,
)  # fmt: skip
from reft_daemon.jobs import leasing
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import caller_process
from tests.daemon.jobs.test_leases import decide_request, lease_request
from tests.daemon.jobs.test_pins import both_seal, coordinator
from tests.support.jobs import Code, Job, decide_now, epoch_of, refused, registry_of, write
from tests.support.trainer_forks import Trainer

COPY = encode_copy(FileCopy(7, b"the body of a record"))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        yield Path(path)


def again(folder: Path) -> JobFiles:
    """Returns the files as a restarted daemon finds them."""

    def write_files(job: str, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            (folder / job / name).unlink(missing_ok=True)
            (folder / job / name).write_bytes(data)

    return JobFiles(folder, write_files)


def record_of(counter: int, job: str = "job", pins: int = -1) -> pb.JobRecord:
    request = decide_request(counter)
    request.manifest.job = job
    record = pb.JobRecord(manifest=request.manifest, decision=request.decision, had_whole=True)
    if pins >= 0:
        record.pins.whole = pins
    return record


def written(folder: Path, *counters: int, pins: int = -1) -> JobFiles:
    """Writes records of these epochs, one after the other, and pins."""
    (folder / "job").mkdir(exist_ok=True)
    files = again(folder)
    for counter in counters:
        files.write(record_of(counter, pins=pins))
        if pins >= 0:
            files.write_pins(record_of(counter, pins=pins))
    return files


# One copy


@pytest.mark.parametrize("at", range(len(COPY)))
def test_each_flipped_bit_of_a_copy_is_noticed(at):
    for bit in range(8):
        changed = bytearray(COPY)
        changed[at] ^= 1 << bit
        with pytest.raises(FormatError):
            decode_copy(bytes(changed))


def test_a_cut_copy_is_no_copy_and_bytes_behind_it_do_not_matter():
    for size in range(len(COPY)):
        with pytest.raises(FormatError):
            decode_copy(COPY[:size])
    assert decode_copy(COPY + b"more") == decode_copy(COPY) == FileCopy(7, b"the body of a record")


def test_a_newer_format_is_named_and_a_greater_minor_number_is_read():
    def with_format(major: int, minor: int) -> bytes:
        head = HEAD.pack(b"REFTCOPY", major, minor, 1, 4)
        return head + xxhash.xxh3_64_intdigest(head + b"body").to_bytes(8, "little") + b"body"

    assert decode_copy(with_format(MAJOR, 9)).body == b"body"
    with pytest.raises(FormatError, match=rf"format {MAJOR + 1}\.3; this reft reads up to {MAJOR}"):
        decode_copy(with_format(MAJOR + 1, 3))


@pytest.mark.parametrize("sequence", [SEQUENCE_MAX + 1, (1 << 64) - 1])
def test_a_sequence_that_nobody_writes_does_not_win(sequence):
    forged = encode_copy(FileCopy(sequence, b"forged"))
    assert newest_copy([forged, COPY])[0].sequence == 7
    assert decode_copy(encode_copy(FileCopy(SEQUENCE_MAX, b"last"))).body == b"last"


@pytest.mark.parametrize("turn", [1, -1])
def test_the_newer_copy_counts_at_either_place(turn):
    older = encode_copy(FileCopy(6, b"older"))
    copy, wrong = newest_copy([COPY, older][::turn])
    assert (copy.sequence, wrong) == (7, ["one copy is older than the other."])
    assert newest_copy([COPY, COPY]) == (FileCopy(7, b"the body of a record"), [])


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from([0, 1]), st.integers(0, len(COPY) - 1), st.integers(0, 255), st.booleans()),
        max_size=6,
    )
)
def test_whatever_happens_to_the_copies_only_what_was_written_is_read(changes):
    copies = [bytearray(COPY), bytearray(COPY)]
    for which, at, value, cuts in changes:
        if cuts:
            del copies[which][at:]
        elif at < len(copies[which]):
            copies[which][at] = value
    with contextlib.suppress(FormatError):
        assert newest_copy(map(bytes, copies))[0] == FileCopy(7, b"the body of a record")
    if COPY in copies:
        newest_copy(map(bytes, copies))


# The record of a job


@pytest.mark.parametrize("which", RECORDS)
@pytest.mark.parametrize("damage", ["flipped", "cut", "removed", "a link"])
def test_either_copy_alone_serves_and_the_other_one_is_made_again(folder, which, damage, caplog):
    written(folder, 1, 2)
    path, data = folder / "job" / which, (folder / "job" / which).read_bytes()
    path.unlink()
    if damage == "a link":
        path.symlink_to(folder / "elsewhere")
    elif damage != "removed":
        path.write_bytes(data[:-1] if damage == "cut" else data[:50] + bytes([data[50] ^ 4]) + data[51:])
    files = again(folder)
    assert files.read() == [record_of(2)] and not files.damaged
    assert "its record is written again, in two copies" in caplog.text
    first, second = ((folder / "job" / name).read_bytes() for name in RECORDS)
    assert first == second and decode_copy(first).sequence > decode_copy(data).sequence
    caplog.clear()
    assert again(folder).read() == [record_of(2)] and not caplog.text


def test_copies_that_change_places_are_the_same(folder):
    written(folder, 1)
    first, second = (folder / "job" / name for name in RECORDS)
    third = first.rename(folder / "third")
    second.rename(first)
    third.rename(second)
    assert again(folder).read() == [record_of(1)]


@pytest.mark.parametrize("stale", RECORDS)
def test_a_daemon_that_dies_between_the_two_copies_leaves_the_newer_record(folder, stale):
    written(folder, 1)
    older = (folder / "job" / stale).read_bytes()
    written_again = again(folder)
    written_again.read()
    written_again.write(record_of(2))
    (folder / "job" / stale).write_bytes(older)
    assert again(folder).read() == [record_of(2)]
    assert again(folder).read() == [record_of(2)]


def test_without_a_valid_copy_the_job_is_damaged_and_named(folder, caplog):
    written(folder, 1)
    (folder / "other").mkdir()
    again(folder).write(record_of(3, "other"))
    for name in RECORDS:
        (folder / "job" / name).write_bytes(b"REFTCOPY, but no more")
    (folder / "job" / "rank-0.slot-0").write_bytes(bytes(8192))
    files = again(folder)
    assert files.read() == [record_of(3, "other")]
    damaged = files.damaged["job"]
    assert (damaged.slots, damaged.held_bytes >= 8192) == (1, True) and "copy 0: " in damaged.reason
    with pytest.raises(FormatError, match=r"job job on this node is damaged: [\s\S]* reft-cli purge job"):
        files.refuse_damaged("job")
    files.refuse_damaged("other")
    assert "job=job the record of job job" in caplog.text
    assert (folder / "job" / "rank-0.slot-0").exists()
    files.forget("job")
    assert not (folder / "job").exists() and not files.damaged


@pytest.mark.parametrize(
    ("change", "reason"),
    [("another job", "names job 'other'"), ("no such node", "no node 9"), ("no message", "can't be parsed")],
)
def test_a_record_that_contradicts_itself_is_damaged(folder, change, reason):
    written(folder, 1)
    record = record_of(1, "other" if change == "another job" else "job")
    record.node_index = 9 if change == "no such node" else 0
    body = b"\xff\xff" if change == "no message" else record.SerializeToString()
    for name in RECORDS:
        (folder / "job" / name).write_bytes(encode_copy(FileCopy(5, body)))
    files = again(folder)
    assert files.read() == [] and reason in files.damaged["job"].reason


def test_slots_without_a_record_are_shown_and_an_unfinished_folder_goes(folder):
    for name in ("half", "drafts", "empty", "no job's name"):
        (folder / name).mkdir()
    (folder / "half" / "rank-0.slot-0").write_bytes(bytes(4096))
    (folder / "drafts" / "record.0.new").write_bytes(COPY[:9])
    (folder / "linked").symlink_to(folder / "half")
    files = again(folder)
    assert files.read() == [] and list(files.damaged) == ["half"]
    assert sorted(path.name for path in folder.iterdir()) == ["half", "linked", "no job's name"]


def test_a_record_of_a_newer_reft_stays_and_is_shown(folder):
    written(folder, 1)
    newer = bytearray((folder / "job" / RECORDS[0]).read_bytes())
    newer[8] += 1
    for name in RECORDS:
        (folder / "job" / name).write_bytes(newer)
    files = again(folder)
    assert files.read() == [] and "has format 2.0; this reft reads up to 1" in files.damaged["job"].reason
    assert all((folder / "job" / name).read_bytes() == newer for name in RECORDS)


def test_fields_of_a_newer_reft_survive_a_rewrite(folder):
    (folder / "job").mkdir()
    unknown = b"\xfa\x7d\x03new"  # field 2015, of a newer reft
    body = record_of(1).SerializeToString() + unknown
    for name in RECORDS:
        (folder / "job" / name).write_bytes(encode_copy(FileCopy(3, body)))
    files = again(folder)
    (record,) = files.read()
    record.had_whole = False
    files.write(record)
    assert unknown in decode_copy((folder / "job" / RECORDS[0]).read_bytes()).body


def test_a_record_without_checksum_is_read_once_and_written_in_two_copies(folder):
    (folder / "job").mkdir()
    earlier = folder / "job" / "record"
    earlier.write_bytes(record_of(1, pins=3).SerializeToString())
    pins = pb.PinsRecord(epoch=record_of(1).decision.epoch, pins=pb.Pins(whole=4)).SerializeToString()
    (folder / "job" / PINS).write_bytes(xxhash.xxh3_64_digest(pins) + pins)
    assert again(folder).read() == [record_of(1, pins=4)]
    assert not earlier.exists() and again(folder).read() == [record_of(1, pins=4)]
    earlier.write_bytes(record_of(9).SerializeToString())
    for name in RECORDS:
        (folder / "job" / name).write_bytes(b"")
    files = again(folder)
    assert files.read() == [] and "job" in files.damaged, "it is older than the damaged copies"


# Pins


def test_either_copy_of_the_pins_alone_serves(folder):
    written(folder, 1, pins=5)
    path = folder / "job" / PINS
    data = path.read_bytes()
    size = len(data) - PINS_APART
    for begin in (0, PINS_APART):
        for at in range(begin, begin + size):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert again(folder).read() == [record_of(1, pins=5)], at
            assert len({decode_copy(path.read_bytes()[begin:]) for begin in (0, PINS_APART)}) == 1, "made again"
    for cut in (size, PINS_APART - 1, PINS_APART, len(data) - 1):
        path.write_bytes(data[:cut])
        assert again(folder).read() == [record_of(1, pins=5)], cut


@pytest.mark.parametrize("damage", ["both copies", "cut", "removed", "of an earlier epoch"])
def test_without_pins_the_job_is_damaged_and_no_older_pins_are_taken(folder, damage):
    written(folder, 1, pins=4)
    earlier = (folder / "job" / PINS).read_bytes()
    files = written(folder, 1, 2, pins=5)
    path = folder / "job" / PINS
    data = bytearray(path.read_bytes())
    if damage == "both copies":
        data[40] ^= 1
        data[PINS_APART + 40] ^= 1
    path.write_bytes({"cut": b"", "of an earlier epoch": earlier}.get(damage, bytes(data)))
    if damage == "removed":
        path.unlink()
    files = again(folder)
    assert files.read() == [] and "pins" in files.damaged["job"].reason


def test_a_record_that_no_restart_could_read_is_not_written(folder, monkeypatch):
    files = written(folder, 1)
    monkeypatch.setattr(job_files, "RECORD_MAX", 40)
    with pytest.raises(AttachError, match="bytes; the limit is 40"):
        files.write(record_of(2))
    monkeypatch.undo()
    assert again(folder).read() == [record_of(1)]


def test_pins_of_an_earlier_epoch_are_not_missed_by_a_new_record(folder):
    files = written(folder, 1, pins=5)
    files.write(record_of(2))
    assert again(folder).read() == [record_of(2)]


# No room


@pytest.fixture
def arena(folder) -> Arena:
    return Arena(folder, 64 << 20)


@contextlib.contextmanager
def without_room(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Lets one file find no room, also after the reserve was given back."""
    open_file = os.open

    def refuse(path: object, *arguments: object, **options: object) -> int:
        if Path(str(path)).name in (name + DRAFT, name + SLICED_DRAFT):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield


@pytest.mark.parametrize("name", RECORDS)
def test_a_decision_that_can_not_be_written_was_never_taken(arena, monkeypatch, name):
    job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
    decide_now(job, decide_request(1))
    record, before = job.record.SerializeToString(deterministic=True), vars(job).copy()
    files = {name: (arena.folder / "job" / name).read_bytes() for name in RECORDS}
    for _ in range(3):
        with without_room(monkeypatch, name), pytest.raises(NoRoom, match="make room in"):
            decide_now(job, decide_request(2))
        assert job.record.SerializeToString(deterministic=True) == record
        assert {key: vars(job)[key] for key in ("leases", "round", "since_s", "record")} == {
            key: before[key] for key in ("leases", "round", "since_s", "record")
        }
        assert {path.name: path.read_bytes() for path in (arena.folder / "job").iterdir()} == files
    decide_now(job, decide_request(2))
    assert job.epoch == epoch_of(2) and messages.epoch_from(again(arena.folder).read()[0].decision.epoch) == epoch_of(2)


def test_a_new_job_whose_decision_can_not_be_written_leaves_nothing(arena, monkeypatch):
    async def run() -> None:
        registry = registry_of(arena)
        request = decide_request(1)
        request.manifest.token = bytes(32)
        for _ in range(2):
            with without_room(monkeypatch, RECORDS[1]), pytest.raises(NoRoom):
                await registry.decide(request)
            assert not registry.jobs and not (arena.folder / "job").exists()
        await registry.decide(request)
        assert list(registry.jobs) == ["job"]

    asyncio.run(run())


def test_pins_that_can_not_be_written_stay_as_they_were(arena, monkeypatch):
    arena.job_files.write(record_of(1, pins=4))
    write_pins(arena, record_of(1, pins=4))
    with without_room(monkeypatch, PINS), pytest.raises(NoRoom):
        write_pins(arena, record_of(1, pins=5))
    assert again(arena.folder).read() == [record_of(1, pins=4)]


def test_a_second_copy_that_can_not_be_renamed_does_not_undo_the_first(arena, monkeypatch, caplog):
    arena.job_files.write(record_of(1))
    rename = Path.rename

    def fail_second(path: Path, target: Path) -> Path:
        if target.name == RECORDS[1]:
            raise OSError(2, "No such file or directory")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_second)
        arena.job_files.write(record_of(2))
    assert "can't be replaced" in caplog.text and again(arena.folder).read() == [record_of(2)]


def no_room(*_: object) -> None:
    raise NoRoom("no room.")


def test_a_lease_that_can_not_be_recorded_registers_nobody(arena, monkeypatch):
    async def run() -> None:
        job = JobRecord(arena, pb.JobRecord(manifest=decide_request(1).manifest), ChangeQueue())
        decide_now(job, decide_request(1))
        request = lease_request(1)
        request.slots = 0
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(arena.job_files, "write", no_room)
                with pytest.raises(AttachError, match="no room"):
                    await leasing.lease(job, request, caller_process(os.getpid()))
            assert not job.leases
        await leasing.lease(job, request, caller_process(os.getpid()))
        assert job.is_live and len(again(arena.folder).read()[0].leases) == 1

    asyncio.run(run())


def test_the_first_pins_of_an_epoch_are_named_in_the_record(arena):
    """From then on a missing file of pins is damage."""
    job = coordinator(arena)
    job.record.had_whole = True
    job.record.ClearField("before")  # as after reft-cli recover --step: nothing else writes the record
    both_seal(job, 1)
    assert again(arena.folder).read()[0].HasField("pins")
    (arena.folder / "job" / PINS).unlink()
    files = again(arena.folder)
    assert files.read() == [] and "its pins are missing" in files.damaged["job"].reason


# A daemon


def test_a_damaged_job_is_shown_refused_and_purged_while_other_jobs_go_on(daemon, trainer):
    job, other = Job([(daemon, [0])]).decide(), Job([(daemon, [0])], name="other").decide()
    for each, process in ((job, trainer), (other, None)):
        write(each.slots(0, process)[0], each.version(1))
    daemon.kill()
    before = sorted((daemon.folder / "job").glob("rank-*"))
    for name in RECORDS:
        path = daemon.folder / "job" / name
        path.write_bytes(path.read_bytes()[:-3])
    daemon.start()
    reply = daemon.call("Status", pb.StatusRequest())
    assert [each.job for each in reply.jobs] == ["other"]
    (damaged,) = reply.damaged
    assert (damaged.job, damaged.slots) == ("job", 2) and "copy 1: it has" in damaged.reason
    assert reply.held_bytes >= damaged.held_bytes > 2 << 20, "its memory counts"
    assert daemon.call("Status", pb.StatusRequest(job="job")).damaged == reply.damaged
    for method, request in (
        ("Inventory", pb.InventoryRequest(job="job")), ("Lease", job.lease_request(0)),
        ("Decide", pb.DecideRequest(manifest=job.manifest, decision=job.decision())),
    ):  # fmt: skip
        with refused(Code.DATA_LOSS, "is damaged"):
            daemon.call(method, request)
    assert sorted((daemon.folder / "job").glob("rank-*")) == before
    shown = CliRunner().invoke(main, ["status", "--check", "--daemon", daemon.address])
    assert shown.exit_code == 4 and "ERR  the record of this job on test is damaged: copy 0" in shown.output
    assert other.headers() and other.lease(0)
    purged = CliRunner().invoke(main, ["purge", "job", "--yes", "--json", "--daemon", daemon.address])
    assert purged.exit_code == 0 and json.loads(purged.output)["freed_bytes"] == damaged.held_bytes
    assert not (daemon.folder / "job").exists()
    after = daemon.call("Status", pb.StatusRequest())
    assert not after.damaged and after.held_bytes == reply.held_bytes - damaged.held_bytes
    trainer.kill()
    assert len(job.decide().lease(0, Trainer())) == 2
