"""Tests the repair of damaged slots from other nodes: bit for bit, or the slot stays damaged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from click.testing import CliRunner

from reft.cli.main import main
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.core.recovery.inventory import Inventory
from reft.errors import AttachError, FormatError
from reft.wire.inventory import JobSurvey
from reft.wire.process import Process
from reft.wire.slot_format import PAGE, Bytes
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile
from reft_daemon.jobs import slot_reads, trainers
from reft_daemon.jobs.inventory import fill_inventory
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease
from reft_daemon.jobs.scrub import BYTES_PER_S, IDLE_S, take_turn
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.rebuild import rebuild, repair
from reft_daemon.rebuild.rebuild import Rebuild, pause_s
from reft_daemon.rebuild.repair import (
    AGAIN_S,
    RepairTry,
    damaged_slots,
    may_repair,
    next_repair,
    repair_next,
    request_for,
)
from reft_daemon.registry import Registry
from tests.daemon.rebuild.test_rebuild import Held, cluster, contents, mapped, recover
from tests.daemon.rebuild.test_rebuild_faults import with_registry
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import epoch_of, write

VERSION, NEWER = Version(epoch_of(1), 1), Version(epoch_of(1), 2)


class Channels(PeerChannels):
    """Channels to other nodes, with faults.

    Attributes:
        silent: names of nodes that do not answer.
        replaced: names of nodes in whose place another node answers.
        has_capsules: whether other nodes have the capsules that they keep.
        at_read: called before each read of a slot's data.
    """

    def __init__(self) -> None:
        super().__init__(None, ())
        self.silent: set[str] = set()
        self.replaced: set[str] = set()
        self.has_capsules = True
        self.at_read: Callable[[pb.Node], object] = lambda _: None

    async def call(self, node: pb.Node, token: bytes, service: type, method: str, *args: object, **kwargs: object):
        if node.name in self.silent:
            raise ConnectionError(f"{node.name} is away")
        reply = await super().call(node, token, service, method, *args, **kwargs)
        if method == "Inventory" and not self.has_capsules:
            del reply.capsules[:]
        if method == "Inventory" and node.name in self.replaced:
            reply.node_id = "another"
        return reply

    async def read(self, node: pb.Node, token: bytes, request: pb.ReadRequest, into: Bytes, deadline_s: float) -> None:
        if request.checked:
            self.at_read(node)
        await super().read(node, token, request, into, deadline_s)


def later(hours: float = 0.0) -> float:
    """Returns a moment at which the job is idle, some hours later."""
    return time.monotonic() + 2 * IDLE_S + 3600 * hours


def flip(slot: SlotFile, at: int) -> None:
    (byte,) = os.pread(slot.descriptor, 1, at)
    os.pwrite(slot.descriptor, bytes([byte ^ 1]), at)


def with_damage(
    request: pb.RebuildRequest, peers: PeerChannels, act: Callable[[Registry, JobRecord, SlotFile], Awaitable[None]],
    at: Callable[[SlotFile], int] = lambda slot: slot.map.header.geometry.data_offset,
) -> None:  # fmt: skip
    """Runs `act` with a registry that holds the slot of rank 3; the scrub has found it damaged."""

    async def run(registry: Registry) -> None:
        await Rebuild(registry, request).run()
        job = registry.jobs["job"]
        (slot,) = job.slots.all.values()
        flip(slot, at(slot))
        await scrub_all(registry)
        assert slot.damaged == VERSION and registry.scrubbed.damaged == 1
        await act(registry, job, slot)

    with_registry(peers, run)


async def scrub_all(registry: Registry) -> None:
    while await take_turn(registry.jobs, registry.scrubbed, later()):
        pass


def block_offset(held: Held, is_parity: bool) -> int:
    part = held.placement.rank_placement(3)
    return next(b.offset for b in part.blocks if (b.shard >= held.placement.lanes[b.lane].code.k) is is_parity)


PLACES: dict[str, Callable[[Held, SlotFile], int]] = {
    "data": lambda held, slot: slot.map.header.geometry.data_offset + block_offset(held, False) + 5,
    "parity": lambda held, slot: slot.map.header.geometry.data_offset + block_offset(held, True) + 5,
    "capsule": lambda _, slot: slot.map.header.geometry.capsule_offset + 3,
    "table": lambda _, slot: 2 * PAGE + 3,
    "digests": lambda _, slot: slot.map.header.geometry.digests_offset + 1,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_changed_bit_is_repaired_and_a_restore_takes_the_slot(three_of_four, request_of_rank_3, place):
    async def run(registry: Registry) -> None:
        await Rebuild(registry, request_of_rank_3).run()
        job = registry.jobs["job"]
        (slot,) = job.slots.all.values()
        saved, held_bytes = contents(slot.path), registry.arena.held_bytes
        flip(slot, PLACES[place](three_of_four, slot))
        await scrub_all(registry)
        assert slot.damaged == VERSION
        ended_s = job.ended_s
        await repair_next(registry, {}, later())
        (repaired,) = job.slots.all.values()
        assert repaired is not slot and not slot.path.exists() and registry.arena.held_bytes == held_bytes
        assert contents(repaired.path) == saved
        assert (registry.scrubbed.damaged, registry.scrubbed.repaired) == (1, 1)
        assert job.ended_s == ended_s, "the job expires as if nothing had been repaired"
        await scrub_all(registry)
        assert registry.scrubbed.damaged == 1 and not damaged_slots(registry.jobs.values(), later())
        await check_restore(three_of_four, registry, repaired)

    with_registry(Channels(), run)


async def check_restore(held: Held, registry: Registry, slot: SlotFile) -> None:
    """Checks that a plan takes the slot as it is, and that a restore can read the slot."""
    own = pb.InventoryReply(node="spare", node_id=registry.arena.node_id)
    fill_inventory(own, registry.jobs["job"])
    replies = [daemon.call("Inventory", pb.InventoryRequest(job="job")) for daemon in held.job.daemons[:3]]
    plan = JobSurvey({each.node_id: each for each in (own, *replies)}).plan(())
    assert plan.base == VERSION and plan.sources[3].slot == slot.name and not plan.capsules
    size = slot.map.header.data_bytes
    offset, version = slot.map.header.geometry.data_offset, own.slots[0].version
    request = pb.ReadRequest(job="job", slot=slot.name, version=version, offset=offset, size=size, checked=True)
    await slot_reads.read_here(registry.jobs["job"], request, np.empty(size, np.uint8))


def test_without_enough_nodes_the_slot_stays_damaged_until_they_answer(request_of_rank_3, caplog):
    peers = Channels()
    peers.silent = {"n1"}

    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        tries: dict[object, RepairTry] = {}
        now_s = later()
        for when_s in (now_s, now_s + AGAIN_S + 1):
            await repair_next(registry, tries, when_s)
            assert list(job.slots.all.values()) == [slot] and registry.scrubbed.repaired == 0
        said = [line for line in caplog.messages if "stays damaged" in line]
        assert len(said) == 1 and "can't be decoded" in said[0] and "No answer from n1" in said[0]
        peers.silent = set()
        await repair_next(registry, tries, now_s + AGAIN_S + 2)
        assert registry.scrubbed.repaired == 0, "the next try waits"
        await repair_next(registry, tries, now_s + 2 * AGAIN_S + 2)
        assert registry.scrubbed.repaired == 1

    with_damage(request_of_rank_3, peers, act)


def test_a_node_in_whose_place_another_answers_is_no_source(request_of_rank_3, caplog):
    peers = Channels()
    peers.replaced = {"n1"}

    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        await repair_next(registry, {}, later())
        assert list(job.slots.all.values()) == [slot] and "no sealed slot of ranks 1, 3" in caplog.text

    with_damage(request_of_rank_3, peers, act)


def test_a_source_that_is_damaged_too_is_not_used(request_of_rank_3, caplog):
    def fail(node: pb.Node) -> None:
        if node.name == "n0":
            raise FormatError("chunk 0 has a wrong digest.")

    peers = Channels()

    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        peers.at_read = fail
        await repair_next(registry, {}, later())
        assert list(job.slots.all.values()) == [slot] and registry.scrubbed.repaired == 0
        assert "no sealed slot of ranks 0, 3" in caplog.text

    with_damage(request_of_rank_3, peers, act)


@pytest.mark.parametrize("place", ["data", "capsule"])
def test_without_another_copy_the_damaged_slots_own_capsule_serves_if_it_is_right(
    three_of_four, request_of_rank_3, caplog, place
):
    peers = Channels()

    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        peers.has_capsules = False
        await repair_next(registry, {}, later())
        if place == "data":
            assert registry.scrubbed.repaired == 1
        else:
            assert registry.scrubbed.repaired == 0 and list(job.slots.all.values()) == [slot]
            assert "No capsule of rank 3 is left." in caplog.text

    with_damage(request_of_rank_3, peers, act, lambda slot: PLACES[place](three_of_four, slot))


def test_a_slot_that_is_written_meanwhile_is_not_touched(request_of_rank_3):
    peers = Channels()

    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        peers.at_read = lambda _: write(slot.map, NEWER)
        await repair_next(registry, {}, later())
        assert job.slots.all[slot.name] is slot and slot.path.exists()
        saved = contents(slot.path)
        assert slot.map.reread().version == NEWER and not slot.map.bad_chunks()
        await repair_next(registry, {}, later())
        assert contents(slot.path) == saved

    with_damage(request_of_rank_3, peers, act)


def lease_slot(job: JobRecord) -> None:
    job.leases[3] = Lease(Process(7, 70), 1, watch=object(), given_slots=set(job.slots.all))  # type: ignore[arg-type]


def attach_again(job: JobRecord) -> None:
    job.record.decision.epoch.counter += 1


@pytest.mark.parametrize("happens", [lease_slot, attach_again])
def test_a_trainer_or_an_attach_that_comes_meanwhile_ends_the_repair(request_of_rank_3, happens):
    peers = Channels()

    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        saved, held_bytes = slot.path.read_bytes(), registry.arena.held_bytes
        peers.at_read = lambda _: happens(job)
        await repair_next(registry, {}, later())
        assert list(job.slots.all.values()) == [slot] and registry.scrubbed.repaired == 0
        assert slot.path.read_bytes() == saved and registry.arena.held_bytes == held_bytes
        job.leases.clear()

    with_damage(request_of_rank_3, peers, act)


@pytest.mark.parametrize("happens", ["leased", "purged"])
def test_what_happens_after_the_seal_keeps_the_damaged_slot_too(request_of_rank_3, monkeypatch, happens):
    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        async def happen(*_: object) -> None:
            if happens == "leased":
                lease_slot(job)
            else:
                registry.purge("job")

        monkeypatch.setattr(trainers, "seal_landed", happen)
        await repair_next(registry, {}, later())
        assert registry.scrubbed.repaired == 1
        if happens == "leased":
            assert job.slots.all[slot.name] is slot and slot.path.exists()
        else:
            assert not registry.arena.held_bytes
        job.leases.clear()

    with_damage(request_of_rank_3, Channels(), act)


def replies_of(held: Held, epoch: int = 1) -> dict[str, pb.InventoryReply]:
    """Returns the inventories of the living nodes, as if they had decided `epoch`."""
    replies = [daemon.call("Inventory", pb.InventoryRequest(job="job")) for daemon in held.job.daemons[:3]]
    for reply in replies:
        reply.decision.epoch.counter = epoch
    return {reply.node_id: reply for reply in replies}


def test_a_slot_that_another_node_holds_too_is_not_made(three_of_four):
    replies = replies_of(three_of_four)
    survey = JobSurvey(replies)
    assert request_for(survey, VERSION.epoch, 3, VERSION, ()).lost[0].rank == 3
    copy = next(iter(replies.values())).slots.add()
    copy.CopyFrom(next(slot for reply in replies.values() for slot in reply.slots if slot.version.step == 1))
    copy.rank, copy.slot = 3, "rank-3.slot-7"
    with pytest.raises(AttachError, match=r"rank-3.slot-7 on node n0 holds the same"):
        request_for(JobSurvey(replies), VERSION.epoch, 3, VERSION, ())


def test_a_newer_attach_on_other_nodes_ends_the_repair(three_of_four):
    with pytest.raises(AttachError, match="a newer attach"):
        request_for(JobSurvey(replies_of(three_of_four, 2)), VERSION.epoch, 3, VERSION, ())
    with pytest.raises(AttachError, match="a newer attach"):
        request_for(JobSurvey({}), VERSION.epoch, 3, VERSION, ())


def test_a_version_of_a_history_that_does_not_count_is_not_made(three_of_four):
    other = Version(epoch_of(7), 1)
    with pytest.raises(AttachError, match="a history that does not count"):
        request_for(JobSurvey(replies_of(three_of_four)), VERSION.epoch, 3, other, ())


def test_a_job_with_two_histories_is_not_repaired(request_of_rank_3, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise AttachError("job job went on more than once.")

    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        monkeypatch.setattr(Inventory, "refuse_rivals", refuse)
        await repair_next(registry, {}, later())
        assert list(job.slots.all.values()) == [slot] and "stays damaged: job job went on more" in caplog.text

    with_damage(request_of_rank_3, Channels(), act)


def test_a_job_that_is_purged_meanwhile_stays_purged(request_of_rank_3):
    peers = Channels()

    async def act(registry: Registry, _: JobRecord, __: SlotFile) -> None:
        peers.at_read = lambda _: registry.purge("job") if registry.jobs else None
        await repair_next(registry, {}, later())
        assert not registry.jobs and not registry.arena.held_bytes and registry.scrubbed.repaired == 0

    with_damage(request_of_rank_3, peers, act)


def test_only_idle_jobs_without_trainers_are_repaired(request_of_rank_3):
    async def act(registry: Registry, job: JobRecord, slot: SlotFile) -> None:
        now_s = later()
        assert may_repair(job, now_s) and list(damaged_slots([job], now_s)) == [("job", slot.name)]
        for change in ("since_s", "ended_s"):
            before = getattr(job, change)
            setattr(job, change, now_s - 1)
            assert not may_repair(job, now_s), change
            setattr(job, change, before)
        job.sealed_s[3] = now_s - 1
        assert not may_repair(job, now_s)
        job.sealed_s.clear()
        job.record.before.CopyFrom(pb.JobRecord(node_index=3))
        assert not may_repair(job, now_s), "the attach may still be refused"
        job.record.ClearField("before")
        lease_slot(job)
        assert not may_repair(job, now_s) and not damaged_slots([job], now_s)
        job.leases.clear()
        assert may_repair(job, now_s)
        job.record.ClearField("decision")
        assert not may_repair(job, now_s)

    with_damage(request_of_rank_3, Channels(), act)


def test_a_slot_with_another_version_is_not_repaired(request_of_rank_3):
    async def act(_: Registry, job: JobRecord, slot: SlotFile) -> None:
        assert damaged_slots([job], later())
        for upto in SlotState.WRITING, SlotState.SEALED:
            write(slot.map, NEWER, upto)
            assert not damaged_slots([job], later())

    with_damage(request_of_rank_3, Channels(), act)


def test_a_repair_is_paced(request_of_rank_3, monkeypatch):
    paces: list[tuple[int, float]] = []
    monkeypatch.setattr(rebuild, "pause_s", lambda nbytes, _, rate: paces.append((nbytes, rate)) or 0.0)

    async def act(registry: Registry, _: JobRecord, __: SlotFile) -> None:
        assert not paces, "a person waits for a rebuild"
        await repair_next(registry, {}, later())
        assert len(paces) == 4, "once for each stripe"
        assert [rate for _, rate in paces] == [BYTES_PER_S] * 4
        nbytes = [each for each, _ in paces]
        assert nbytes == sorted(nbytes) and 0 < nbytes[0] <= nbytes[-1]

    with_damage(request_of_rank_3, Channels(), act)


class EagerDaemon(DaemonProcess):
    is_forked, module = False, "tests.support.eager_daemon"


def test_a_daemon_scrubs_and_repairs_by_itself_and_status_counts_it(start):
    daemons = [*cluster(start, 2), EagerDaemon("--node", "n2")]
    with contextlib.closing(daemons[2]):
        held = Held(daemons, 1).end()
        path = held.path(2)
        saved = contents(path)
        with open(path, "r+b") as file:
            file.seek(mapped(path).header.geometry.data_offset + 7)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        until(lambda: daemons[2].call("Status", pb.StatusRequest()).repaired_slots, what="a repair")
        assert held.path(2) != path and contents(held.path(2)) == saved
        assert json.loads(recover(daemons[0]).stdout)["outcome"] == "whole"
        status = CliRunner().invoke(main, ["status", "--daemon", daemons[2].address], catch_exceptions=False)
        assert "found 1 slot changed in memory and repaired 1" in " ".join(status.stdout.split())
        document = CliRunner().invoke(main, ["status", "--json", "--daemon", daemons[2].address]).stdout
        daemon = json.loads(document)["daemon"]
        assert (daemon["damaged_slots"], daemon["repaired_slots"]) == (1, 1)


def test_a_repair_begins_no_epoch(request_of_rank_3, monkeypatch):
    async def decide(*_: object) -> None:
        raise AssertionError("a decision starts the watch of nodes anew")

    async def act(registry: Registry, _: JobRecord, __: SlotFile) -> None:
        monkeypatch.setattr(registry, "decide", decide)
        await repair_next(registry, {}, later())
        assert registry.scrubbed.repaired == 1

    with_damage(request_of_rank_3, Channels(), act)


def test_the_rate_of_a_repair_is_bounded():
    assert pause_s(200, 1.0, 100.0) == pytest.approx(1.0)
    assert pause_s(200, 3.0, 100.0) == 0.0


def test_slots_never_tried_go_first_and_others_wait():
    a, b, c = (("job", name) for name in "abc")
    now_s = 10 * AGAIN_S
    versions = {a: VERSION, b: VERSION, c: VERSION}
    old, older, new = (RepairTry(VERSION, at_s, "") for at_s in (AGAIN_S, 0.0, now_s - AGAIN_S / 2))
    assert next_repair(versions, {a: old, b: older}, now_s) == c
    assert next_repair(versions, {a: old, b: older, c: new}, now_s) == b
    assert next_repair(versions, {a: old, b: RepairTry(NEWER, now_s, ""), c: new}, now_s) == b, "another version"
    assert next_repair(versions, dict.fromkeys(versions, new), now_s) is None
    assert next_repair({}, {}, now_s) is None


def test_the_loop_goes_on_after_a_bug(monkeypatch, caplog):
    calls: list[float] = []

    async def fail(*_: object) -> None:
        calls.append(0.0)
        if len(calls) == 3:
            raise asyncio.CancelledError
        raise KeyError("a bug")

    monkeypatch.setattr(repair, "repair_next", fail)
    monkeypatch.setattr(repair, "LOOK_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(repair.repair_for_ever(None))  # type: ignore[arg-type]
    assert len(calls) == 3 and caplog.text.count("a repair failed") == 2
