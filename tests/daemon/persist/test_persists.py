"""Checkpoints of a job on two real daemons: when they are written, and what may fail meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from reft.core.commit.version import Epoch
from reft.core.persist.persist_cadence import PersistCadence
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.peers.persist_run import PersistRun
from reft_daemon.peers.persists import JobState
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.storage_folder import StorageFolder
from tests.support.daemons import until
from tests.support.exchange import SIZES, ShardedJob
from tests.support.jobs import Code, refused
from tests.support.persisted import LINEAGE, PersistedJob, persister_of, persisters
from tests.support.trainer_forks import Trainer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


@pytest.fixture
def small_root(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for little more than the names of a checkpoint."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k", "reft-test", folder]
    if os.getuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def two_nodes(start, trainer: Trainer, root: Path, *flags: str, **facts: object) -> PersistedJob:
    daemons = [start("--listen", "127.0.0.1:0", "--persist", str(root), *flags) for _ in range(2)]
    return PersistedJob(daemons, trainer, root, **facts)


def test_a_request_writes_the_newest_whole_step_from_any_node(start, trainer, root):
    job = two_nodes(start, trainer, root, earlier_tokens=[b"e" * 32]).begin()
    with refused(Code.FAILED_PRECONDITION, "no step of job job is whole yet"):
        job.ask()
    job.seal(1, 2)
    assert job.persist(node=1).done
    job.check(2)
    assert [each.epoch.counter for each in job.store.decisions(LINEAGE)] == [1]
    status = until(lambda: (s := job.status()).step == -1 and s)
    assert (status.persisted, status.trouble) == (2, "") and status.nbytes > 2 * job.nbytes
    assert job.persist().done and job.folders(2), "it is there already"
    assert not job.report(0, {}).pins.HasField("persist")
    manifest = job.store.checkpoints(LINEAGE)[0].manifest
    stored = pb.Manifest.FromString(manifest.job_manifest)
    assert not stored.token and not stored.earlier_tokens


def test_each_interval_has_a_checkpoint_and_old_ones_are_removed(start, trainer, root):
    job = two_nodes(start, trainer, root, "--persist-every", "100ms", "--keep", "2").begin()
    for step in (3, 5, 7, 9):
        job.seal(step)
        until(lambda step=step: step in job.stored(), what=f"step {step} on storage")
    until(lambda: job.stored() == [7, 9], what="retention")
    job.check(7, 9)
    assert not job.folders(3) and job.status().every_s == pytest.approx(0.1)


@pytest.mark.parametrize("clock_s", [-7200, 3600 * 24 * 365])
def test_a_coordinator_that_restarts_within_each_interval_writes_checkpoints_all_the_same(
    start, trainer, root, clock_s
):
    job = two_nodes(start, trainer, root, "--persist-every", "1h").begin()
    job.seal(1)
    assert job.persist().done
    (manifest,) = root.rglob("MANIFEST.json")
    moment_s = manifest.stat().st_mtime + clock_s
    os.utime(manifest, (moment_s, moment_s))
    job.daemons[0].kill()
    job.daemons[0].start()
    job.seal(2)
    if clock_s < 0:
        until(lambda: job.stored() == [1, 2], what="a checkpoint once the interval is over")
    else:  # storage's clock was ahead: as if the checkpoint were new
        until(lambda: job.status().persisted == 1, what="a look at storage")
        assert job.stored() == [1] and job.status().age_s == 0


def test_training_goes_on_while_storage_hangs_and_the_persisted_step_stays(start, trainer, root):
    job = two_nodes(start, trainer, root).begin()
    job.seal(1)
    assert job.persist().done
    stopped = persister_of(job.daemons[1])
    stopped.suspend()
    job.seal(2)
    asked = job.ask()
    until(lambda: job.status().step == 2 and job.status().written_bytes)
    job.seal(3, 4, 5, 6, 7, 8)
    assert not job.ask(1, asked).done and job.report(1, {}).pins.persist == 2
    assert len(persisters(job.daemons[0])) == len(persisters(job.daemons[1])) == 1
    stopped.resume()
    assert until(lambda: job.ask(1, asked).done)
    job.check(1, 2)
    until(lambda: not job.report(1, {}).pins.HasField("persist"), what="the pin's end")


def test_a_node_that_is_killed_in_mid_write_writes_again(start, trainer, root):
    job = two_nodes(start, trainer, root, chunks=8192).begin()
    job.seal(1)
    assert job.persist().done
    child = persister_of(job.daemons[1])
    job.seal(2)
    asked = job.ask()
    child.suspend()
    job.daemons[1].kill()
    until(lambda: not child.is_running(), what="the end of a persister whose daemon has ended")
    job.daemons[1].start()
    assert until(lambda: job.ask(0, asked).done, what="the checkpoint")
    job.check(1, 2)


def test_a_coordinator_that_is_killed_before_the_commit_goes_on_after_its_restart(start, trainer, root):
    job = two_nodes(start, trainer, root)
    coordinator = job.daemons[0]
    coordinator.environment["REFT_FAILPOINTS"] = "persist.commit:kill"
    coordinator.kill()
    coordinator.start()
    job.begin()
    job.seal(1, 2)
    job.ask(node=1)
    coordinator.process.wait(60)
    assert job.stored() == [] and job.report(1, {}).pins.persist == 2
    written = job.folders(2)
    coordinator.environment.clear()
    coordinator.start()
    until(job.stored, what="the checkpoint")
    job.check(2)
    assert len(job.folders(2)) == len(written) + 2 == 4, "nobody writes into the folder of another attempt"
    until(lambda: not job.report(1, {}).pins.HasField("persist"), what="the pin's end")
    job.seal(3, 4)
    assert job.whole(1) == 4, "the pins' seq was recorded: node 1 hears of newer steps"
    assert job.persist().done
    job.check(2, 4)


def test_the_protected_step_is_persisted_and_turns_wait_for_a_free_slot(start, trainer, root):
    daemons = [start("--listen", "127.0.0.1:0", "--persist", str(root)) for _ in range(3)]
    job = ShardedJob(daemons, SIZES, trainer)
    job.manifest.lineage = LINEAGE
    job.begin()
    request = pb.PersistJobRequest(job="job")

    def persisted(node: int, step: int) -> bool:
        asked = pb.PersistJobRequest(job="job", step=step, epoch=job.epoch)
        return daemons[node].call("PersistJob", asked).done

    job.seal(1)
    job.await_protected(1)
    assert daemons[2].call("PersistJob", request).step == 1
    until(lambda: persisted(0, 1), what="step 1")
    stopped = persister_of(daemons[1])
    stopped.suspend()
    job.seal(2)
    job.await_protected(2)
    assert daemons[0].call("PersistJob", request).step == 2
    until(lambda: job.report(1, {}).pins.persist == 2, what="the pin")
    job.seal(3)
    job.await_protected(3)
    job.seal(4)
    until(lambda: job.whole(1) == 4, what="step 4")
    assert job.exchange(0).turn == -1, "steps 2, 3 and 4 stay, and one slot is to write"
    stopped.resume()
    job.await_protected(4)
    until(lambda: persisted(2, 2), what="step 2")
    listed = CheckpointStore(StorageFolder(root), "job").checkpoints(LINEAGE)
    assert sorted(each.manifest.version.step for each in listed) == [1, 2]


def test_full_storage_is_said_and_the_next_request_succeeds(start, trainer, small_root):
    job = two_nodes(start, trainer, small_root, chunks=64).begin()
    job.seal(1)
    reply = job.persist()
    assert not reply.done and "No space left on device" in reply.trouble
    assert re.search(r"this node's part takes up to \d.* are free in .*Make room", reply.trouble), reply.trouble
    assert "step 1 is not on storage" in job.status().trouble
    assert not job.report(0, {}).pins.HasField("persist") and job.stored() == []
    assert not job.folders(1), "failed attempts leave nothing that fills the storage"
    job.seal(2)
    subprocess.run(["mount", "-o", "remount,size=8m", small_root], check=True)
    assert job.persist().done and not job.status().trouble
    job.check(2)


@pytest.mark.parametrize("is_there", [False, True])
def test_what_others_wrote_of_a_failed_checkpoint_is_removed(start, trainer, root, is_there):
    """Such parts fill a storage that one node can't write; nothing else removed them for a day."""
    daemons = [start("--listen", "127.0.0.1:0", "--persist", str(each)) for each in (root, root / "elsewhere")]
    job = PersistedJob(daemons, trainer, root).begin()
    if is_there:
        job.seal(1)
        (root / "elsewhere").symlink_to(root)
        assert job.persist().done
        (root / "elsewhere").unlink()
    for step in (2, 3):
        job.seal(step)
        assert "node n1" in job.persist().trouble
        until(lambda step=step: not list(root.glob(f"*/*/e*-s{step}")), what="the end of the remains")
    job.check(*[1] * is_there)


def test_with_two_slots_a_step_that_is_overwritten_is_given_up(start, trainer, root):
    job = two_nodes(start, trainer, root, count=2).begin()
    job.seal(1)
    assert job.persist().done
    # Not the coordinator's, which may still remove old checkpoints.
    persister_of(job.daemons[1]).suspend()
    job.seal(2)
    asked = job.ask()
    until(lambda: job.status().step == 2)
    job.seal(3, 4, 5)
    persister_of(job.daemons[1]).resume()
    reply = until(lambda: (r := job.ask(0, asked)) and r.trouble and r, what="the end of the checkpoint")
    assert "2" in reply.trouble and job.stored() == [1]
    assert job.persist().done
    job.check(1, 5)


@pytest.mark.parametrize("memory_only", [False, True])
def test_a_purge_ends_the_lineage_unless_only_memory_is_freed(start, trainer, root, memory_only):
    job = two_nodes(start, trainer, root).begin()
    job.seal(1)
    assert job.persist().done
    trainer.kill()
    until(lambda: not any(rank.alive for rank in job.daemons[0].status("job").ranks))
    assert not job.store.lineage(LINEAGE).has_ended
    job.daemons[0].call("Purge", pb.PurgeRequest(job="job", memory_only=memory_only), 30)
    assert job.store.lineage(LINEAGE).has_ended is not memory_only


def test_a_purge_that_storage_stops_says_how_to_free_the_memory(start, trainer, root):
    job = two_nodes(start, trainer, root).begin()
    job.seal(1)
    assert job.persist().done
    trainer.kill()
    until(lambda: not any(rank.alive for rank in job.daemons[0].status("job").ranks))
    root.rename(root.with_name("away"))
    with refused(Code.FAILED_PRECONDITION, "so nothing was freed: a later start under this name would go on"):
        job.daemons[0].call("Purge", pb.PurgeRequest(job="job"), 30)
    assert job.daemons[0].status("job").ranks
    root.with_name("away").rename(root)
    job.daemons[0].call("Purge", pb.PurgeRequest(job="job"), 30)
    assert job.store.lineage(LINEAGE).has_ended


def test_a_flush_on_sigterm_persists_the_newest_whole_step(start, trainer, root):
    job = two_nodes(start, trainer, root, "--flush-on-exit").begin()
    job.seal(1, 2, 3)
    for daemon in reversed(job.daemons):
        daemon.process.send_signal(signal.SIGTERM)
    for daemon in job.daemons:
        assert daemon.process.wait(60) == 0
    job.check(3)


def test_a_stuck_storage_holds_up_the_exit_for_the_grace_only(start, trainer, root):
    job = two_nodes(start, trainer, root, "--flush-on-exit", "--grace", "300ms").begin()
    job.seal(1)
    assert job.persist().done
    child = persister_of(job.daemons[0])
    child.suspend()
    job.seal(2)
    job.daemons[0].process.send_signal(signal.SIGTERM)
    assert job.daemons[0].process.wait(60) == 0
    assert "did not take everything within the grace of 0.3 s" in job.daemons[0].log.read_text()
    assert job.stored() == [1]


def test_an_attach_ends_the_work_of_the_earlier_epoch(start, trainer, root):
    job = two_nodes(start, trainer, root).begin()
    job.seal(1)
    assert job.persist().done
    child = persister_of(job.daemons[1])
    child.suspend()
    job.seal(2)
    asked = job.ask()
    until(lambda: job.status().step == 2)
    job.close().begin(job.version(2))
    child.resume()
    with refused(Code.FAILED_PRECONDITION, "was started again meanwhile"):
        job.ask(0, asked)
    job.seal(3)
    assert job.persist().done
    job.check(1, 3)
    assert [each.epoch.counter for each in job.store.decisions(LINEAGE)] == [1, 2]


@pytest.mark.parametrize(
    ("facts", "text"),
    [({"named": False}, "has no name"), ({"lineage": ""}, "was attached while no daemon had --persist")],
)
def test_jobs_that_would_not_be_found_again_are_not_persisted(start, trainer, root, facts, text):
    job = two_nodes(start, trainer, root, "--persist-every", "50ms", "--flush-on-exit", **facts).begin()
    job.seal(1)
    with refused(Code.INVALID_ARGUMENT, text):
        job.ask(1)
    assert text in job.status().trouble and not list(root.iterdir())


def test_without_a_folder_on_all_nodes_nothing_is_complete(start, trainer, root):
    daemons = [start("--listen", "127.0.0.1:0", "--persist", str(root)), start("--listen", "127.0.0.1:0")]
    job = PersistedJob(daemons, trainer, root).begin()
    assert [daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).persists for daemon in daemons] == [
        True,
        False,
    ]
    job.seal(1)
    reply = job.persist(node=1)
    assert "node n1 does not write" in reply.trouble and "--persist" in reply.trouble and job.stored() == []


def test_a_task_that_waits_for_storage_is_quiet():
    state = JobState(Epoch(1, b"1" * 16), PersistCadence(0.0, 0.0))
    assert state.quiet_s(100.0) == 0.0, "nothing is under way"
    state.task, state.task_s = cast("asyncio.Task[None]", object()), 40.0
    assert state.quiet_s(100.0) == 60.0
    state.run = cast(PersistRun, SimpleNamespace(moved_s=90.0))
    assert state.quiet_s(100.0) == 10.0
