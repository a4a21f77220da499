"""Turns of copy lanes with a real replayer and real movers: recomputed, or made by the exchange."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reft.core.commit.decision import Decision
from reft.core.commit.replay_trials import FAILURES_MAX, JUDGED_TURNS
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.wire import messages
from reft.wire.manifest import layouts_of, placement_of
from reft.wire.record_format import NO_RECORD
from reft.wire.slot_format import PAGE
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import gradient_records, leasing, parity, rounds, slot_reads
from reft_daemon.jobs.capsule_replication import node_placement
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.inventory import fill_inventory
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.mover.mover import Mover, MoverSettings
from reft_daemon.peers import replay_service
from reft_daemon.peers.replay_order import CannotReplay, replay_inputs
from reft_daemon.peers.turns import TurnService
from reft_daemon.server.local_socket import _report_reply
from tests.support.exchange import CHUNK, SLOTS, leaf
from tests.support.jobs import decide_now, epoch_of
from tests.support.manifests import described
from tests.support.parity import mapped, memory_slot
from tests.support.replays import SHAPES, TrainingOwner, owner_capsule, write_owner_step, write_record

COUNT = 3
RECORDS = 4


class ReplayNodes:
    """Three nodes in this process, each with a rank that trains, and its copy of the next rank.

    Attributes:
        guarded: (node, step), as noted in the round.
    """

    def __init__(self, folder: Path, settings: tuple[str, dict[str, Any]]) -> None:
        shapes = [{f"{rank}.{name}": shape for name, shape in SHAPES.items()} for rank in range(COUNT)]
        self.owners = [TrainingOwner(rank, *settings, own) for rank, own in enumerate(shapes)]
        shared = leaf("shared", 3 * CHUNK + 100)
        self.manifest = pb.Manifest(
            job="job", named=True, token=bytes(32), world=COUNT, every=1, protect="aor", tolerate=1,
            chunk_bytes=CHUNK, slots=SLOTS,
            nodes=[pb.Node(name=f"n{i}", id=f"id{i}", ranks=[i], addresses=[f"unix:/{i}"]) for i in range(COUNT)],
            **described(*([shared, *owner.leaves.values()] for owner in self.owners)),
        )  # fmt: skip
        self.placement = placement_of(self.manifest)
        (self.lane,) = self.placement.guard_lanes
        assert self.lane.is_copies and [self.lane.copied_members(i) for i in range(COUNT)] == [[1], [2], [0]]
        layouts, index = layouts_of(self.manifest)
        self.names = [layouts.name_table(i) for i in index]
        self.jobs = [
            JobRecord(Arena(folder / str(i), 0), pb.JobRecord(manifest=self.manifest), ChangeQueue())
            for i in range(COUNT)
        ]
        self.movers = [Mover(MoverSettings()) for _ in range(COUNT)]
        self.services = [TurnService(self, mover) for mover in self.movers]  # type: ignore[arg-type]
        for service in self.services[1:]:  # one process with torch is enough
            service._replays._replayer = self.services[0]._replays._replayer
        self.guarded: list[tuple[int, int]] = []
        self.previous = [NO_RECORD] * COUNT
        self.mark = 0

    async def call(self, node: pb.Node, *_: object) -> pb.OpenBulkReply:
        index = int(node.name[1:])
        return await self.services[index].open_bulk(self.jobs[index])

    async def attach(self, counter: int = 1, base: Version | None = None) -> None:
        decision = messages.decision_to(Decision(epoch_of(counter), base, (epoch_of(1),), base))
        fields = {"job": "job", "chunk_bytes": CHUNK}
        for rank, job in enumerate(self.jobs):
            request = pb.DecideRequest(manifest=self.manifest, decision=decision, node_index=rank)
            decide_now(job, request, node_placement(self.manifest, rank))
            data_bytes = self.placement.rank_placement(rank).data_bytes
            slots = pb.LeaseRequest(rank=rank, slots=SLOTS, data_bytes=data_bytes, table_bytes=PAGE, **fields)
            records = pb.LeaseRequest(rank=rank, records=RECORDS, record_bytes=8 * CHUNK, **fields)
            await leasing.slots_for(job, slots)
            await gradient_records.slots_for(job, records)
            self.services[rank].release(job.id)
        self.previous = [NO_RECORD] * COUNT

    def train(self, recorded: bool = True) -> None:
        """One mark: each rank updates its state, and records the gradients of the next rank."""
        self.mark += 1
        for owner in self.owners:
            owner.update()
        if recorded:
            self.record()

    def record(self) -> None:
        """Seals the records of the last mark."""
        for rank, job in enumerate(self.jobs):
            slot = job.slots.records[f"record-{rank}.slot-{self.mark % RECORDS}"]
            copied = [self.owners[(rank + 1) % COUNT]]
            version = Version(job.epoch, self.mark)
            self.previous[rank] = write_record(slot.map, version, copied, self.previous[rank])

    def snapshot(self, absent: str = "") -> None:
        """Writes the step of the last mark; the capsules go to the nodes before."""
        for rank, job in enumerate(self.jobs):
            version = Version(job.epoch, self.mark)
            slot = job.slots.current[f"rank-{rank}.slot-{self.mark % SLOTS}"]
            place = self.placement.rank_placement(rank)
            data = bytes(place.unreplicated_offset) + self.section(rank)
            missing = [f"optimizer.0.{absent}.{rank}.matrix"] if absent else []
            record = owner_capsule(self.owners[rank], version, data, self.names[rank], missing)
            write_owner_step(slot.map, version, data, record.capsule)
            holder = self.jobs[rank - 1]
            decision = messages.decision_from(holder.record.decision)
            holder.capsule_replication.store.keep(record, decision, holder.round.outcome, COUNT)

    def section(self, rank: int) -> bytes:
        return self.owners[rank].section(self.placement.rank_placement(rank).unreplicated)

    def pin(self, node: int, **changes: int) -> None:
        outcome = self.jobs[node].round.outcome
        pins = replace(outcome.pins, seq=outcome.pins.seq + 1, **changes)
        self.jobs[node].round.outcome = replace(outcome, pins=pins)
        self.services[node].wake(self.jobs[node])

    async def turn(self) -> list[pb.ReplayStatus]:
        """Makes the copies of the last mark; returns how each node made them."""
        for node in range(COUNT):
            self.pin(node, whole=self.mark, turn=self.mark, attempt=self.mark)
        while tasks := set().union(*(service._tasks for service in self.services)):
            await asyncio.wait(tasks)
        assert {(node, self.mark) for node in range(COUNT)} <= set(self.guarded)
        for node, job in enumerate(self.jobs):
            slot = parity.sealed_parity(job, parity.local_lanes(job)[0], Version(job.epoch, self.mark))
            wanted = self.section((node + 1) % COUNT)
            assert mapped(slot).data[: len(wanted)].tobytes() == wanted and not slot.map.bad_chunks()
            self.pin(node, turn=-1, protected=self.mark, protected_by=self.mark)
        statuses = [service.status(job) for service, job in zip(self.services, self.jobs, strict=True)]
        return [status.replays[0] for status in statuses]

    async def step(self, marks: int = 1) -> list[pb.ReplayStatus]:
        for _ in range(marks):
            self.train()
        self.snapshot()
        return await self.turn()

    @property
    def moved_bytes(self) -> int:
        return sum(mover.child.moved_bytes for mover in self.movers)


@pytest.fixture
def play(monkeypatch) -> Callable[..., None]:
    """Runs a test with nodes."""

    def run(act: Callable[[ReplayNodes], Awaitable[None]], kind: str = "AdamW", **settings: Any) -> None:
        async def with_nodes(folder: Path) -> None:
            nodes = ReplayNodes(folder, (kind, {"lr": 1e-2, **settings}))
            index = {id(job): i for i, job in enumerate(nodes.jobs)}
            monkeypatch.setattr(rounds, "note_guarded", lambda job, turn: nodes.guarded.append((index[id(job)], turn)))
            monkeypatch.setattr(slot_reads, "living_ranks", lambda job: job.ranks)
            try:
                await asyncio.wait_for(act(nodes), 250)
            finally:
                for service in nodes.services:
                    await service.close()

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as folder:
                asyncio.run(with_nodes(Path(folder)))
        finally:
            torch.set_num_threads(before)

    return run


def reasons(lanes: list[pb.ReplayStatus]) -> list[str]:
    return [lane.reason for lane in lanes]


def test_the_first_turn_is_the_movers_and_the_next_ones_move_nothing(play):
    async def act(nodes: ReplayNodes) -> None:
        await nodes.attach()
        assert set(reasons(await nodes.step())) == {"no step is protected yet."}
        anchor = nodes.moved_bytes
        assert anchor == sum(nodes.lane.sizes)
        for marks in (1, 3, 2):
            lanes = await nodes.step(marks)
            assert reasons(lanes) == [""] * COUNT
            assert {(lane.verified, lane.lag, lane.marks) for lane in lanes} == {(nodes.mark, 0, marks)}
            assert all(lane.cpu_s > 0 for lane in lanes)
        assert nodes.moved_bytes == anchor

        replayer = nodes.services[0]._replays._replayer
        assert replayer.pid
        nodes.services[0].drop("job")
        while tasks := nodes.services[0]._tasks:
            await asyncio.wait(tasks)
        assert not replayer.pid, "nothing else needs the process"

    play(act, "Adam", weight_decay=0.1)


def test_what_can_not_be_recomputed_is_made_by_the_mover_in_the_same_turn(play):
    async def act(nodes: ReplayNodes) -> None:
        await nodes.attach()
        await nodes.step()
        nodes.train()
        nodes.train(recorded=False)
        nodes.previous = [NO_RECORD] * COUNT
        nodes.snapshot()
        assert set(reasons(await nodes.turn())) == {"the record of mark 3 is missing."}
        assert reasons(await nodes.step(2)) == [""] * COUNT

        nodes.train()
        nodes.snapshot(absent="exp_avg")
        assert "did not exist at both ends" in (await nodes.turn())[0].reason
        assert "did not exist at both ends" in (await nodes.step())[0].reason
        assert reasons(await nodes.step()) == [""] * COUNT

        store = nodes.jobs[0].capsule_replication.store
        store._drop(1, Version(nodes.jobs[0].epoch, nodes.mark))
        lost = f"the capsule of rank 1, step {nodes.mark} (epoch 1) is not here."
        assert reasons(await nodes.step()) == [lost, "", ""]

        nodes.train()
        mapped(nodes.jobs[0].slots.records[f"record-0.slot-{nodes.mark % RECORDS}"]).data[4002] ^= 1
        nodes.snapshot()
        lanes = await nodes.turn()
        assert "the record of mark" in lanes[0].reason and "has changed in memory" in lanes[0].reason
        assert reasons(lanes)[1:] == ["", ""] and [lane.log for lane in lanes] == [nodes.mark] * COUNT

        nodes.train()
        nodes.train(recorded=False)
        nodes.train()
        assert [nodes.services[0].status(nodes.jobs[0]).replays[0].log] == [nodes.mark - 2], "up to the gap"

    play(act)


def test_an_error_that_nobody_foresaw_costs_bytes_and_no_parity(play, monkeypatch, caplog):
    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    async def act(nodes: ReplayNodes) -> None:
        await nodes.attach()
        await nodes.step()
        with monkeypatch.context() as patch:
            patch.setattr(replay_service, "replay_order", fail)
            for _ in range(2):
                assert set(reasons(await nodes.step())) == {repr(RuntimeError("can't start new thread"))}
        assert caplog.text.count("copies can't be recomputed") == COUNT, "once a lane"
        assert reasons(await nodes.step()) == [""] * COUNT

    play(act)


def test_records_that_are_sealed_after_the_step_is_whole_are_waited_for(play, monkeypatch):
    monkeypatch.setattr(replay_service, "RECORDS_S", 1000.0)
    looks: list[Exception] = []

    async def act(nodes: ReplayNodes) -> None:
        def look(*arguments: Any) -> Any:
            try:
                return replay_inputs(*arguments)
            except CannotReplay as error:
                looks.append(error)
                if len(looks) == 3 * COUNT:
                    nodes.record()
                raise

        await nodes.attach()
        await nodes.step()
        await nodes.step()
        monkeypatch.setattr(replay_service, "replay_inputs", look)
        nodes.train(recorded=False)
        nodes.snapshot()
        assert reasons(await nodes.turn()) == [""] * COUNT
        assert {str(each) for each in looks} == {"the record of mark 3 is missing."}

        nodes.train(recorded=False)
        nodes.previous = [NO_RECORD] * COUNT
        assert set(reasons(await nodes.step())) == {"the record of mark 4 is missing."}, (
            "and no longer if a later one is"
        )

    play(act)


def test_a_rank_that_records_nothing_is_waited_for_once(play, monkeypatch):
    monkeypatch.setattr(replay_service, "RECORDS_S", 0.5)
    looks: list[Version] = []

    def look(job: JobRecord, local: parity.LocalLane, version: Version) -> Any:
        looks.append(version)
        return replay_inputs(job, local, version)

    async def gap(nodes: ReplayNodes) -> None:
        nodes.train(recorded=False)
        nodes.previous = [NO_RECORD] * COUNT
        nodes.snapshot()
        assert set(reasons(await nodes.turn())) == {f"the record of mark {nodes.mark} is missing."}

    async def act(nodes: ReplayNodes) -> None:
        await nodes.attach()
        await nodes.step()
        await nodes.step()
        await gap(nodes)
        monkeypatch.setattr(replay_service, "replay_inputs", look)
        for _ in range(2):
            looks.clear()
            await gap(nodes)
            assert len(looks) == COUNT, "one look of each node"

        monkeypatch.setattr(replay_service, "RECORDS_S", 1000.0)
        assert reasons(await nodes.step()) == [""] * COUNT, "it records again"
        nodes.train(recorded=False)
        nodes.snapshot()
        looks.clear()
        turn = asyncio.ensure_future(nodes.turn())
        while len(looks) < 2 * COUNT:  # noqa: ASYNC110  a look tells nobody
            await asyncio.sleep(0)
        nodes.record()
        assert reasons(await turn) == [""] * COUNT, "and is waited for again"

    play(act)


def test_a_turn_of_a_step_that_lies_far_ahead_costs_one_look(play):
    """Another node may name any step: the marks up to it are more than any memory holds."""

    async def act(nodes: ReplayNodes) -> None:
        await nodes.attach()
        await nodes.step()
        await nodes.step()
        job = nodes.jobs[0]
        with pytest.raises(CannotReplay, match="the record of mark 3 is missing"):
            replay_inputs(job, parity.local_lanes(job)[0], Version(job.epoch, messages.STEP_MAX))

    play(act)


def test_wrong_bytes_leave_ever_more_turns_to_the_mover(play):
    async def act(nodes: ReplayNodes) -> None:
        await nodes.attach()
        await nodes.step()
        attempts = []
        for _ in range(6):
            nodes.train()
            job = nodes.jobs[0]
            mapped(job.slots.records[f"record-0.slot-{nodes.mark % RECORDS}"]).data[4002] ^= 1
            nodes.snapshot()
            attempts.append((await nodes.turn())[0])
            spare = memory_slot("spare", 0, nodes.lane.parity_bytes)
            again = job, parity.local_lanes(job)[0], Version(job.epoch, nodes.mark), spare
            assert not await nodes.services[0]._replays.make(*again), "a turn that is begun anew"
            assert spare.map.reread().state is SlotState.EMPTY
        assert [lane.left_out for lane in attempts] == [0, 0, 1, 0, 2, 1]
        assert all("has changed in memory" in lane.reason for lane in attempts)
        await nodes.step()
        assert (await nodes.step())[0].reason == "", "one attempt more"

    play(act)


def test_after_an_attach_the_copies_of_the_base_are_the_first_base(play):
    async def act(nodes: ReplayNodes) -> None:
        await nodes.attach()
        await nodes.step()
        await nodes.step()
        base = Version(nodes.jobs[0].epoch, nodes.mark)
        for job, service in zip(nodes.jobs, nodes.services, strict=True):
            await service.hold(job)
        anchor = nodes.moved_bytes
        await nodes.attach(2, base)
        assert reasons(await nodes.step(2)) == [""] * COUNT
        assert nodes.moved_bytes == anchor

    play(act)


def damage(nodes: ReplayNodes) -> None:
    """Changes a byte of the newest record of node 0."""
    mapped(nodes.jobs[0].slots.records[f"record-0.slot-{nodes.mark % RECORDS}"]).data[4002] ^= 1


def test_copies_that_auto_has_chosen_are_judged_after_their_first_turns(play):
    async def act(nodes: ReplayNodes) -> None:
        nodes.manifest.choice = "copies."
        await nodes.attach()
        await nodes.step()
        for _ in range(JUDGED_TURNS - 1):
            lanes = await nodes.step()
        assert [lane.verdict for lane in lanes] == [""] * COUNT, "the first turn has no copies to begin with"
        lanes = await nodes.step()
        good = f"recomputed: {JUDGED_TURNS} of {JUDGED_TURNS} turns were verified"
        assert all(lane.verdict.startswith(good) for lane in lanes)
        assert [job.record.not_recomputed for job in nodes.jobs] == [""] * COUNT
        assert reasons(await nodes.step()) == [""] * COUNT

    play(act)


def test_turns_without_copies_to_begin_with_are_no_reason_to_give_copies_up(play):
    async def act(nodes: ReplayNodes) -> None:
        nodes.manifest.choice = "copies."
        await nodes.attach()
        for _ in range(3):  # other lanes end each of these turns
            assert set(reasons(await nodes.step())) == {"no step is protected yet."}
            for node in range(COUNT):
                nodes.pin(node, protected=-1, protected_by=0)
        (lane,) = nodes.services[0]._replays._lanes["job"].values()
        assert not lane.meter.turns

    play(act)


def test_copies_that_auto_has_chosen_are_given_up_if_they_differ(play):
    """On the node where they differ, for all later epochs; a user who asks for them gets them."""

    async def act(nodes: ReplayNodes) -> None:
        nodes.manifest.choice = "copies."
        await nodes.attach()
        await nodes.step()
        for _ in range(FAILURES_MAX):
            assert not gradient_records.given_up(nodes.jobs[0])
            nodes.train()
            damage(nodes)
            nodes.snapshot()
            lanes = await nodes.turn()
        assert lanes[0].verdict.startswith("given up: recomputing failed again and again: ")
        assert _report_reply(nodes.jobs[0], 0, nodes.jobs[0].round.outcome).records_over
        assert not _report_reply(nodes.jobs[1], 1, nodes.jobs[1].round.outcome).records_over
        lanes = await nodes.step()
        assert lanes[0].reason in lanes[0].verdict and reasons(lanes)[1:] == ["", ""]
        reply = pb.InventoryReply()
        fill_inventory(reply, nodes.jobs[0])
        assert reply.not_recomputed == lanes[0].reason and "has changed in memory" in reply.not_recomputed

        nodes.services[0]._replays._lanes.clear()  # as in a restarted daemon
        for counter, choice in ((2, "copies."), (3, "")):
            nodes.manifest.choice = choice
            base = Version(nodes.jobs[0].epoch, nodes.mark)
            for job, service in zip(nodes.jobs, nodes.services, strict=True):
                await service.hold(job)
            await nodes.attach(counter, base)
            lanes = await nodes.step()
            assert bool(lanes[0].reason) == bool(choice) and reasons(lanes)[1:] == ["", ""]

    play(act)


def test_a_node_without_room_for_copies_has_none_of_this_step_and_recomputes_the_next(play, monkeypatch):
    unguarded: list[str] = []
    monkeypatch.setattr(rounds, "note_unguarded", lambda job, lanes: unguarded.extend(each.words for each in lanes))

    async def act(nodes: ReplayNodes) -> None:
        await nodes.attach()
        await nodes.step()
        await nodes.step()
        job = nodes.jobs[0]
        (older,) = [name for name, slot in job.slots.parity.items() if slot.map.header.version.step < nodes.mark]
        job.arena.free(job.slots.parity.pop(older))
        nodes.train()
        nodes.snapshot()
        job.arena.budget_bytes = 1
        nodes.pin(0, whole=nodes.mark, turn=nodes.mark, attempt=nodes.mark)
        while tasks := nodes.services[0]._tasks:
            await asyncio.wait(tasks)
        assert len(unguarded) == 1 and "--memory" in unguarded[0]
        local = parity.local_lanes(job)[0]
        assert parity.sealed_parity(job, local, Version(job.epoch, nodes.mark)) is None
        assert parity.sealed_parity(job, local, Version(job.epoch, nodes.mark - 1)) is not None
        nodes.pin(0, turn=-1)

        job.arena.budget_bytes = 0
        lanes = await nodes.step()
        assert reasons(lanes) == [""] * COUNT and lanes[0].marks == 2

    play(act)
