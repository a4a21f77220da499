"""Tests turns with real movers and nodes in one process: movers killed at each range, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reft.core.coding.turn_pace import fixed_limit
from reft.core.commit.decision import Decision
from reft.core.commit.pins import UnguardedLane
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.errors import AttachError, NoRoom
from reft.wire import messages
from reft.wire.manifest import placement_of
from reft.wire.slot_format import PAGE
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import leasing, parity, rounds, slot_reads
from reft_daemon.jobs.capsule_replication import node_placement
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.mover.mover import Mover, MoverSettings
from reft_daemon.mover.range_protocol import PULLS_MAX
from reft_daemon.peers import turns
from reft_daemon.peers.turns import TurnService, mover_address
from tests.support.exchange import CHUNK, SIZES, SLOTS, described_of, exchange_fields, rank_data, write_step
from tests.support.jobs import decide_now, epoch_of
from tests.support.parity import mapped
from tests.support.two_level import expected_parity as expected_parities


class Nodes:
    """Nodes of one job in this process, one for each size; movers are processes.

    Attributes:
        guarded: (node, turn), as noted in the round.
        unguarded: (node, lane), likewise.
        asked: called before each OpenBulk, with the node that is asked.
    """

    def __init__(self, folder: Path, sizes: Sequence[int] = SIZES, tolerate: int = -1, protect: str = "auto") -> None:
        self.count = len(sizes)
        fields = exchange_fields(sizes, protect) | {"tolerate": tolerate}
        self.manifest = pb.Manifest(
            job="job", named=True, token=bytes(32), world=self.count, every=1,
            nodes=[pb.Node(name=f"n{i}", id=f"id{i}", ranks=[i], addresses=[f"unix:/{i}"]) for i in range(self.count)],
            **fields,
        )  # fmt: skip
        self.place()
        self.arenas = [Arena(folder / str(i), 0) for i in range(self.count)]
        self.jobs = [JobRecord(arena, pb.JobRecord(manifest=self.manifest), ChangeQueue()) for arena in self.arenas]
        self.movers = [Mover(MoverSettings()) for _ in range(self.count)]
        self.services = [TurnService(self, mover) for mover in self.movers]  # type: ignore[arg-type]
        self.guarded: list[tuple[int, int]] = []
        self.unguarded: list[tuple[int, UnguardedLane]] = []
        self.asked: Callable[[int], Awaitable[None]] | None = None

    def place(self) -> None:
        self.placement = placement_of(self.manifest)
        (self.lane,) = self.placement.guard_lanes

    async def call(self, node: pb.Node, *_: object) -> pb.OpenBulkReply:
        """Stands for `PeerChannels.call` of OpenBulk."""
        index = int(node.name[1:])
        if self.asked is not None:
            await self.asked(index)
        return await self.services[index].open_bulk(self.jobs[index])

    async def attach(self, counter: int = 1, base: Version | None = None, guard: Version | None = None) -> None:
        decision = messages.decision_to(Decision(epoch_of(counter), base, (), guard))
        for index, job in enumerate(self.jobs):
            request = pb.DecideRequest(manifest=self.manifest, decision=decision, node_index=index)
            decide_now(job, request, node_placement(self.manifest, index))
            await leasing.slots_for(job, self.lease_request(index))
            self.services[index].release(job.id)  # as the registry does

    def lease_request(self, rank: int) -> pb.LeaseRequest:
        data_bytes = self.placement.rank_placement(rank).data_bytes
        return pb.LeaseRequest(
            job="job", rank=rank, slots=SLOTS, data_bytes=data_bytes, table_bytes=PAGE, chunk_bytes=CHUNK
        )  # fmt: skip

    def write(self, step: int) -> None:
        for rank, job in enumerate(self.jobs):
            slot = job.slots.current[f"rank-{rank}.slot-{step % SLOTS}"]
            write_step(slot.map, Version(job.epoch, step), rank_data(self.placement, rank, step))

    def pins(self, **steps: int) -> None:
        """Announces pins to all nodes. The number of a turn is its step unless it is given."""
        if steps.get("turn", -1) >= 0:
            steps.setdefault("attempt", steps["turn"])
        if steps.get("protected", -1) >= 0:
            steps["protected_by"] = steps["protected"]
        for job, service in zip(self.jobs, self.services, strict=True):
            pins = replace(job.round.outcome.pins, seq=job.round.outcome.pins.seq + 1, **steps)
            job.round.outcome = replace(job.round.outcome, pins=pins)
            service.wake(job)

    async def settled(self) -> None:
        """Returns once no node has a turn or other work under way."""
        while tasks := set().union(*(service._tasks for service in self.services)):
            await asyncio.wait(tasks)

    def parity(self, node: int, step: int) -> bytes:
        job = self.jobs[node]
        slot = parity.sealed_parity(job, parity.local_lanes(job)[0], Version(job.epoch, step))
        assert slot is not None and slot.map.bad_chunks() == []
        return mapped(slot).data[: self.lane.parity_bytes].tobytes()

    def check_parity(self, step: int) -> None:
        sections = [
            rank_data(self.placement, rank, step)[self.placement.rank_placement(rank).unreplicated_offset :]
            for rank in range(self.count)
        ]
        for node in range(self.count):
            assert self.parity(node, step) == expected_parities(self.lane, sections, node)


@pytest.fixture
def play(monkeypatch) -> Callable[..., None]:
    """Runs a test with nodes."""

    def run(act: Callable[[Nodes], Awaitable[None]], *settings: Any) -> None:
        async def with_nodes(folder: Path) -> None:
            nodes = Nodes(folder, *settings)
            index = {id(job): i for i, job in enumerate(nodes.jobs)}

            def note_unguarded(job: JobRecord, lanes: Any) -> None:
                nodes.unguarded += [(index[id(job)], lane) for lane in lanes]

            monkeypatch.setattr(rounds, "note_guarded", lambda job, turn: nodes.guarded.append((index[id(job)], turn)))
            monkeypatch.setattr(rounds, "note_unguarded", note_unguarded)
            monkeypatch.setattr(slot_reads, "living_ranks", lambda job: job.ranks)
            try:
                await asyncio.wait_for(act(nodes), 100)
            finally:
                for service in nodes.services:
                    await service.close()

        with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as folder:
            asyncio.run(with_nodes(Path(folder)))

    return run


def test_a_mover_killed_at_each_range_begins_the_parity_anew(play, monkeypatch):
    """With one range a ticket, the n-th ticket is asked for when n - 1 ranges are folded."""
    monkeypatch.setattr(turns, "RANGES_MAX", 1)
    monkeypatch.setattr("reft_daemon.child.child_process.PAUSE_S", 0.0)
    monkeypatch.setattr("reft_daemon.child.child_process.EARLY_S", 0.0)
    monkeypatch.setattr("reft.core.coding.exchange.RANGE_MAX", CHUNK)

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        tickets, kill_at, killed = 0, 0, []

        async def asked(node: int) -> None:
            nonlocal tickets
            tickets += 1
            if tickets == kill_at:
                killed.append(nodes.movers[0].child.running.process.pid)
                os.kill(killed[-1], signal.SIGKILL)

        nodes.asked = asked
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        whole_turn = tickets
        assert whole_turn > 12
        assert sorted(nodes.guarded) == [(0, 1), (1, 1), (2, 1)]
        for step in range(2, whole_turn // 2):
            nodes.pins(turn=-1, protected=step - 1)
            nodes.write(step)
            tickets, kill_at = 0, 2 * step - 3
            nodes.pins(whole=step, turn=step)
            await nodes.settled()
            assert len(set(killed)) == step - 1, "each turn lost a mover"
            nodes.check_parity(step)
            nodes.check_parity(step - 1)
        assert not nodes.unguarded

    play(act)


def test_a_lane_that_survives_two_losses_gets_its_parity_from_many_tickets(play, monkeypatch):
    monkeypatch.setattr(turns, "RANGES_MAX", 1)
    monkeypatch.setattr("reft.core.coding.exchange.RANGE_MAX", CHUNK)

    async def act(nodes: Nodes) -> None:
        assert (nodes.lane.f, nodes.lane.inner.w, nodes.lane.blocks > 1) == (3, 2, True)
        await nodes.attach()
        for step in (1, 2):
            nodes.write(step)
            nodes.pins(whole=step, turn=step)
            await nodes.settled()
            nodes.pins(turn=-1, protected=step)
            nodes.check_parity(step)
        assert not nodes.unguarded and (4, 2) in nodes.guarded
        moved = sum(mover.child.moved_bytes for mover in nodes.movers)
        assert moved == 2 * sum(nodes.lane.sent_bytes(source) for source in range(5))

    play(act, [9 * CHUNK, 7 * CHUNK + 321, 8 * CHUNK, 4 * CHUNK + 5, 9 * CHUNK], 3)


@pytest.mark.parametrize("tolerate", [1, 2])
def test_turns_of_a_copy_lane_bring_whole_sections_of_the_next_members(play, tolerate):
    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        assert (nodes.lane.is_copies, nodes.lane.f) == (True, tolerate)
        for step in (1, 2):
            nodes.write(step)
            nodes.pins(whole=step, turn=step)
            await nodes.settled()
            nodes.pins(turn=-1, protected=step)
            nodes.check_parity(step)
        assert not nodes.unguarded and (3, 2) in nodes.guarded
        assert sum(mover.child.moved_bytes for mover in nodes.movers) == 2 * tolerate * sum(nodes.lane.sizes)

    play(act, [9 * CHUNK, 7 * CHUNK + 321, 8 * CHUNK, 4 * CHUNK + 5], tolerate, "aor")


def test_an_error_that_nobody_foresaw_ends_the_turn_with_words(play, monkeypatch):
    """Else the coordinator would wait for this turn for ever, and protect no later step."""

    async def begin(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        monkeypatch.setattr(nodes.movers[0], "begin", begin)
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        assert nodes.unguarded == [(0, UnguardedLane(1, 0, "can't start new thread", 1))]
        assert sorted(nodes.guarded) == [(0, 1), (1, 1), (2, 1)]

    play(act)


def test_a_turn_of_a_purged_job_tells_the_round_nothing(play, monkeypatch):
    """The coordinator would write its pins into a folder that the purge has removed."""

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        reserve = leasing.reserve_parity

        async def purged_meanwhile(job: JobRecord, rank: int) -> None:
            if job is not nodes.jobs[0]:
                return await reserve(job, rank)
            nodes.services[0].drop(job.id)
            raise AttachError("job job was dropped while its slots were made.")

        monkeypatch.setattr(leasing, "reserve_parity", purged_meanwhile)
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        assert not nodes.unguarded and sorted(nodes.guarded) == [(1, 1), (2, 1)]

    play(act)


def test_a_loss_of_a_job_that_is_purged_at_once_is_not_told(play):
    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        nodes.pins(whole=1, protected=1)  # no parity of step 1 was made
        nodes.services[0].drop("job")
        await nodes.settled()
        assert [node for node, _ in nodes.unguarded] == [1, 2]

    play(act)


class Wire:
    """Forwards one connection to a mover, and disturbs what the mover sends.

    Args:
        port: of the mover.
        disturb: receives each piece, and its number; returns the bytes in its place; None cuts.
    """

    def __init__(self, port: int, disturb: Callable[[bytes, int], bytes | None]) -> None:
        self._port, self._disturb = port, disturb

    async def open(self) -> int:
        """Returns the port of the wire."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server.close()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def requests() -> None:
            while data := await reader.read(1 << 16):
                far_writer.write(data)
            far_writer.close()

        task = asyncio.ensure_future(requests())
        with contextlib.suppress(ConnectionError):
            number = 0
            while data := await far_reader.read(CHUNK // 4):
                number += 1
                disturbed = self._disturb(data, number)
                if disturbed is None:
                    break
                writer.write(disturbed)
                await writer.drain()
        task.cancel()
        for each in (writer, far_writer):
            each.close()


FAULTS: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda data: None,
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "repeated": lambda data: data + data,
    "reordered": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disturbed_connection_delays_a_turn_and_changes_no_parity(play, monkeypatch, fault):
    """Each source's first connections are disturbed, each at a later piece."""
    monkeypatch.setattr(turns, "RETRY_S", 0.0)
    monkeypatch.setattr("reft.core.coding.exchange.RANGE_MAX", CHUNK)
    wires = 0

    async def act(nodes: Nodes) -> None:
        real = nodes.call

        async def call(node: pb.Node, *arguments: object) -> pb.OpenBulkReply:
            nonlocal wires
            reply = await real(node, *arguments)
            wires += 1
            if wires > 24:
                return reply
            at = 1 + wires // 3
            disturb = lambda data, number: FAULTS[fault](data) if number == at else data  # noqa: E731
            return pb.OpenBulkReply(port=await Wire(reply.port, disturb).open(), ticket=reply.ticket)

        monkeypatch.setattr(nodes, "call", call)
        await nodes.attach()
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        nodes.check_parity(1)
        assert not nodes.unguarded and wires > 12, "connections were asked for again"

    play(act)


def test_a_turn_that_ends_early_leaves_its_slot_for_the_next_one(play, monkeypatch):
    monkeypatch.setattr(turns, "RANGES_MAX", 1)

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        nodes.pins(turn=-1, protected=1)
        reached = asyncio.Event()

        async def never(node: int) -> None:
            reached.set()
            await asyncio.Event().wait()

        nodes.asked = never
        nodes.write(2)
        nodes.pins(whole=2, turn=2)
        await reached.wait()
        nodes.asked = None
        nodes.write(3)
        nodes.pins(whole=3, turn=3)
        await nodes.settled()
        assert (0, 2) not in nodes.guarded and {(node, 3) for node in range(3)} <= set(nodes.guarded)
        nodes.check_parity(1)
        nodes.check_parity(3)

    play(act)


@pytest.mark.parametrize("ended_by", [(-1,), (-1, 4, -1), (4,)])
def test_a_turn_waits_until_the_mover_has_ended_all_work_of_earlier_ones(play, monkeypatch, ended_by):
    """Node 0's mover answers the cancelled turn when the other nodes have sealed the next one."""

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        reached, answers, began = asyncio.Event(), asyncio.Event(), []
        real = nodes.movers[0].begin

        async def begin(job: str, slot: Any, version: Version, *facts: Any) -> Any:
            began.append(version.step)
            writer = await real(job, slot, version, *facts)
            if version.step == 1:
                reached.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await answers.wait()
            return writer

        monkeypatch.setattr(nodes.movers[0], "begin", begin)
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await reached.wait()
        for turn in ended_by:
            nodes.pins(turn=turn)
            await asyncio.sleep(0)  # a turn that is replaced at once has begun to wait
        nodes.write(2)
        nodes.pins(whole=2, turn=2)
        while others := nodes.services[1]._tasks | nodes.services[2]._tasks:
            await asyncio.wait(others)
        began_early = began[1:]
        answers.set()
        await nodes.settled()
        assert not began_early and {(1, 2), (2, 2)} <= set(nodes.guarded)
        assert began == [1, 2] and (0, 2) in nodes.guarded and not nodes.unguarded
        nodes.check_parity(2)

    play(act)


def test_an_attach_waits_for_a_turn_that_ended_before(play, monkeypatch):
    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        reached, answers, forgets = asyncio.Event(), asyncio.Event(), []
        real = nodes.movers[0].forget

        async def begin(*_: Any) -> None:
            reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                await answers.wait()

        async def forget(job: str) -> None:
            forgets.append(answers.is_set())
            await real(job)

        monkeypatch.setattr(nodes.movers[0], "begin", begin)
        monkeypatch.setattr(nodes.movers[0], "forget", forget)
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await reached.wait()
        nodes.pins(turn=-1)
        held = asyncio.ensure_future(nodes.services[0].hold(nodes.jobs[0]))
        await nodes.services[1].hold(nodes.jobs[1])
        is_early = held.done()
        answers.set()
        await held
        assert not is_early and forgets == [True, True]

    play(act)


def test_a_pull_that_waits_for_others_has_no_ticket_and_keeps_its_patience(play, monkeypatch):
    late_s, asked = 0.0, []
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s))
    monkeypatch.setattr(turns, "RETRY_S", 0.0)

    async def act(nodes: Nodes) -> None:
        nonlocal late_s
        await nodes.attach()
        service = nodes.services[0]
        real = service._ticket

        async def ticket(*facts: Any) -> Any:
            asked.append(facts)
            if len(asked) == 1:
                raise ConnectionError("the first ticket is lost")
            return await real(*facts)

        monkeypatch.setattr(service, "_ticket", ticket)
        for _ in range(PULLS_MAX):
            await service._pulls.acquire()  # as many pulls of other lanes
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        while others := nodes.services[1]._tasks | nodes.services[2]._tasks:
            await asyncio.wait(others)
        while not (service._pulls._waiters or asked):  # noqa: ASYNC110
            await asyncio.sleep(0)
        asked_early = list(asked)
        late_s += turns.PATIENCE_S + 1
        for _ in range(PULLS_MAX):
            service._pulls.release()
        await nodes.settled()
        assert not asked_early and len(asked) > 1 and not nodes.unguarded
        nodes.check_parity(1)

    play(act)


def test_what_is_lost_of_the_protected_step_is_noted_once(play):
    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        nodes.pins(turn=-1, protected=1)
        await asyncio.sleep(0)
        assert not nodes.unguarded
        local = parity.local_lanes(nodes.jobs[0])[0]
        slot = parity.sealed_parity(nodes.jobs[0], local, Version(nodes.jobs[0].epoch, 1))
        slot.damaged = Version(nodes.jobs[0].epoch, 1)  # as the scrub sets it
        own = nodes.jobs[1].slots.current["rank-1.slot-1"]
        own.damaged = Version(nodes.jobs[1].epoch, 1)
        for _ in range(3):
            for job, service in zip(nodes.jobs, nodes.services, strict=True):
                service.wake(job)
            await asyncio.sleep(0)
        assert [(node, lane.step, lane.lane) for node, lane in nodes.unguarded] == [(0, 1, 0), (1, 1, 0)]
        assert "parity" in nodes.unguarded[0][1].words and "slot of rank 1" in nodes.unguarded[1][1].words

    play(act)


def test_another_turn_of_a_step_makes_only_the_parity_that_is_gone(play):
    """Damaged parity of the protected step, and parity that no mover has sealed, are begun anew."""

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        nodes.pins(turn=-1, protected=1)
        version = Version(nodes.jobs[0].epoch, 1)
        damaged, torn = (parity.sealed_parity(job, parity.local_lanes(job)[0], version) for job in nodes.jobs[:2])
        damaged.damaged = version  # as the scrub sets it
        torn.map.begin(version, torn.map.reread().layout, b"", nodes.lane.parity_bytes)  # as by a mover that died
        for job in nodes.jobs[:2]:
            assert parity.sealed_parity(job, parity.local_lanes(job)[0], version) is None
        before = [mover.child.moved_bytes for mover in nodes.movers]
        nodes.pins(protected=-1, kept=1, turn=1, attempt=2)
        await nodes.settled()
        nodes.pins(attempt=3)  # the pins between two turns were not heard
        await nodes.settled()
        assert {(node, turn) for node in range(3) for turn in (2, 3)} <= set(nodes.guarded) and not nodes.unguarded
        nodes.check_parity(1)
        moved = [mover.child.moved_bytes - earlier for mover, earlier in zip(nodes.movers, before, strict=True)]
        assert sum(map(bool, moved)) >= 2, "two nodes pulled"
        nodes.pins(turn=-1, protected=1, kept=-1)
        for step in (2, 3):
            nodes.write(step)
            nodes.pins(whole=step, turn=step, attempt=step + 2)
            await nodes.settled()
            nodes.check_parity(step)
            nodes.check_parity(step - 1)
            nodes.pins(turn=-1, protected=step)
        assert all(len(job.slots.parity) == 2 for job in nodes.jobs) and not nodes.unguarded

    play(act)


def test_what_is_left_of_a_protected_step_outlives_turns_that_end(play):
    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        nodes.pins(turn=-1, protected=1)
        nodes.pins(protected=-1, kept=1)  # some node lost its parity
        for step in (2, 3, 4):
            nodes.write(step)
            nodes.pins(whole=step, turn=step)
            await nodes.settled()
            nodes.check_parity(step)
            nodes.check_parity(1)

    play(act)


def test_the_coordinator_retries_a_turn_after_a_pause(play, monkeypatch):
    retried: list[tuple[int, int]] = []

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        has_retried = asyncio.Event()

        def retry_turn(job: JobRecord, epoch: Epoch, turn: int) -> None:
            retried.append((epoch.counter, turn))
            has_retried.set()

        monkeypatch.setattr(rounds, "retry_turn", retry_turn)
        pauses: list[float] = []
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def call_later(pause_s: float, act: Callable[[], None], *arguments: object) -> asyncio.TimerHandle:
            pauses.append(pause_s)
            return later(0, act, *arguments)

        monkeypatch.setattr(loop, "call_later", call_later)
        nodes.pins(whole=1, attempt=1)
        for job, service in zip(nodes.jobs, nodes.services, strict=True):
            service.wake(job)
        assert pauses == [1.0], "one timer, on the coordinator alone"
        await has_retried.wait()
        assert retried == [(1, 1)]
        nodes.pins(turn=1, attempt=2)
        nodes.pins(turn=-1, protected=1)
        assert pauses == [1.0], "no turn is wanted"

    play(act)


def test_a_node_without_trainers_does_not_demote_the_protected_step(play, monkeypatch):
    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        for name in list(nodes.jobs[0].slots.parity):
            nodes.jobs[0].arena.free(nodes.jobs[0].slots.parity.pop(name))
        with monkeypatch.context() as patch:
            patch.setattr(slot_reads, "living_ranks", lambda job: [])
            nodes.pins(turn=-1, protected=1)
            await asyncio.sleep(0)
            assert nodes.unguarded == []
        nodes.services[0].wake(nodes.jobs[0])
        await asyncio.sleep(0)
        assert [(node, lane.step) for node, lane in nodes.unguarded] == [(0, 1)]

    play(act)


def test_no_room_and_silence_are_told_by_name(play, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.0)
    monkeypatch.setattr(turns, "RETRY_S", 0.0)

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        job = nodes.jobs[0]
        for name in list(job.slots.parity):
            job.arena.free(job.slots.parity.pop(name))  # memfds that died with an earlier daemon

        def full(*_: object) -> None:
            raise NoRoom("the slots need 1 TiB, but --memory leaves 0 B.")

        monkeypatch.setattr(job.arena, "create", full)

        async def asked(node: int) -> None:
            if node == 2:
                raise ConnectionError("node n2 has no address")

        nodes.asked = asked
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        words = {node: lane.words for node, lane in nodes.unguarded}
        assert "--memory leaves" in words[0] and "node n2 gives nothing of rank 2" in words[1] and 2 not in words
        assert {(node, 1) for node in range(3)} == set(nodes.guarded), "the other lanes of a node are guarded"
        states = [slot.map.reread().state for slot in nodes.jobs[1].slots.parity.values()]
        assert SlotState.SEALED not in states

    play(act)


def test_parity_that_the_decision_drops_is_emptied_at_the_lease(play):
    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        for step in (1, 2):
            nodes.write(step)
            nodes.pins(whole=step, turn=step)
            await nodes.settled()
            nodes.pins(turn=-1, protected=step)
        for job, service in zip(nodes.jobs, nodes.services, strict=True):
            await service.hold(job)
        await nodes.attach(2, base=Version(epoch_of(1), 1))
        for job in nodes.jobs:
            versions = {slot.map.reread().version for slot in job.slots.parity.values()}
            assert versions == {None, Version(epoch_of(1), 1)}

    play(act)


def test_the_guards_parity_of_other_lanes_stays_until_a_newer_step_is_protected(play):
    """Both placements' parity counts as held meanwhile."""

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        nodes.pins(turn=-1, protected=1)
        guard, old_lane = Version(epoch_of(1), 1), nodes.lane
        for job, service in zip(nodes.jobs, nodes.services, strict=True):
            await service.hold(job)
        for field in ("packed_tables", "layouts", "layout_of"):
            nodes.manifest.ClearField(field)
        nodes.manifest.MergeFrom(pb.Manifest(**described_of([size + 20 * CHUNK for size in SIZES])))
        nodes.place()
        await nodes.attach(2, base=guard, guard=guard)
        for job in nodes.jobs:
            headers = {slot.name: slot.map.reread() for slot in job.slots.parity.values()}
            assert [header.version for header in headers.values()].count(guard) == 1 and len(headers) == 3
            old, new = (lane.parity_bytes for lane in (old_lane, nodes.lane))
            assert job.peak_bytes >= job.held_bytes >= old + 2 * new + SLOTS * nodes.lane.sizes[0]
        nodes.write(2)
        nodes.pins(whole=2, turn=2)
        await nodes.settled()
        assert all(len(job.slots.parity) == 3 for job in nodes.jobs)
        nodes.check_parity(2)
        nodes.pins(turn=-1, protected=2)
        assert all(len(job.slots.parity) == 2 for job in nodes.jobs)
        nodes.check_parity(2)

    play(act)


def test_the_address_of_a_mover():
    far, near = pb.Node(name="a", addresses=["[fd00::7]:29700"]), pb.Node(name="b", addresses=["unix:/x"])
    assert mover_address(far, pb.OpenBulkReply(port=5)) == ("fd00::7", 5, "a")
    assert mover_address(far, pb.OpenBulkReply(port=5, address="10.0.0.1")) == ("10.0.0.1", 5, "a")
    assert mover_address(near, pb.OpenBulkReply(port=5)) == ("127.0.0.1", 5, "b")


def test_status_says_what_the_exchange_sends_how_fast_and_what_it_keeps(play):
    async def act(nodes: Nodes) -> None:
        for mover in nodes.movers:
            mover.settings = MoverSettings(limit=fixed_limit(1 << 20))
        await nodes.attach()
        job, service, lane = nodes.jobs[1], nodes.services[1], nodes.lane
        before = service.status(job)
        assert (before.last_turn_s, before.bytes_per_s) == (0, 0)
        assert before.sent_bytes == lane.sent_bytes(1) < 1 << 20
        assert (before.pace_bytes_per_s, before.pace_reason) == (0, "a turn fits into one second of the limit")
        assert before.parity_bytes == sum(slot.file_bytes for slot in job.slots.parity.values()) > 2 * lane.parity_bytes
        assert before.extra_slot_bytes == job.slots.of_rank(1)[0].file_bytes, "of four slots, one"
        nodes.write(1)
        nodes.pins(whole=1, turn=1)
        await nodes.settled()
        nodes.pins(turn=-1, protected=1)
        after = service.status(job)
        assert after.last_turn_s > 0
        assert after.bytes_per_s == pytest.approx(
            sum(lane.sent_bytes(i) for i in range(3)) / 3 / after.last_turn_s, rel=0.5
        )
        service.drop("job")
        assert service.status(job).last_turn_s == 0

    play(act)


def test_the_pace_of_a_job_is_that_of_all_its_ranks_here(play, monkeypatch):
    granted = []

    async def act(nodes: Nodes) -> None:
        await nodes.attach()
        job, mover = nodes.jobs[1], nodes.movers[1]
        grant = mover.grant

        async def listened(name, slots, sent_bytes):
            granted.append(sent_bytes)
            return await grant(name, slots, sent_bytes)

        mover.grant = listened
        await nodes.services[1].open_bulk(job)
        assert granted == [nodes.lane.sent_bytes(1)]

    play(act)
