"""The daemon's side of the persister: storage that hangs costs one process, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.wire.stored_format import StoredManifest
from reft_daemon.child import child_process
from reft_daemon.child.child_process import ChildProcess, RunningProcess
from reft_daemon.child.control_channel import receive_message, send_message
from reft_daemon.persist import persister
from reft_daemon.persist.__main__ import OOM_SCORE
from reft_daemon.persist.persister import Persister, StorageFailed
from reft_daemon.persist.slot_copy import SlotRange, SlotSource
from tests.daemon.child.test_child_process import with_child
from tests.daemon.persist.test_checkpoint_store import LINEAGE, VERSION, Slot, _persist, _store

DECISION = Decision(Epoch(1, bytes(16)), None)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Starts of processes are not paced."""
    monkeypatch.setattr(child_process, "PAUSE_S", 0.0)
    monkeypatch.setattr(child_process, "EARLY_S", 0.0)


def with_persister(root: Path, act: Callable[[Persister], Awaitable[None]]) -> None:
    async def run() -> None:
        each = Persister(root)
        try:
            await asyncio.wait_for(act(each), 60)
        finally:
            each.close()

    asyncio.run(run())


def test_a_command_without_progress_is_given_up_and_the_next_one_has_a_new_process(tmp_path, monkeypatch):
    async def act(each: Persister) -> None:
        await each.decide("job", LINEAGE, DECISION)
        stopped = each.child.running.process
        os.kill(stopped.pid, signal.SIGSTOP)
        monkeypatch.setattr(persister, "STALL_S", 0.2)
        with pytest.raises(StorageFailed, match=r"takes nothing for 0\.2 s"):
            await each.decide("job", LINEAGE, DECISION)
        monkeypatch.setattr(persister, "STALL_S", 30.0)
        await each.decide("job", LINEAGE, DECISION)
        assert await asyncio.to_thread(stopped.wait, 30) == -signal.SIGKILL
        assert each.child.running.process.pid != stopped.pid

    with_persister(tmp_path, act)


def test_a_command_that_waits_for_a_thread_is_not_given_up(monkeypatch):
    """Others have all threads. Once it has one, it is watched as they are."""
    now, looks = [0.0], [0]

    def monotonic() -> float:
        looks[0] += 1
        now[0] += 1.0
        return now[0]

    async def act(child: ChildProcess, running: RunningProcess, theirs: socket.socket) -> None:
        running.ready.set_result({"ready": True})
        each = Persister("/storage")
        each.child = child
        long = asyncio.ensure_future(each.ask({"do": "prune"}, 1e9))
        begun = (await asyncio.to_thread(receive_message, theirs))[0]["id"]
        send_message(theirs, {"moved": begun, "bytes": 0})
        while begun not in running.progress:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        queued = asyncio.ensure_future(each.ask({"do": "list"}, 10.0))
        number = (await asyncio.to_thread(receive_message, theirs))[0]["id"]
        first = looks[0]
        while looks[0] < first + 100 and not queued.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not queued.done()
        send_message(theirs, {"moved": number, "bytes": 0})
        with pytest.raises(StorageFailed, match="takes nothing for 10 s"):
            await queued
        with pytest.raises(StorageFailed, match="ended before it answered"):
            await long

    monkeypatch.setattr(persister, "LOOK_S", 0.001)
    monkeypatch.setattr(persister, "time", SimpleNamespace(monotonic=monotonic))
    with_child(act)


def score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_the_persister_is_the_kernels_first_victim(tmp_path):
    async def act(each: Persister) -> None:
        await each.decide("job", LINEAGE, DECISION)
        assert score_of(each.child.running.process.pid) == OOM_SCORE > 0

    with_persister(tmp_path, act)


def test_a_process_that_storage_holds_in_the_kernel_stays_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(persister, "LINGER_S", 0.05)

    async def act(each: Persister) -> None:
        held = SimpleNamespace(poll=lambda: None, wait=lambda: pytest.fail("nothing waits for the process"))
        each.child._ended = held
        for _ in range(2):
            with pytest.raises(StorageFailed, match=f"still waits for {tmp_path}"):
                await each.decide("job", LINEAGE, DECISION)
        assert each.child.running is None, "no second process beside it"
        each.close()
        held.poll, held.wait = lambda: -9, lambda: -9
        await each.decide("job", LINEAGE, DECISION)

    with_persister(tmp_path, act)


def test_the_end_of_a_process_is_not_waited_for(tmp_path):
    """The daemon's exit must not wait for a process in the kernel."""

    async def act(each: Persister) -> None:
        await each.decide("job", LINEAGE, DECISION)
        process, wait = each.child.running.process, each.child.running.process.wait
        process.wait = threading.Event().wait  # for ever
        each.close()
        assert wait(30) == -signal.SIGKILL

    with_persister(tmp_path, act)


def test_the_bytes_of_a_write_are_noted_and_a_cancelled_write_leaves_no_index(tmp_path):
    slot, noted = Slot(3), []
    source = SlotSource(3, slot.source.descriptor, [SlotRange(0, 1 << 62)])
    version = slot.map.reread().version

    async def act(each: Persister) -> None:
        digest = await each.write("job", LINEAGE, version, (1, 5), [source], noted.append)
        assert len(digest) == 32
        with pytest.raises(StorageFailed, match="File exists"):
            await each.write("job", LINEAGE, version, (1, 5), [source], noted.append)
        assert (tmp_path / "job" / LINEAGE).exists() and list(tmp_path.rglob("index.json")), "another's files stay"
        with pytest.raises(StorageFailed, match="the slot holds"):
            await each.write("job", LINEAGE, Version(version.epoch, 7), (1, 6), [source], noted.append)
        assert not list(tmp_path.rglob("node-1.6")), "a failed attempt leaves nothing"
        with pytest.raises(StorageFailed, match="65 ranks of job job train on this node; at most 64"):
            await each.write("job", LINEAGE, version, (1, 7), [source] * 65, noted.append)

    with_persister(tmp_path, act)


def test_storage_that_is_not_there_is_found_without_a_job(tmp_path):
    async def find(each: Persister) -> None:
        await each.look()

    async def miss(each: Persister) -> None:
        with pytest.raises(StorageFailed, match="No such file or directory"):
            await each.look()

    with_persister(tmp_path, find)
    with_persister(tmp_path / "nosuch", miss)


def test_newest_checkpoint_is_that_of_the_newest_step_although_a_clock_was_ahead(tmp_path):
    slot, store = Slot(0), _store(tmp_path)
    for step in (40, 41):
        slot.seal(replace(VERSION, step=step))
        _persist(store, [slot], replace(VERSION, step=step))
    os.close(slot.source.descriptor)
    (manifest,) = tmp_path.glob("run/*/*-s40/MANIFEST.json")
    os.utime(manifest, (2e9, 2e9))

    async def without_a_lineage(each: Persister) -> None:
        assert await each.newest("run", "") is None

    with_persister(tmp_path, without_a_lineage)
    other = tmp_path / "run" / "fedcba9876543210"
    other.mkdir()
    (other / f"DECISION-1-{bytes(16).hex()}").write_bytes(b"damaged, and of no interest here")

    async def act(each: Persister) -> None:
        assert (await each.newest("run", LINEAGE)).version.step == 41

    with_persister(tmp_path, act)


def test_decisions_commits_and_retention_go_through_the_process(tmp_path):
    async def act(each: Persister) -> None:
        await each.decide("job", LINEAGE, DECISION)
        await each.decide("job", LINEAGE, DECISION)
        assert await each.prune("job", LINEAGE, DECISION, persister.RetentionSettings()) == 0
        await each.end("job", LINEAGE)
        assert sorted(path.name for path in (tmp_path / "job" / LINEAGE).iterdir()) == [
            f"DECISION-1-{bytes(16).hex()}", "ENDED",
        ]  # fmt: skip
        await each.decide("job", LINEAGE, DECISION)
        assert (tmp_path / "job" / LINEAGE / "ENDED").exists(), "the same decision again is no new attach"
        stale = Decision(Epoch(2, bytes(16)), None)
        with pytest.raises(StorageFailed, match="went on in epoch 1"):
            await each.prune("job", LINEAGE, stale, persister.RetentionSettings())
        await each.decide("job", LINEAGE, Decision(Epoch(3, bytes(16)), None, (DECISION.epoch,)))
        assert not (tmp_path / "job" / LINEAGE / "ENDED").exists(), "an attach went on from another node's memory"
        assert not await each.end("job", LINEAGE, DECISION), "the job went on without the node that knows this one"
        assert not (tmp_path / "job" / LINEAGE / "ENDED").exists()

    with_persister(tmp_path, act)


def test_a_cancelled_commit_closes_no_descriptor_that_a_thread_writes(monkeypatch, tmp_path):
    """Another file may get the number of a closed descriptor, and then the thread's bytes."""
    stands, goes_on, write = threading.Event(), threading.Event(), persister._fill
    opened: list[int] = []

    def slow(descriptor: int, text: bytes) -> None:
        opened.append(descriptor)
        stands.set()
        assert goes_on.wait(30)
        write(descriptor, text)  # raises if the descriptor is closed by now

    monkeypatch.setattr(persister, "_fill", slow)

    async def act(each: Persister) -> None:
        manifest = StoredManifest(Version(DECISION.epoch, 3), "job", LINEAGE, "", b"", b"", ())
        commit = asyncio.ensure_future(each.commit(manifest, DECISION))
        await asyncio.to_thread(stands.wait, 30)
        commit.cancel()
        await asyncio.sleep(0)  # the task takes note of it
        await asyncio.sleep(0)
        assert "reft-manifest" in os.readlink(f"/proc/self/fd/{opened[0]}"), "the thread still has it"
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert not is_open(opened[0])

    with_persister(tmp_path, act)


def is_open(descriptor: int) -> bool:
    try:
        return "reft-manifest" in os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return False
