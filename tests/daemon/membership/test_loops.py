"""The loops that watch jobs and carry rounds: a bug stops no other job, and a kill is made once."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reft.core.membership.progress import Stall
from reft.failpoints import Failpoints
from reft.wire.process import Process, stat_of
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs import leases
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.leases import Lease, ProcessWatch
from reft_daemon.membership import heartbeats
from reft_daemon.membership.heartbeats import HeartbeatService
from reft_daemon.peers import round_replicator
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.peers.round_replicator import RoundReplicator
from tests.daemon.server.test_local_socket import PlayedJob

STALL = Stall(0, 5, 9.0, 1.0, True)


def service(kills_hung: bool = False) -> HeartbeatService:
    return HeartbeatService("n", PeerChannels(None, ()), {}, ChangeQueue(), kills_hung)


async def first_of(loop: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Returns once an event has come; fails if the loop ends first."""
    coming = asyncio.ensure_future(event.wait())
    await asyncio.wait({loop, coming}, return_when=asyncio.FIRST_COMPLETED)
    assert event.is_set() and not loop.done()


@pytest.mark.parametrize("error", [None, PermissionError("not this one")])
def test_a_hung_rank_that_does_not_end_is_killed_once(monkeypatch, caplog, error):
    signals: list[int] = []

    def send(_: int, number: int) -> None:
        signals.append(number)
        if error is not None:
            raise error

    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    monkeypatch.setattr(leases, "FENCE_DEADLINE_S", 0)

    async def run() -> None:
        beats, process = service(kills_hung=True), Process(os.getpid(), stat_of(os.getpid()).start)
        lease = Lease(process, 1, watch=ProcessWatch(process, lambda: None))
        job = SimpleNamespace(leases={0: lease}, record=pb.JobRecord(manifest=pb.Manifest(launch="launch")))
        monkeypatch.setattr(beats.monitors, "record_of", lambda _: job)
        monitor = cast(Any, SimpleNamespace(name="job", to_kill=lambda _: STALL))
        for _ in range(5):
            beats._kill_hung(monitor)
            await asyncio.gather(*beats._kills)
        assert signals == [signal.SIGKILL]
        lease.watch.close()
        lease.watch = ProcessWatch(process, lambda: None)  # of another attach
        beats._kill_hung(monitor)
        await asyncio.gather(*beats._kills)
        assert signals == 2 * [signal.SIGKILL]
        lease.watch.close()

    asyncio.run(run())
    assert caplog.text.count("reft.audit") == (2 if error is None else 0)
    assert caplog.text.count("it has not ended since" if error is None else "not this one") == 2


def test_a_bug_in_the_watch_of_one_job_ends_neither_the_loop_nor_the_log(monkeypatch, caplog):
    monkeypatch.setattr(heartbeats, "TICK_S", 0)

    async def run() -> None:
        beats, looks, has_gone_on = service(), list[str](), asyncio.Event()
        for name in ("first", "second"):
            detector = SimpleNamespace(watched_nodes=list)
            monitor = SimpleNamespace(name=name, is_over=lambda *_: False, detector=detector)
            beats.monitors.by_name[name] = cast(Any, monitor)

        def look(monitor: Any, _: float) -> None:
            looks.append(monitor.name)
            if monitor.name == "first":
                raise ValueError("a bug")
            if looks.count("second") == 5:
                has_gone_on.set()

        monkeypatch.setattr(beats, "_look", look)
        monkeypatch.setattr(beats.monitors, "record_of", lambda _: None)
        monkeypatch.setattr(beats, "_kill_hung", lambda _: None)
        watching = asyncio.ensure_future(beats.run())
        await first_of(watching, has_gone_on)
        watching.cancel()

    asyncio.run(run())
    assert caplog.text.count("job=first can't be watched") == 1 and "a bug" in caplog.text


def test_a_sender_of_the_round_goes_on_after_a_bug_that_a_reply_meets(monkeypatch, caplog):
    monkeypatch.setattr(round_replicator, "RETRY_S", 0)

    async def run() -> None:
        calls, has_gone_on = list[str](), asyncio.Event()

        async def call(_node: pb.Node, _tokens: object, _stub: object, method: str, *_: object) -> pb.Outcome:
            calls.append(method)
            if len(calls) <= 3:
                raise ValueError("the reply can't be understood")
            has_gone_on.set()
            return pb.Outcome(job="job")

        peers = cast(Any, SimpleNamespace(call=call))
        replicator = RoundReplicator(PlayedJob().record, peers, Failpoints(""))
        (sending,) = replicator._tasks
        replicator.wake()
        await first_of(sending, has_gone_on)
        replicator.close()

    asyncio.run(run())
    assert caplog.text.count("job=job node=p does not answer in the round: the reply can't be understood") == 1
    assert "Traceback" in caplog.text
