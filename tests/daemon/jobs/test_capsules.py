"""Tests capsules among real daemons: f other nodes keep them before a version is whole.

They survive deaths and silence, and are removed when no recovery needs them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import grpc
import pytest
import xxhash

from reft.core.commit.capsules import DIGESTS_MAX
from reft.core.commit.pins import Pins
from reft.core.commit.round import UNDECIDED_MAX, Outcome, StepAnswer
from reft.core.commit.slots import SlotState
from reft.wire import messages
from reft.wire.slot_format import CAPSULE_MAX
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import CAPSULE, CHUNK, Code, Job, epoch_of, layout_of, refused, tcp_call, write
from tests.support.manifests import described

SEALED, VOID = StepAnswer.SEALED, StepAnswer.VOID


def placed(ranks: int, tolerate: int = 1) -> dict[str, object]:
    """Returns manifest fields for ranks whose replicas must survive `tolerate` lost nodes."""
    leaves = layout_of(2 * CHUNK).leaves
    return {"protect": "auto", "tolerate": tolerate, "chunk_bytes": CHUNK, **described(*[leaves] * ranks)}


@pytest.fixture
def job(start, trainer) -> Job:
    """Two daemons with one rank each; each daemon keeps the other's capsules."""
    return held_job([start("--listen", "127.0.0.1:0") for _ in range(2)])


def held_job(daemons: list[DaemonProcess], tolerate: int = 1) -> Job:
    job = Job([(daemon, [rank]) for rank, daemon in enumerate(daemons)], **placed(len(daemons), tolerate))
    return job.decide()


def seal(job: Job, trainer, step: int, ranks: list[int] | None = None) -> None:
    """Each rank seals a step in its free or oldest slot, and reports it."""
    for rank in job.home if ranks is None else ranks:
        slots = job.slots(rank, trainer, slots=3)
        oldest = min(slots, key=lambda slot: slot.header.version.order if slot.header.version else (0, 0))
        write(oldest, job.version(step))
        job.report(rank, {step: SEALED})


def copies(job: Job, node: int) -> list[tuple[int, int]]:
    """Returns (rank, step) of the capsules that a node keeps for others."""
    reply = job.daemons[node].call("Inventory", pb.InventoryRequest(job="job"))
    return [(copy.rank, copy.version.step) for copy in reply.capsules]


def files(job: Job, node: int) -> list[str]:
    return sorted(path.name for path in (job.daemons[node].folder / "job").glob("capsule-*"))


def fetch(job: Job, node: int, rank: int, step: int, counter: int | None = None) -> pb.CapsuleRecord:
    version = messages.version_to(job.version(step, counter))
    return job.daemons[node].call("FetchCapsule", pb.CapsuleRequest(job="job", rank=rank, version=version))


def record(job: Job, step: int, rank: int = 0, size: int = 7, digests: int = 16) -> pb.CapsuleRecord:
    return pb.CapsuleRecord(
        rank=rank, version=messages.version_to(job.version(step)), capsule=bytes(size), digests=bytes(digests)
    )


def keep(job: Job, node: int, *records: pb.CapsuleRecord, token: bytes | None = None) -> None:
    request = pb.KeepRequest(job="job", epoch=job.epoch, capsules=records)
    token = job.manifest.token if token is None else token
    tcp_call(job.hellos[node].addresses[0], "Keep", request, token, pb_grpc.PeerStub)


def all_whole(job: Job, step: int) -> None:
    until(lambda: all(job.whole(i) == step for i in range(len(job.daemons))), what=f"whole({step}) everywhere")


# The round


@pytest.mark.parametrize("tolerate", [1, 2])
def test_a_whole_version_has_each_capsule_on_f_other_nodes(start, trainer, tolerate):
    job = held_job([start("--listen", "127.0.0.1:0") for _ in range(3)], tolerate)
    seal(job, trainer, 1)
    until(lambda: job.whole(0) == 1, what="whole(1)")
    found = [(node, rank) for node in range(3) for rank, step in copies(job, node) if step == 1]
    assert all(node != rank for node, rank in found)
    assert sorted(rank for _, rank in found) == sorted([0, 1, 2] * tolerate)
    for node, rank in [*found, (0, 0)]:  # from a holder, and from the rank's own slot
        got = fetch(job, node, rank, 1)
        assert (got.rank, got.version.step, got.capsule, got.unreplicated_bytes) == (rank, 1, CAPSULE, 2 * CHUNK)
        assert got.digests == fetch(job, rank, rank, 1).digests and len(got.digests) == 16
        assert got.capsule_digest == xxhash.xxh3_64_intdigest(CAPSULE)
    for node in range(3):
        status = job.daemons[node].call("Status", pb.StatusRequest())
        assert 0 < status.capsule_bytes_sent < 1024 * tolerate and 0 < status.round_bytes_sent < 4096


def test_no_capsule_is_sent_if_tolerate_is_0(start, trainer):
    job = held_job([start("--listen", "127.0.0.1:0") for _ in range(2)], tolerate=0)
    seal(job, trainer, 1)
    all_whole(job, 1)
    assert not files(job, 0) and not files(job, 1)
    assert job.daemons[1].call("Status", pb.StatusRequest()).capsule_bytes_sent == 0


def test_nodes_of_one_domain_do_not_keep_each_others_capsules(start, trainer):
    daemons = [start("--listen", "127.0.0.1:0", "--domain", domain) for domain in ("rack-1", "rack-1", "rack-2")]
    hellos = [daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)) for daemon in daemons]
    assert [hello.domain for hello in hellos] == ["rack-1", "rack-1", "rack-2"]
    job = Job([(daemon, [rank]) for rank, daemon in enumerate(daemons)], **placed(3))
    for node, hello in zip(job.manifest.nodes, hellos, strict=True):
        node.domain = hello.domain
    job.decide()
    seal(job, trainer, 1)
    all_whole(job, 1)
    assert copies(job, 2) == [(0, 1), (1, 1)]
    assert sorted(copies(job, 0) + copies(job, 1)) == [(2, 1)]


def test_a_silent_holder_delays_whole_and_nothing_else(job, trainer):
    """Only the capsule that the holder should keep is missing: its report has arrived."""
    seal(job, trainer, 1)
    all_whole(job, 1)
    sent = job.daemons[1].call("Status", pb.StatusRequest()).round_bytes_sent
    seal(job, trainer, 2, [1])
    until(lambda: job.daemons[1].call("Status", pb.StatusRequest()).round_bytes_sent > sent, what="its answer")
    job.daemons[1].kill(signal.SIGSTOP)
    began = time.monotonic()
    seal(job, trainer, 2, [0])
    assert job.report(0, {2: SEALED}, wait_ms=500).pins.whole == 1
    assert time.monotonic() - began < 5
    job.daemons[1].kill(signal.SIGCONT)
    all_whole(job, 2)
    assert copies(job, 0) == [(1, 2)] and copies(job, 1) == [(0, 2)]


def test_a_sealed_step_without_its_capsule_does_not_count(start, trainer):
    """The coordinator hears all reports, but must not announce the step as whole."""
    dropping = start("--listen", "127.0.0.1:0", environment={"REFT_FAILPOINTS": "capsules.send:drop"})
    job = held_job([start("--listen", "127.0.0.1:0"), dropping])
    seal(job, trainer, 1)
    until(lambda: "does not keep our capsules" in dropping.log.read_text(), what="the lost capsule")
    assert not job.report(0, {1: SEALED}, wait_ms=1000).pins.HasField("whole")
    assert copies(job, 0) == [] and copies(job, 1) == [(0, 1)]


def test_a_void_needs_no_capsule(job, trainer):
    for rank in (0, 1):
        job.lease(rank, trainer)
    job.daemons[1].kill(signal.SIGSTOP)
    assert messages.outcome_from(job.report(0, {1: VOID}, wait_ms=100)).voids(1)


def test_mismatched_replicas_make_a_step_void_although_capsules_come_late(job, trainer):
    for rank in (0, 1):
        slot = job.slots(rank, trainer)[0]
        write(slot, job.version(1))
        cells = [pb.CellDigest(cell=3, digest=rank)]
        said = pb.StepReport(until=1, sealed=[pb.SealedStep(step=1, cells=cells)])
        job.send_report(rank, pb.ReportRequest(job="job", epoch=job.epoch, rank=rank, steps=said))
    for rank in (0, 1):
        until(lambda rank=rank: list(job.report(rank, {1: SEALED}).mismatched) == [3], what="the difference")
        assert messages.outcome_from(job.report(rank, {1: SEALED})).voids(1)


# Deaths


def test_kept_capsules_survive_the_death_of_the_holder(job, trainer):
    seal(job, trainer, 1)
    all_whole(job, 1)
    before, held = fetch(job, 1, 0, 1), job.daemons[1].call("Status", pb.StatusRequest()).held_bytes
    (job.daemons[1].folder / "job" / "capsule-0.1-draft.new").write_bytes(b"torn")
    job.daemons[1].kill()
    job.daemons[1].start()
    assert copies(job, 1) == [(0, 1)] and fetch(job, 1, 0, 1) == before
    assert job.daemons[1].call("Status", pb.StatusRequest()).held_bytes == held
    assert len(files(job, 1)) == 1


def test_a_restarted_daemon_sends_the_capsules_of_sealed_slots_again(start, trainer):
    dropping = start("--listen", "127.0.0.1:0", environment={"REFT_FAILPOINTS": "capsules.send:drop"})
    job = held_job([start("--listen", "127.0.0.1:0"), dropping])
    seal(job, trainer, 1)
    until(lambda: "does not keep our capsules" in dropping.log.read_text(), what="the lost capsule")
    dropping.kill()
    dropping.environment = {}
    dropping.flags = ("--listen", job.hellos[1].addresses[0])
    dropping.start()
    all_whole(job, 1)  # no rank reports the step again
    assert copies(job, 0) == [(1, 1)]


def test_capsules_sealed_for_a_dead_trainer_are_sent_too(job, trainer):
    seal(job, trainer, 1, [0])
    write(job.slots(1, trainer)[0], job.version(1), SlotState.LANDED)
    trainer.kill()
    all_whole(job, 1)
    assert copies(job, 0) == [(1, 1)]


# What is let go of


def test_only_capsules_that_a_restore_may_need_are_kept(job, trainer):
    for step in (1, 2, 3):
        seal(job, trainer, step)
        all_whole(job, step)
    assert copies(job, 0) == [(1, 3)] and len(files(job, 0)) == 1
    held = job.daemons[0].call("Status", pb.StatusRequest()).held_bytes
    keep(job, 0, record(job, 2, rank=1))  # late: no recovery needs it
    keep(job, 0, record(job, 4, rank=1), record(job, 4, rank=1))
    keep(job, 0, record(job, 4, rank=1))
    assert copies(job, 0) == [(1, 3), (1, 4)]
    job.report(0, {4: VOID})
    until(lambda: copies(job, 0) == [(1, 3)], what="the end of a void version")
    assert job.daemons[0].call("Status", pb.StatusRequest()).held_bytes == held
    for step in range(10, 50):
        keep(job, 0, record(job, step, rank=1))
    assert copies(job, 0) == [(1, 3), *((1, step) for step in range(50 - UNDECIDED_MAX, 50))]
    keep(job, 0, record(job, 3, rank=1))
    assert len(files(job, 0)) == 1 + UNDECIDED_MAX


def test_a_holder_learns_outcomes_with_the_capsules(job):
    """The holder's link to the coordinator is broken, so it takes void steps for undecided.

    These steps must not displace a whole version.
    """
    keep(job, 1, record(job, 1))
    for step in range(2, UNDECIDED_MAX + 10):
        decided = messages.outcome_to("job", epoch_of(job.counter), Outcome(Pins(whole=1), step - 1))
        request = pb.KeepRequest(job="job", epoch=job.epoch, capsules=[record(job, step)], outcome=decided)
        tcp_call(job.hellos[1].addresses[0], "Keep", request, job.manifest.token, pb_grpc.PeerStub)
    assert copies(job, 1) == [(0, 1), (0, step)]


def test_capsules_are_sent_with_the_outcome(start, trainer):
    silent = start("--listen", "127.0.0.1:0", environment={"REFT_FAILPOINTS": "round.send:drop"})
    job = held_job([silent, start("--listen", "127.0.0.1:0")])
    seal(job, trainer, 1, [1])
    until(lambda: copies(job, 0) == [(1, 1)], what="the capsule of rank 1")
    seal(job, trainer, 1, [0])
    until(lambda: job.whole(0) == 1, what="whole(1)")
    seal(job, trainer, 2, [0])
    until(lambda: job.whole(1) == 1, what="the outcome, with the capsule of step 2")


def test_a_decision_drops_capsules_of_other_histories_than_its_base(job, trainer):
    seal(job, trainer, 1)
    all_whole(job, 1)
    keep(job, 0, record(job, 2, rank=1))
    first = job.version(1)
    job.close().decide(base=first)
    assert copies(job, 0) == [(1, 1), (1, 2)], "this attach may still be refused"
    seal(job, trainer, 2, [0])
    assert copies(job, 0) == [(1, 1)]
    until(lambda: copies(job, 1) == [(0, 1), (0, 2)], what="the new epoch's capsule")
    job.close().decide(base=first)
    job.lease(1, trainer)
    assert copies(job, 0) == [(1, 1)] and copies(job, 1) == [(0, 1)]
    seal(job, trainer, 2)
    all_whole(job, 2)
    until(lambda: (copies(job, 0), copies(job, 1)) == ([(1, 2)], [(0, 2)]), what="the base's end")
    job.close().decide()
    for rank in (0, 1):
        job.lease(rank, trainer)
    assert copies(job, 0) == copies(job, 1) == [] and not files(job, 0)


def test_capsules_are_kept_after_all_sessions_were_closed(job, trainer):
    """Later news must not remove a step from ranks that re-attach.

    Ranks that re-attach during a run ask which step is whole after they closed their sessions.
    """
    seal(job, trainer, 1)
    all_whole(job, 1)
    job.close([0])
    for step in (2, 3):
        decided = messages.outcome_to("job", epoch_of(job.counter), Outcome(Pins(whole=step), step - 1))
        request = pb.KeepRequest(job="job", epoch=job.epoch, capsules=[record(job, step, rank=1)], outcome=decided)
        tcp_call(job.hellos[0].addresses[0], "Keep", request, job.manifest.token, pb_grpc.PeerStub)
    assert job.whole(0) == 3 and copies(job, 0) == [(1, 1), (1, 2), (1, 3)]
    for step in range(10, 50):  # from ranks that continue training by mistake
        keep(job, 0, record(job, step, rank=1))
    assert copies(job, 0) == [(1, 1), *((1, step) for step in range(50 - UNDECIDED_MAX, 50))]
    base = job.version(1)
    job.close([1]).decide(base)
    job.lease(0, trainer)
    assert copies(job, 0) == [(1, 1)]
    seal(job, trainer, 2)
    all_whole(job, 2)
    until(lambda: copies(job, 0) == [(1, 2)], what="the removal of the base, since these trainers train")


def test_capsules_are_freed_with_the_job(job, trainer):
    seal(job, trainer, 1)
    all_whole(job, 1)
    status = job.daemons[0].call("Status", pb.StatusRequest())
    assert (
        status.held_bytes
        == status.jobs[0].ranks[0].bytes + (job.daemons[0].folder / "job" / files(job, 0)[0]).stat().st_size
    )
    trainer.kill()
    until(lambda: not job.daemons[0].status("job").ranks[0].alive, what="the news")
    assert job.daemons[0].call("Purge", pb.PurgeRequest(job="job")).freed_bytes == status.held_bytes
    assert job.daemons[0].call("Status", pb.StatusRequest()).held_bytes == 0
    assert not (job.daemons[0].folder / "job").exists()


# What is refused


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "renamed", "empty", "link"])
def test_a_damaged_file_is_refused_and_reported(job, trainer, damage):
    keep(job, 0, record(job, 1, rank=1), record(job, 2, rank=1))
    path = job.daemons[0].folder / "job" / files(job, 0)[0]
    data = bytearray(path.read_bytes())
    is_read = damage not in ("renamed", "link")  # the daemon still has the file that it wrote open
    if damage == "flipped":
        data[-20] ^= 1
    elif damage == "renamed":
        path = path.rename(path.with_name(path.name[:-1] + "9"))
    elif damage == "link":
        path.unlink()
        path.symlink_to(path.with_name("record.0"))
    if damage != "link":
        path.write_bytes({"cut": data[:-1], "foreign": b"x" * len(data), "empty": b""}.get(damage, data))
    with refused(Code.NOT_FOUND, "no capsule of rank 1") if is_read else contextlib.nullcontext():
        assert fetch(job, 0, 1, 1).capsule == bytes(7)
    job.daemons[0].kill()
    job.daemons[0].start()
    assert copies(job, 0) == [(1, 2)]
    assert "can't be used and is renamed to *.bad" in job.daemons[0].log.read_text()
    assert [name for name in files(job, 0) if name.endswith(".bad")] and fetch(job, 0, 1, 2).capsule == bytes(7)


def test_limits(job):
    with refused(Code.INVALID_ARGUMENT, f"has {CAPSULE_MAX + 1} bytes; the limit is {CAPSULE_MAX}"):
        keep(job, 0, record(job, 1, rank=1, size=CAPSULE_MAX + 1))
    with refused(Code.INVALID_ARGUMENT, f"has {DIGESTS_MAX + 8} bytes; the limit is {DIGESTS_MAX}"):
        keep(job, 0, record(job, 1, rank=1, digests=DIGESTS_MAX + 8))
    with refused(Code.INVALID_ARGUMENT, "rank 2"):
        keep(job, 0, record(job, 1, rank=2))
    with refused(Code.INVALID_ARGUMENT, "the highest step is"):
        keep(job, 0, record(job, messages.STEP_MAX + 1, rank=1))
    with refused(Code.INVALID_ARGUMENT, "larger chunk_bytes"):
        job.lease(0, data_bytes=CHUNK * (DIGESTS_MAX // 8 + 1))
    assert files(job, 0) == []
    keep(job, 0, record(job, 1, rank=1, size=CAPSULE_MAX, digests=DIGESTS_MAX))
    assert len(fetch(job, 0, 1, 1).digests) == DIGESTS_MAX


def test_a_capsule_that_changed_on_its_way_is_refused(job):
    sent = record(job, 1, rank=1)
    sent.capsule_digest = xxhash.xxh3_64_intdigest(sent.capsule)
    changed = pb.CapsuleRecord()
    changed.CopyFrom(sent)
    changed.capsule = bytes(6) + b"1"
    with refused(Code.DATA_LOSS, "the capsule of rank 1, step 1 has a wrong digest"):
        keep(job, 0, changed)
    assert files(job, 0) == []
    keep(job, 0, sent)
    assert fetch(job, 0, 1, 1) == sent


def test_a_capsule_that_does_not_fit_is_refused(start):
    job = held_job([start("--listen", "127.0.0.1:0", "--memory", "1MiB") for _ in range(2)])
    with refused(Code.RESOURCE_EXHAUSTED, "--memory"):
        keep(job, 0, record(job, 1, rank=1, size=CAPSULE_MAX))
    assert files(job, 0) == []


def test_capsules_of_strangers_and_of_older_epochs_are_refused(job):
    keep(job, 0, record(job, 1, rank=1))
    address = job.hellos[0].addresses[0]
    request = pb.CapsuleRequest(job="job", rank=1, version=messages.version_to(job.version(1)))
    for token in (None, b"x" * 32):
        with refused(Code.UNAUTHENTICATED):
            tcp_call(address, "FetchCapsule", request, token)
    with refused(Code.UNAUTHENTICATED):
        keep(job, 0, record(job, 2, rank=1), token=b"x" * 32)
    assert tcp_call(address, "FetchCapsule", request, job.manifest.token).rank == 1
    old, stale = record(job, 2, rank=1), pb.KeepRequest(job="job", epoch=job.epoch)
    job.decide(base=job.version(1))
    with refused(Code.ABORTED, "was started again"):
        tcp_call(address, "Keep", stale, job.manifest.token, pb_grpc.PeerStub)
    with refused(Code.ABORTED, "not of the history"):
        keep(job, 0, old)
    with refused(Code.NOT_FOUND):
        fetch(job, 0, 1, 77)
    assert copies(job, 0) == [(1, 1)]


def test_a_manifest_without_a_placement_is_refused(start):
    job = held_job([start()])
    job.manifest.packed_tables[0] = b"\xff\xff"
    with pytest.raises(grpc.RpcError) as error:
        job.decide()
    assert error.value.code() in (Code.DATA_LOSS, Code.INVALID_ARGUMENT)
    assert job.daemons[0].status("job").epoch.counter == 1


# What an inventory says


def test_the_manifest_of_the_base_is_kept(daemon):
    job = Job([(daemon, [0])]).decide()

    def base_script() -> str:
        return daemon.call("Inventory", pb.InventoryRequest(job="job")).base_manifest.script

    job.manifest.script = "second"
    job.decide(base=job.version(1))
    reply = daemon.call("Inventory", pb.InventoryRequest(job="job"))
    assert reply.HasField("base_manifest") and reply.base_manifest.script == "" and reply.manifest.script == "second"
    job.manifest.script = "third"
    job.decide(base=job.version(5, 2))
    assert base_script() == "second"
    job.decide(base=job.version(5, 2))  # no version became whole in between
    daemon.kill()
    daemon.start()
    assert base_script() == "second"
    job.counter += 1
    told = pb.Manifest(job="job", script="told")
    request = pb.DecideRequest(manifest=job.manifest, decision=job.decision(job.version(7, 1)), base_manifest=told)
    daemon.call("Decide", request)
    assert base_script() == "told"
    request.base_manifest.job = "other"
    with refused(Code.INVALID_ARGUMENT, "the base's manifest"):
        daemon.call("Decide", request)
    job.decide()
    assert not daemon.call("Inventory", pb.InventoryRequest(job="job")).HasField("base_manifest")


def test_a_replacement_node_takes_the_decision_of_an_unknown_job(start, job, trainer):
    seal(job, trainer, 1)
    all_whole(job, 1)
    job.daemons[1].kill()
    fresh = start("--listen", "127.0.0.1:0")
    again = held_again(job.close([0]), [job.daemons[0], fresh])
    reply = fresh.call("Inventory", pb.InventoryRequest(job="job"))
    assert reply.had_whole and reply.base_manifest.world == 2
    seal(again, trainer, 2)
    all_whole(again, 2)
    assert copies(again, 1) == [(0, 2)]


def held_again(job: Job, daemons: list[DaemonProcess]) -> Job:
    """Attaches the job again, with other nodes. The base is step 1 of the previous epoch."""
    again = Job([(daemon, [rank]) for rank, daemon in enumerate(daemons)], **placed(len(daemons)))
    again.counter = job.counter + 1
    for i, daemon in enumerate(daemons):
        request = pb.DecideRequest(
            manifest=again.manifest, decision=again.decision(job.version(1)), node_index=i, base_manifest=job.manifest
        )
        daemon.call("Decide", request)
    return again


def test_slots_of_a_moved_rank_are_readable_until_a_newer_step_is_whole(daemon, trainer):
    job = Job([(daemon, [0, 1])]).decide()
    names = job.lease(1, trainer)
    write(job.maps(1, names)[0], job.version(1))
    moved = Job([(daemon, [0])])
    moved.counter = job.close([1]).counter
    moved.decide(base=job.version(1))
    assert "refused" in ask_error(moved, 0, names[:1])
    moved.lease(0, slots=0)  # now the rank has a lease
    (slot,) = moved.maps(0, names[:1])
    assert slot.header.rank == 1 and slot.bad_chunks() == []
    assert "refused" in ask_error(moved, 1, ["rank-7.slot-0"])
    moved.report(0, {2: SEALED})
    assert moved.whole() == 2 and not moved.headers()
    assert daemon.call("Status", pb.StatusRequest()).held_bytes == 0


def ask_error(job: Job, rank: int, names: list[str]) -> str:
    try:
        for descriptor in job.descriptors(rank, names):
            os.close(descriptor)
    except Exception as error:
        return str(error)
    return ""


def test_invalid_domains_are_refused(start):
    with pytest.raises(RuntimeError, match="--domain"):
        start("--domain", "x" * 65)
    with pytest.raises(RuntimeError, match="printable characters"):
        start("--domain", "a\nb")
