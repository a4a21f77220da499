"""Tests slots through deaths of trainers and daemons: sealed, adopted, returned, renamed, freed."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import grpc
import numpy as np
import pytest

from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.errors import AttachError, NoRoom
from reft.wire import local_socket, messages
from reft.wire.inventory import JobSurvey
from reft.wire.slot_format import PAGE, READABLE, Geometry, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs.leases import caller_process
from tests.daemon.jobs.test_leases import decide_request, lease_request
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import CHUNK, Code, Job, data_of, refused, registry_of, slot_path, write
from tests.support.limits import cramped_daemon
from tests.support.trainer_forks import Trainer

EMPTY, WRITING, LANDED, SEALED = SlotState


def is_alive(job: Job, rank: int = 0) -> bool:
    return next(each for each in job.daemons[0].status(job.name).ranks if each.rank == rank).alive


# Trainers that die


def test_a_landed_slot_is_sealed_for_a_dead_trainer(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer, slots=3)
    first, second, third = job.maps(0, names)
    write(first, job.version(1))
    write(second, job.version(2), LANDED)
    write(third, job.version(3), WRITING)
    trainer.kill()
    until(lambda: not is_alive(job), what="the news of the trainer's death")
    until(lambda: job.headers()[names[1]] == (SEALED, 2), what="the seal")
    assert job.headers() == {names[0]: (SEALED, 1), names[1]: (SEALED, 2), names[2]: (WRITING, 3)}
    second.reread()
    assert second.bad_chunks() == []
    assert second.data[: 2 * CHUNK].tobytes() == data_of(2)
    until(lambda: job.whole() == 2, what="the sealed step in the round")


def test_a_job_keeps_its_training_time_and_number_of_failures(daemon, trainer):
    def history():
        return JobSurvey({"node": daemon.call("Inventory", pb.InventoryRequest(job=job.name))}).inventory.history

    job = Job([(daemon, [0])], trained_s=100.0, failures=2).decide()
    write(job.slots(0, trainer)[0], job.version(1))
    assert history() == (100.0, 2), "no step was sealed, and no trainer has failed"
    job.report(0, {1: StepAnswer.SEALED})
    trained_s, failures = history()
    assert 100.0 < trained_s < 160.0 and failures == 2
    trainer.kill()
    until(lambda: not is_alive(job), what="the news of the trainer's death")
    assert history() == (trained_s, 3)
    job.manifest.trained_s, job.manifest.failures = history()
    job.decide()
    assert history() == (trained_s, 3), "a new attach has no history of its own yet"
    job.lease(0)
    job.call(0, "Release", pb.ReleaseRequest(job=job.name, epoch=job.epoch, rank=0))
    assert history() == (trained_s, 3), "a closed session is no failure"


def test_a_sealed_step_that_was_never_reported_becomes_whole(daemon, trainer):
    other = Trainer()
    try:
        job = Job([(daemon, [0, 1])]).decide()
        for rank, process in enumerate((trainer, other)):
            write(job.slots(rank, process)[0], job.version(5))
        trainer.kill()
        until(lambda: not is_alive(job, 0), what="the news")
        assert job.whole() == -1
        job.report(1, {5: StepAnswer.SEALED})
        assert job.whole() == 5
    finally:
        other.kill()


def test_the_landed_slot_of_a_living_trainer_is_not_sealed(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    (name, _) = names = job.lease(0, trainer)
    write(job.maps(0, names)[0], job.version(1), LANDED)
    daemon.kill()
    daemon.start()
    assert job.headers()[name] == (LANDED, 1)


def test_a_rank_has_only_one_trainer(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    with refused(Code.ALREADY_EXISTS, f"process {trainer.pid}"):
        job.lease(0)
    with refused(Code.ALREADY_EXISTS, "close the earlier session"):
        daemon.call("Inventory", pb.InventoryRequest(job="job", end_orphans=True, pids=[trainer.pid], launch="launch"))
    with refused(Code.ALREADY_EXISTS, "which lives"):
        daemon.call("Inventory", pb.InventoryRequest(job="job", end_orphans=True, launch="another launch"))
    trainer.kill()
    until(lambda: not is_alive(job), what="the news")
    assert job.lease(0) == names


def test_an_orphan_of_the_same_launch_is_ended_at_the_next_attach(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    write(job.slots(0, trainer)[0], job.version(1), LANDED)
    reply = daemon.call("Inventory", pb.InventoryRequest(job="job", end_orphans=True, launch="launch"))
    assert trainer.process.wait(60) == -9
    assert [slot.state for slot in reply.slots if slot.version.step == 1] == [SEALED]


def test_a_closed_session_does_not_count_as_death(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer)
    daemon.call("Release", pb.ReleaseRequest(job="job", epoch=job.epoch))
    rank = daemon.status("job").ranks[0]
    assert (rank.alive, rank.closed) == (False, True)
    assert trainer.process.poll() is None


# Attach


def test_an_attach_empties_only_the_slots_that_its_plan_drops(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    first, second = job.maps(0, names)
    write(first, job.version(1))
    write(second, job.version(2))
    job.close().decide(base=job.version(1), dropped=[names[1], "rank-9.slot-0", "../../lock"])
    assert job.headers() == {names[0]: (SEALED, 1), names[1]: (SEALED, 2)}, "this attach may still be refused"
    assert daemon.status("job").base.step == 1
    job.lease(0, trainer)
    assert job.headers() == {names[0]: (SEALED, 1), names[1]: (EMPTY, 0)}
    write(second, job.version(2))
    daemon.kill()
    daemon.start()
    job.lease(0, trainer)
    assert job.headers()[names[1]] == (SEALED, 2), "slots are emptied once"
    job.counter -= 1
    with refused(Code.ABORTED):
        job.report(0, {2: StepAnswer.SEALED})


def test_larger_slots_replace_old_ones_once_a_newer_step_is_whole(daemon, trainer):
    """A larger layout gets new slots. The old version stays until a newer one is whole."""
    job = Job([(daemon, [0])]).decide()
    old = job.lease(0, trainer)
    write(job.maps(0, old)[0], job.version(1))
    job.report(0, {1: StepAnswer.SEALED})
    new = job.lease(0, trainer, data_bytes=8 * CHUNK)
    assert not set(new) & set(old)
    assert job.headers() == {old[0]: (SEALED, 1), **dict.fromkeys([old[1], *new], (EMPTY, 0))}
    assert len(job.descriptors(0, [old[0]])) == 1
    (chunk,) = read(daemon, old[0], job)
    assert len(chunk.data) == 4096
    before = daemon.status("job").ranks[0].bytes
    write(job.maps(0, new)[0], job.version(2))
    job.report(0, {2: StepAnswer.SEALED})
    assert set(job.headers()) == set(new)
    assert daemon.status("job").ranks[0].bytes < before and not slot_path(daemon, old[0]).exists()


def read(daemon: DaemonProcess, slot: str, job: Job, size: int = 4096) -> list[pb.Chunk]:
    with grpc.insecure_channel(daemon.address) as channel:
        from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

        version = messages.version_to(job.version(1))
        request = pb.ReadRequest(job="job", slot=slot, version=version, size=size)
        return list(pb_grpc.DaemonStub(channel).Read(request, timeout=10))


def test_a_slot_is_read_whole(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    write(job.maps(0, names)[0], job.version(1))
    data = b"".join(chunk.data for chunk in read(daemon, names[0], job, size=1 << 62))
    assert data == slot_path(daemon, names[0]).read_bytes()


# Daemons that die


def test_a_killed_daemon_adopts_slots_leases_and_epoch(daemon, trainer):
    job = Job([(daemon, [0])]).decide().decide()
    names = job.lease(0, trainer)
    slots = job.maps(0, names)
    write(slots[0], job.version(1))
    held = daemon.status("job").ranks[0].bytes
    daemon.kill()
    write(slots[1], job.version(2))  # the trainer continues
    daemon.start()
    status = daemon.status("job")
    assert (status.epoch, status.ranks[0].alive, status.ranks[0].pid) == (job.epoch, True, trainer.pid)
    assert status.ranks[0].bytes == held == daemon.call("Status", pb.StatusRequest()).held_bytes
    assert job.headers() == {names[0]: (SEALED, 1), names[1]: (SEALED, 2)}
    assert job.report(0, {}).pins.whole == 2 and not job.report(0, {}).slots_missing
    assert job.lease(0, trainer) == names
    trainer.kill()
    until(lambda: not is_alive(job), what="the news of a death after adoption")


def test_a_trainer_that_died_while_the_daemon_was_down_is_sealed(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    write(job.maps(0, names)[0], job.version(1), LANDED)
    daemon.kill()
    trainer.kill()
    daemon.start()
    until(lambda: job.headers()[names[0]] == (SEALED, 1), what="the seal")
    assert not is_alive(job) and job.whole() == 1


def test_one_death_while_the_daemon_was_down_leaves_other_trainers_known(daemon, trainer):
    other = Trainer()
    job = Job([(daemon, [0, 1])]).decide()
    job.lease(0, other)
    job.lease(1, trainer)
    daemon.kill()
    other.kill()
    daemon.start()
    assert [(rank.alive, rank.pid) for rank in daemon.status("job").ranks] == [(False, other.pid), (True, trainer.pid)]
    job.report(1, {1: StepAnswer.SEALED})


def test_a_dead_trainers_slot_is_sealed_without_mapping_it(daemon, trainer):
    """When memory is short, the kernel kills the process that has most memory mapped."""
    job = Job([(daemon, [0])]).decide()
    name = job.lease(0, trainer, data_bytes=64 << 20)[0]
    write(job.maps(0, [name])[0], job.version(1), LANDED, 64 << 20)
    trainer.kill()
    until(lambda: job.headers()[name] == (SEALED, 1), what="the seal")
    facts = Path(f"/proc/{daemon.process.pid}/status").read_text()
    assert int(facts.split("RssShmem:")[1].split()[0]) << 10 < 16 << 20


def test_the_same_arena_is_the_same_node(daemon):
    before = daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).node_id
    daemon.kill()
    daemon.start()
    assert daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).node_id == before


def damage_header(path: Path) -> None:
    with open(path, "r+b") as file:
        for at in (100, 4196):
            file.seek(at)
            file.write(b"damaged")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "header": damage_header,
    "cut": lambda path: os.truncate(path, 8192),
    "emptied": lambda path: os.truncate(path, 0),
    "of another rank": lambda path: shutil.copy(path.with_name("rank-1.slot-0"), path),
    "a link": lambda path: (path.unlink(), path.symlink_to(path.with_name("rank-0.slot-1"))),
    "a pipe": replace_by_pipe,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_slot_is_renamed_and_never_offered(daemon, trainer, damage):
    job = Job([(daemon, [0, 1])]).decide()
    for rank in (0, 1):
        for step, slot in enumerate(job.slots(rank, trainer), 1):
            write(slot, job.version(step))
    daemon.kill()
    path = slot_path(daemon, "rank-0.slot-0")
    DAMAGES[damage](path)
    daemon.start()
    assert set(job.headers()) == {"rank-0.slot-1", "rank-1.slot-0", "rank-1.slot-1"}
    assert "rank-0.slot-0 can't be used" in daemon.log.read_text()
    assert [each.name for each in path.parent.glob("*.bad")] == ["rank-0.slot-0.bad"]
    assert len(job.lease(0, trainer)) == 2  # the rank gets a new slot


@pytest.mark.parametrize("renamed", [False, True], ids=["in place", "as an earlier reft renamed it"])
def test_a_slot_of_a_newer_format_stays_counts_and_is_found_again(daemon, trainer, renamed):
    job = Job([(daemon, [0])]).decide()
    for step, slot in enumerate(job.slots(0, trainer), 1):
        write(slot, job.version(step))
    held = daemon.status("job").held_bytes
    daemon.kill()
    path = slot_path(daemon, "rank-0.slot-1")
    written = path.read_bytes()
    newer = bytearray(written)
    for at in (0, PAGE):
        newer[at + 8 : at + 10] = (READABLE[-1] + 1).to_bytes(2, "little")
    path.write_bytes(newer)
    if renamed:
        path.rename(path.with_name(f"{path.name}.format-{READABLE[-1] + 1}"))
    daemon.start()
    assert set(job.headers()) == {"rank-0.slot-0"} and path.read_bytes() == newer
    assert "format 4.0; this reft reads 2 and 3" in daemon.log.read_text()
    status = daemon.status("job")
    assert (status.other_format_slots, status.other_format_bytes, status.held_bytes) == (1, len(newer), held)
    trainer.kill()
    job.decide()
    assert set(job.lease(0)) == {"rank-0.slot-0", "rank-0.slot-2"}, "its name is not given to another slot"
    daemon.kill()
    path.write_bytes(written)  # as if a reft that reads 4 came
    daemon.start()
    assert set(job.headers()) == {f"rank-0.slot-{i}" for i in range(3)} and path.read_bytes() == written
    assert not daemon.status("job").other_format_slots


def test_a_job_with_slots_of_a_newer_format_goes_only_by_a_purge(tmp_path):
    """Neither its time to live nor the memory that another job needs drops it."""

    async def run() -> None:
        arena = Arena(tmp_path / "arena", 64 << 20)
        registry = registry_of(arena, ttl_s=-1.0)
        for name in ("newer", "plain", "job"):
            request = decide_request(1)
            request.manifest.job, request.manifest.token = name, bytes(32)
            await registry.decide(request)
        for name in ("newer", "plain"):
            ended = lease_request(1)
            ended.job, ended.slots = name, 0
            await registry.lease(ended, caller_process(os.getpid()))
            registry.release(pb.ReleaseRequest(job=name, epoch=ended.epoch), os.getpid())
        newer = arena.folder / "newer" / "rank-0.slot-0"
        newer.write_bytes(slot_of_newer_format())
        job = registry.jobs["newer"]
        slots, job.slots.unreadable = arena.adopt("newer")
        assert slots == [] and arena.held_bytes == job.held_bytes == newer.stat().st_size
        request = lease_request(1)
        request.data_bytes = 1 << 30
        with pytest.raises(NoRoom):
            await registry.lease(request, caller_process(os.getpid()))
        assert set(registry.jobs) == {"newer", "job"}, "the other one has made room"
        expiring = asyncio.ensure_future(registry.expire_for_ever(0))
        await asyncio.sleep(0)
        assert set(registry.jobs) == {"newer"} and newer.exists()
        registry.purge("newer")
        assert not newer.exists() and arena.held_bytes == 0
        expiring.cancel()

    asyncio.run(run())


def slot_of_newer_format() -> bytes:
    geometry = Geometry(0, 4096, 4096)
    data = np.zeros(geometry.file_bytes, np.uint8)
    SlotMap.create(data, geometry, "newer", 0)
    data[8] = data[PAGE + 8] = READABLE[-1] + 1
    return data.tobytes()


def test_an_unfinished_draft_is_no_slot(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    daemon.kill()
    drafts = [slot_path(daemon, f"{kind}-0.slot-9.new") for kind in ("rank", "parity", "record")]
    theirs = slot_path(daemon, "theirs-0.slot-9.new")
    for path in (*drafts, theirs):
        path.write_bytes(bytes(8192))
    daemon.start()
    assert set(job.headers()) == set(names)
    assert theirs.exists() and not any(path.exists() for path in drafts), "nobody counts the memory of a draft"


def test_a_slot_that_is_cut_does_not_kill_the_daemon(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    write(job.maps(0, names)[0], job.version(1))
    os.truncate(slot_path(daemon, names[0]), 0)
    assert set(job.headers()) == {names[1]}
    for method, request in (
        ("Status", pb.StatusRequest(job="job")), ("Inventory", pb.InventoryRequest(job="job", end_orphans=True, launch="launch")),
    ):  # fmt: skip
        try:
            daemon.call(method, request)
        except grpc.RpcError as error:
            assert error.code() is Code.DATA_LOSS
    assert daemon.answers()


# Memfds


def test_memfds_where_the_folder_has_no_room(cramped, trainer):
    job = Job([(cramped, [0])]).decide()
    reply = trainer.call(cramped.address, "Lease", job.lease_request(0))
    names = [slot.name for slot in reply.slots]
    assert reply.backing == "memfd" == cramped.status("job").backing
    descriptors = job.descriptors(0, names)
    with pytest.raises(OSError):
        os.ftruncate(descriptors[0], 0)  # a sealed memfd: no process can cut it under the daemon
    slots = job.maps(0, names)
    write(slots[0], job.version(1), LANDED)
    assert not list((cramped.folder / "job").glob("rank*"))
    cramped.kill()
    cramped.start()
    assert job.headers() == {}
    assert job.report(0, {}).slots_missing
    request = pb.SlotsRequest(job="job", epoch=job.epoch, rank=0, returned=names)
    assert local_socket.ask_slots(job.local_socket(), request, descriptors, 5) == []
    # repeated calls change nothing
    assert local_socket.ask_slots(job.local_socket(), request, descriptors, 5) == []
    assert not job.report(0, {}).slots_missing
    assert job.headers() == {names[0]: (LANDED, 1), names[1]: (EMPTY, 0)}
    assert cramped.call("Status", pb.StatusRequest()).held_bytes == sum(slot.file_bytes for slot in reply.slots)
    wrong = pb.SlotsRequest(job="job", epoch=job.epoch, rank=0, returned=["rank-0.slot-x/../y"])
    with pytest.raises(AttachError, match="not a memfd of fixed size"):
        local_socket.ask_slots(job.local_socket(), wrong, descriptors[:1], 5)
    trainer.kill()
    until(lambda: job.headers()[names[0]] == (SEALED, 1), what="the seal of a returned memfd")
    for descriptor in descriptors:
        os.close(descriptor)


def test_memfds_beside_slots_in_the_folder_come_back(trainer):
    """A tmpfs may be full at a later lease. A restarted daemon has the other slots alone."""
    with cramped_daemon("8m") as daemon:
        job = Job([(daemon, [0])]).decide()
        names = job.lease(0, trainer, slots=1, data_bytes=4 << 20)
        more = job.lease(0, trainer, slots=2, data_bytes=4 << 20)
        assert more[:1] == names and daemon.status("job").backing == "memfd"
        (memfd,) = job.descriptors(0, more[1:])
        daemon.kill()
        daemon.start()
        assert list(job.headers()) == names and not job.report(0, {}).slots_missing
        request = pb.SlotsRequest(job="job", epoch=job.epoch, rank=0, returned=more[1:])
        for _ in range(2):  # a repeated call changes nothing
            local_socket.ask_slots(job.local_socket(), request, [memfd], 5)
        assert list(job.headers()) == more
        os.close(memfd)


def test_a_memfd_that_larger_ones_replaced_is_not_leased_again_when_it_comes_back(cramped, trainer):
    """A trainer returns all its memfds, also to a daemon that was silent and not restarted."""
    job = Job([(cramped, [0])]).decide()
    names = job.lease(0, trainer, slots=1)
    (memfd,) = job.descriptors(0, names)
    (slot,) = job.maps(0, names)
    write(slot, job.version(1))
    larger = job.lease(0, trainer, slots=1, data_bytes=1 << 20)
    assert larger != names and set(job.headers()) == {*names, *larger}
    before = cramped.call("Status", pb.StatusRequest())
    request = pb.SlotsRequest(job="job", epoch=job.epoch, rank=0, returned=names)
    local_socket.ask_slots(job.local_socket(), request, [memfd], 5)
    after = cramped.call("Status", pb.StatusRequest())
    assert after.jobs[0].ranks[0].slots == before.jobs[0].ranks[0].slots == 1
    assert after.held_bytes == before.held_bytes
    os.close(memfd)


# The end


@pytest.mark.parametrize("is_closed, flags", [(False, ("1000", "2")), (True, ("0.5", "1000"))])
def test_failed_and_ended_jobs_have_different_times_to_live(start, trainer, is_closed, flags):
    """The person who can start the job again may be asleep."""
    process = start("--ttl", flags[0], "--ttl-failed", flags[1])
    job = Job([(process, [0])]).decide()
    write(job.slots(0, trainer)[0], job.version(1))
    if is_closed:
        job.call(0, "Release", pb.ReleaseRequest(job="job", epoch=job.epoch, rank=0))
    trainer.kill()
    until(lambda: not process.call("Status", pb.StatusRequest()).jobs, what="the end of the time to live")


def test_purge_frees_ended_jobs_and_refuses_living_ones(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    held = daemon.status("job").ranks[0].bytes
    with refused(Code.INVALID_ARGUMENT, "is being trained"):
        daemon.call("Purge", pb.PurgeRequest(job="job"))
    assert slot_path(daemon, names[0]).exists()
    trainer.kill()
    until(lambda: not is_alive(job), what="the news")
    assert daemon.call("Purge", pb.PurgeRequest(job="job")).freed_bytes == held
    assert not (daemon.folder / "job").exists()
    assert daemon.call("Status", pb.StatusRequest()).held_bytes == 0


def test_ended_jobs_without_a_name_are_dropped_for_memory(start, trainer):
    process = start("--memory", "5MiB")
    for name, named in (("unnamed", False), ("named", True)):
        job = Job([(process, [0])], name=name)
        job.manifest.named = named
        job.decide().lease(0, trainer, slots=1)
        process.call("Release", pb.ReleaseRequest(job=name, epoch=job.epoch))
    wanted = Job([(process, [0])], name="wanted").decide()
    assert wanted.lease(0, trainer, slots=3)
    assert held(process) == {"named", "wanted"}
    with refused(Code.RESOURCE_EXHAUSTED, "--memory"):
        Job([(process, [0])], name="more").decide().lease(0)
    assert held(process) == {"named", "wanted", "more"}


def held(daemon: DaemonProcess) -> set[str]:
    return {each.job for each in daemon.call("Status", pb.StatusRequest()).jobs}
