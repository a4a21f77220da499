"""Status and survey of thousands of nodes take work in proportion to them, in small pieces."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc.aio import Metadata

from reft.core.membership.failure_detector import NodeReport, Signal
from reft.errors import AttachError
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.child.refusals import RefusalCounts
from reft_daemon.membership import heartbeats
from reft_daemon.peers.channels import STARTED_MAX
from reft_daemon.server.callers import Caller, Door
from reft_daemon.server.judge import AdmittedCall
from reft_daemon.server.service import DaemonIdentity, DaemonService
from reft_daemon.server.status_merge import merge_signals, merge_status
from tests.daemon.jobs.test_large_manifests import manifest
from tests.support.instruction_count import counted_callbacks
from tests.support.jobs import epoch_of, registry_of

LOCAL = AdmittedCall(Caller(Door.LOCAL, os.getpid()), 10.0)
REMOTE = AdmittedCall(Caller(Door.REMOTE, address="10.0.0.7"), 10.0)
OWN = DaemonIdentity("n0", "", (), "", 0, False, False)


@pytest.fixture
def arena(tmp_path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", 64 << 20)
    yield arena
    arena.close()


async def service_of(arena: Arena, world: int) -> DaemonService:
    """Returns the service of node n0, of as many nodes as there are ranks."""
    registry = registry_of(arena)
    described = manifest(world)
    described.token, described.nodes[0].id = bytes(31) + b"1", arena.node_id
    epoch = messages.epoch_to(epoch_of(1))
    await registry.decide(pb.DecideRequest(manifest=described, decision=pb.Decision(epoch=epoch)))
    return DaemonService(registry, OWN, RefusalCounts().status)


class Peers:
    """Answers the calls to other nodes; node n1 is silent.

    Attributes:
        most: the most calls that were under way.
    """

    def __init__(self) -> None:
        self.now = self.most = 0

    async def call(self, node: pb.Node, tokens: object, stub: object, method: str, *_: object, **__: object) -> Message:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if node.id == "id1":
            raise AttachError("it is silent.")
        if method == "Inventory":
            slot = pb.SlotHeader(rank=node.ranks[0], slot="s")
            earlier = pb.Manifest(job="job", script="earlier")
            decision = pb.Decision(epoch=messages.epoch_to(epoch_of(2)), base=pb.Version(epoch=pb.Epoch(counter=7)))
            return pb.InventoryReply(node=node.name, slots=[slot], decision=decision, base_manifest=earlier)
        own = pb.NodeSignal(node_id=node.id, node=node.name, signal=pb.HEALTHY)
        rank = pb.RankStatus(rank=node.ranks[0], node=node.name)
        return pb.StatusReply(jobs=[pb.JobStatus(job="job", ranks=[rank], whole=7, held_bytes=1, signals=[own])])


def counts_of(
    folder: Path,
    ask: Callable[[DaemonService], Coroutine[Any, Any, Any]],
    check: Callable[[Any, int], None],
    world: int,
) -> list[int]:
    """Returns the instructions of each callback of the loop while a service answers.

    Args:
        folder: an empty one.
        ask: calls the service of node n0.
        check: looks at the reply.
        world: the number of nodes, each with one rank.
    """

    async def run() -> list[int]:
        arena = Arena(folder / str(world), 64 << 20)
        service, peers = await service_of(arena, world), Peers()
        service._registry.peers.call = peers.call  # type: ignore[method-assign]
        with counted_callbacks() as counts:
            reply = await asyncio.ensure_future(ask(service))
        check(reply, world)
        assert peers.most <= 2 * STARTED_MAX
        await service._registry.close(True)
        arena.close()
        return counts

    return asyncio.run(run())


def test_jobs_that_share_a_silent_node_ask_that_node_once(arena):
    """A node that answers is asked for each job."""
    asked: list[str] = []

    async def call(
        node: pb.Node, tokens: object, stub: object, method: str, request: pb.StatusRequest, *_: object
    ) -> Message:
        asked.append(node.id)
        await asyncio.sleep(0)
        if node.id == "id1":
            raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata())
        return pb.StatusReply(jobs=[pb.JobStatus(job=request.job)])

    async def run() -> None:
        service = await service_of(arena, 3)
        for name in ("second", "third"):
            described = pb.Manifest()
            described.CopyFrom(service._registry.jobs["job"].record.manifest)
            described.job, described.launch = name, name
            decision = pb.Decision(epoch=messages.epoch_to(epoch_of(1)))
            await service._registry.decide(pb.DecideRequest(manifest=described, decision=decision))
        service._registry.peers.call = call  # type: ignore[method-assign]
        reply = await service.Status(pb.StatusRequest(deep=True), LOCAL)
        assert [(each.job, [*each.silent_nodes]) for each in reply.jobs] == [
            (name, ["n1"]) for name in ("job", "second", "third")
        ]
        assert (asked.count("id1"), asked.count("id2")) == (1, 3)
        await service._registry.close(True)

    asyncio.run(run())


async def ask_status(service: DaemonService) -> pb.StatusReply:
    return await service.Status(pb.StatusRequest(job="job", deep=True), LOCAL)


def check_status(reply: pb.StatusReply, world: int) -> None:
    (status,) = reply.jobs
    assert [each.rank for each in status.ranks] == [rank for rank in range(world) if rank != 1]
    assert [*status.silent_nodes] == ["n1"] and (status.whole, status.held_bytes) == (7, world - 2)
    assert sorted(each.node for each in status.signals) == sorted(f"n{i}" for i in range(world))
    assert {each.signal for each in status.signals if each.node not in ("n0", "n1")} == {pb.HEALTHY}
    assert reply.node == "n0"


async def ask_survey(service: DaemonService) -> bytes:
    nodes = service._registry.jobs["job"].record.manifest.nodes
    return await service.Survey(pb.SurveyRequest(job="job", nodes=nodes), LOCAL)


def check_survey(data: bytes, world: int) -> None:
    reply = pb.SurveyReply.FromString(data)
    assert [each.node.name for each in reply.nodes] == [f"n{i}" for i in range(world)]
    assert [each.node.name for each in reply.nodes if each.trouble] == ["n1"]
    assert all(len(each.reply.slots) == 1 for each in reply.nodes if each.node.name != "n1")
    assert sum(each.reply.HasField("base_manifest") for each in reply.nodes) == 1, "one answer keeps it"


async def ask_signals(service: DaemonService) -> pb.SignalsReply:
    return await service.Signals(pb.SignalsRequest(job="job"), LOCAL)


def check_signals(reply: pb.SignalsReply, world: int) -> None:
    assert [each.node for each in reply.nodes] == [f"n{i}" for i in range(world)]


@pytest.mark.parametrize(
    ("ask", "check"), [(ask_status, check_status), (ask_survey, check_survey), (ask_signals, check_signals)]
)
def test_thousands_of_nodes_take_small_pieces_in_proportion_to_them(tmp_path, monkeypatch, ask, check):
    monkeypatch.setattr(heartbeats, "SLICE", 10)
    small, large = (counts_of(tmp_path, ask, check, world) for world in (200, 400))
    assert sum(large) < 2.4 * sum(small), f"{sum(small)}, then {sum(large)} instructions"
    grown = (max(large) - max(small)) / 200  # what begins the calls is one piece, and lists the nodes
    assert grown < 40, f"{grown} instructions for each further node are one piece"


def test_a_change_between_slices_is_told_by_the_next_call(arena, monkeypatch):
    monkeypatch.setattr(heartbeats, "SLICE", 1)

    async def run() -> None:
        service = await service_of(arena, 6)
        monitor = service._registry.heartbeat_service.monitors.find_or_raise("job")
        asking = asyncio.ensure_future(service.Signals(pb.SignalsRequest(job="job"), LOCAL))
        for _ in range(3):
            await asyncio.sleep(0)
        report = NodeReport("id1", Signal.OFFLINE, "it is gone.")
        assert monitor.publish(monitor.detector.take_report(report, 1.0))
        early = await asking
        late = await service.Signals(pb.SignalsRequest(job="job", version=early.version, wait_ms=10_000), LOCAL)
        assert late.version > early.version
        assert [each.signal for each in late.nodes if each.node == "n1"] == [pb.OFFLINE]
        await service._registry.close(True)

    asyncio.run(run())


def test_another_node_hears_of_this_node_and_of_those_that_are_not_well(arena):
    """Else each of thousands of nodes would tell of thousands."""

    async def run() -> None:
        service = await service_of(arena, 6)
        heartbeats = service._registry.heartbeat_service
        monitor = heartbeats.monitors.find_or_raise("job")
        monitor.detector.members["id2"].signal = Signal.OFFLINE
        monitor.detector.members["id3"].signal = Signal.HEALTHY
        monitor.detector.members["id4"].signal = Signal.COMPLETED
        here, away = [
            {each.node for each in (await service.Status(pb.StatusRequest(job="job"), call)).jobs[0].signals}
            for call in (LOCAL, REMOTE)
        ]
        assert here == {f"n{i}" for i in range(6)} and away == {"n0", "n2", "n4"}
        await service._registry.close(True)

    asyncio.run(run())


def test_what_was_refused_is_told_at_the_unix_socket_alone(arena):
    """A caller over TCP need not know what the daemon has noticed."""

    async def run() -> None:
        service = await service_of(arena, 1)
        refusals = RefusalCounts()
        refusals.count("they lied", "10.0.0.9")
        service._refused = refusals.status
        here, away = [await service.Status(pb.StatusRequest(job="job"), call) for call in (LOCAL, REMOTE)]
        (reason,) = here.refused.reasons
        assert (reason.reason, reason.total, list(reason.addresses)) == ("they lied", 1, ["10.0.0.9"])
        assert not away.HasField("refused") and away.jobs
        await service._registry.close(True)

    asyncio.run(run())


def test_the_gravest_signal_of_each_node_counts():
    ours = [pb.NodeSignal(node_id="a", signal=pb.HEALTHY), pb.NodeSignal(node_id="b", signal=pb.OFFLINE)]
    theirs = [pb.NodeSignal(node_id=node, signal=pb.SUSPECT) for node in "abc"]
    gravest = {each.node_id: each for each in ours}
    merge_signals(gravest, theirs)
    assert [(each.node_id, each.signal) for each in gravest.values()] == [
        ("a", pb.SUSPECT),
        ("b", pb.OFFLINE),
        ("c", pb.SUSPECT),
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "both"),
    [
        ("tmpfs", "unlinked", "unlinked"),
        ("memfd", "tmpfs", "memfd"),
        ("tmpfs", "tmpfs", "tmpfs"),
        ("tmpfs", "new", "tmpfs"),
    ],
)
def test_the_weakest_memory_of_all_nodes_counts(ours, theirs, both):
    """Files that were removed on another node are gone with its daemon, whichever node is asked."""
    status = pb.JobStatus(backing=ours)
    merge_status(status, pb.JobStatus(backing=theirs))
    assert status.backing == both
