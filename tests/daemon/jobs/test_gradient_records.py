"""Tests record slots on a daemon: leased, kept over its restart, never offered as state, freed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from reft.core.commit.gradient_records import RECORD_SLOTS_MAX
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.wire import local_socket, messages, rpc
from reft.wire.slot_format import Geometry, Header, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.jobs import gradient_records
from reft_daemon.jobs.slots import JobSlots
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import CHUNK, Code, Job, epoch_of, refused

RECORDS = {"slots": 0, "records": 4, "record_bytes": 3 * CHUNK}


def seal(slot: SlotMap, job: Job, mark: int) -> None:
    slot.begin(job.version(mark), b"l" * 16, b"", 0)
    slot.landed()
    slot.sealed(slot.digests[:0])


def held_bytes(daemon: DaemonProcess) -> int:
    return daemon.call("Status", pb.StatusRequest()).held_bytes


def test_record_slots_are_leased_beside_the_slots_and_fit_again(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    slots, before = job.lease(0, trainer), held_bytes(daemon)
    reply = trainer.call(daemon.address, "Lease", job.lease_request(0, **RECORDS))
    names = [slot.name for slot in reply.slots]
    assert names == [f"record-0.slot-{i}" for i in range(4)] and not {*names} & {*slots}
    assert held_bytes(daemon) == before + sum(slot.file_bytes for slot in reply.slots)
    assert daemon.status("job").held_bytes == held_bytes(daemon)
    for record in job.maps(0, names):
        geometry = record.header.geometry
        assert (geometry.table_capacity, geometry.data_capacity, geometry.chunk_bytes) == (0, 3 * CHUNK, CHUNK)
    assert job.lease(0, trainer, **RECORDS) == names
    assert job.lease(0, trainer, **RECORDS | {"record_bytes": CHUNK}) == names, "larger ones serve"
    fewer = job.lease(0, trainer, **RECORDS | {"records": 2})
    assert fewer == names, "their records may have to be replayed"
    assert sorted(path.name for path in (daemon.folder / "job").glob("record-*")) == names


def test_record_slots_of_another_size_are_made_anew(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer, **RECORDS)
    larger = job.lease(0, trainer, **RECORDS | {"record_bytes": 9 * CHUNK})
    assert [record.header.geometry.data_capacity for record in job.maps(0, larger)] == [9 * CHUNK] * 4
    assert sorted(path.name for path in (daemon.folder / "job").glob("record-*")) == sorted(larger)


def test_records_are_no_state_of_their_rank_but_replays_read_them(daemon, trainer):
    """A record is sealed under (epoch, mark), as a snapshot is."""
    job = Job([(daemon, [0])]).decide()
    slots, names = job.lease(0, trainer), job.lease(0, trainer, **RECORDS)
    seal(job.maps(0, names)[0], job, 7)
    assert set(job.headers()) == set(slots)
    status = daemon.status("job")
    assert status.whole == -1 and not status.ranks[0].HasField("sealed")
    read = pb.ReadRequest(job="job", slot=names[0], version=messages.version_to(job.version(7)), size=CHUNK)
    with rpc.channel(daemon.address) as channel:
        chunks = list(pb_grpc.DaemonStub(channel).Read(read, timeout=10))
    assert sum(len(each.data) for each in chunks) == CHUNK
    records = daemon.call("Inventory", pb.InventoryRequest(job="job")).records
    assert {each.slot: each.version for each in records if each.HasField("version")} == {names[0]: read.version}
    trainer.kill()
    until(lambda: not daemon.status("job").ranks[0].alive, what="the news of the trainer's death")
    assert set(job.headers()) == set(slots) and daemon.status("job").whole == -1


def test_a_restarted_daemon_adopts_records_by_their_headers(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer, **RECORDS)
    first, second, *_ = job.maps(0, names)
    seal(first, job, 3)
    before = held_bytes(daemon)
    os.truncate(daemon.folder / "job" / names[3], CHUNK)
    daemon.kill()
    daemon.start()
    seal(second, job, 4)  # the trainer goes on meanwhile
    assert held_bytes(daemon) < before, "the damaged file is not adopted"
    assert (daemon.folder / "job" / f"{names[3]}.bad").exists()
    again = job.lease(0, trainer, **RECORDS)
    assert again[:3] == names[:3] and len(again) == 4
    states = [(each.header.state, each.header.version and each.header.version.step) for each in job.maps(0, again)]
    assert states == [(SlotState.SEALED, 3), (SlotState.SEALED, 4), (SlotState.EMPTY, None), (SlotState.EMPTY, None)]


def test_memfds_with_records_come_back_from_their_trainer(cramped, trainer):
    job = Job([(cramped, [0])]).decide()
    names = [*job.lease(0, trainer), *job.lease(0, trainer, **RECORDS)]
    descriptors, before = job.descriptors(0, names), held_bytes(cramped)
    cramped.kill()
    cramped.start()
    request = pb.SlotsRequest(job="job", epoch=job.epoch, rank=0, returned=names)
    for _ in range(2):  # a repeated call changes nothing
        assert local_socket.ask_slots(job.local_socket(), request, descriptors, 5) == []
    assert held_bytes(cramped) == before
    assert job.lease(0, trainer, **RECORDS) == names[2:]
    for descriptor in descriptors:
        os.close(descriptor)


def test_records_go_with_the_job_and_with_a_lane_that_copies_nothing(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer)
    job.lease(0, trainer, **RECORDS)
    job.lease(0, trainer)
    assert not list((daemon.folder / "job").glob("record-*")), "no rank of this job records gradients"
    job.lease(0, trainer, **RECORDS)
    job.close()
    daemon.call("Purge", pb.PurgeRequest(job="job"))
    assert held_bytes(daemon) == 0 and not (daemon.folder / "job").exists()


@pytest.mark.parametrize(
    "changes",
    [{"records": RECORD_SLOTS_MAX + 1}, {"slots": 2}, {"chunk_bytes": CHUNK + 1}, {"chunk_bytes": 0}],
)
def test_impossible_requests_are_refused(daemon, changes):
    job = Job([(daemon, [0])]).decide()
    with refused(Code.INVALID_ARGUMENT):
        job.lease(0, **RECORDS | changes)


def test_without_room_the_lease_says_what_the_room_is_for(start):
    daemon = start("--memory", "4MB")
    job = Job([(daemon, [0])]).decide()
    with refused(Code.RESOURCE_EXHAUSTED, "the slots for gradient records need"):
        job.lease(0, **RECORDS | {"record_bytes": 64 << 20})


def record(name: str, rank: int, mark: int, counter: int = 1, state: SlotState = SlotState.SEALED) -> SimpleNamespace:
    version = Version(epoch_of(counter), mark)
    header = Header(Geometry(0, CHUNK, CHUNK), "job", rank, state, version)
    return SimpleNamespace(
        name=name, rank=rank, damaged=None, check_size=lambda: None, map=SimpleNamespace(reread=lambda: header)
    )


def test_sealed_records_are_those_of_the_rank_and_epoch():
    slots = [
        record("a", 0, 4), record("b", 0, 5), record("c", 0, 6, state=SlotState.WRITING), record("d", 1, 6),
        record("e", 0, 7, counter=2), record("f", 0, 8, state=SlotState.LANDED),
    ]  # fmt: skip
    job = SimpleNamespace(id="job", epoch=epoch_of(1), slots=JobSlots(records={slot.name: slot for slot in slots}))
    found = gradient_records.sealed_records(job, 0)
    assert {mark: slot.name for mark, slot in found.items()} == {4: "a", 5: "b"}


def test_ranks_of_copy_lanes_on_this_node_record():
    lanes = [SimpleNamespace(is_copies=True, members=(0, 2)), SimpleNamespace(is_copies=False, members=(1, 3))]
    job = SimpleNamespace(guard_lanes=lanes, ranks=[0, 1])
    assert gradient_records.recording_ranks(job) == {0}
