"""Memory is gone: a job goes on from a checkpoint on storage, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from click.testing import CliRunner

from reft.cli.main import main
from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.wire import messages
from reft.wire.slot_format import read_head
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.storage_folder import StorageFolder
from tests.support.daemons import ROOT, DaemonProcess, Site, until, vanish
from tests.support.stored import persist, record_of
from tests.support.trainers import Spec, Trainers, run

STEPS = 12
SCRIPT = ROOT / "tests/support/torchrun_storage.py"
PATHS = (ROOT, ROOT / "daemon")


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


def trained(
    site: Site, storage: Path, world: int, *steps: int, daemons: Sequence[DaemonProcess] = (), **options: Any
) -> tuple[list[DaemonProcess], list[int]]:
    """Trains, and writes a checkpoint at about each of `steps`; then kills the job.

    Returns:
        The daemons, and the steps of the checkpoints.
    """
    daemons = list(daemons) or site.add(world, "--persist", str(storage))
    addresses = [daemon.address for daemon in daemons]
    options = {"seal_at": list(steps), "pause_at": list(steps), **options}
    job, written = Trainers(Spec(addresses[0], steps=STEPS, options=options), world, addresses), []
    for step in steps:
        job.wait_for(step)
        written.append(persist(storage, daemons).step)
        if step != steps[-1]:
            job.let_go(step)
    job.kill()
    return daemons, written


@functools.cache
def undisturbed(world: int, **options: Any) -> list[dict[str, Any]]:
    daemon = DaemonProcess()
    try:
        return run(Spec(daemon.address, steps=STEPS, options=options), world)
    finally:
        daemon.close()


def check_equal(results: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], began: int) -> None:
    assert [(each["began"], each["from"]) for each in results] == [(began, "storage")] * len(results)
    for one, other in zip(results, expected, strict=True):
        assert one["digests"] == other["digests"]
        assert one["losses"] == other["losses"][began:]
        assert one["random"] == other["random"]


@pytest.mark.parametrize("world", [1, 2])
def test_all_memory_is_gone_and_the_job_goes_on(site: Site, storage: Path, world: int) -> None:
    lost, (step,) = trained(site, storage, world, 5)
    vanish(*lost)
    daemons = site.add(world, "--persist", str(storage))
    results = run(Spec(daemons[0].address, steps=STEPS), world, [each.address for each in daemons])
    check_equal(results, undisturbed(world), step)
    said = results[0]["said"]
    assert f"GOES ON FROM STORAGE: step {step} (epoch 1)" in said and "holds the job" in said


def test_what_the_daemons_wrote_is_restored(site: Site, storage: Path) -> None:
    """Two times, the second time from the state that was restored first."""
    addresses: list[str] = []
    lost: list[DaemonProcess] = []
    steps = [0]
    for at in (4, 8):
        vanish(*lost)
        lost = site.add(2, "--persist", str(storage))
        addresses = [daemon.address for daemon in lost]
        job = Trainers(Spec(addresses[0], steps=STEPS, options={"seal_at": [at], "pause_at": [at]}), 2, addresses)
        job.wait_for(at)
        done = CliRunner().invoke(main, ["persist", "job", "--json", "--daemon", addresses[0]], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        steps.append(json.loads(done.stdout)["step"])
        job.kill()
    vanish(*lost)
    assert steps == sorted(set(steps))
    daemons = site.add(2, "--persist", str(storage))
    results = run(Spec(daemons[0].address, steps=STEPS), 2, [each.address for each in daemons])
    check_equal(results, undisturbed(2), steps[-1])
    decision = messages.decision_from(record_of(daemons[0]).decision)
    assert [epoch.counter for epoch in (decision.epoch, *decision.known)] == [3, 2, 1]


@pytest.mark.parametrize(("world", "later"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_gets_what_memory_would_give(site: Site, storage: Path, world: int, later: int) -> None:
    lost, (step,) = trained(site, storage, world, 5)
    daemons = (lost + site.add(1))[:later]
    memory = run(Spec(daemons[0].address, steps=STEPS), later, [each.address for each in daemons])
    assert [(each["began"], each["from"]) for each in memory] == [(step, "peers")] * later
    vanish(*lost)
    daemons = site.add(later, "--persist", str(storage))
    results = run(Spec(daemons[0].address, steps=STEPS), later, [each.address for each in daemons])
    assert [(each["began"], each["from"]) for each in results] == [(step, "storage")] * later
    assert [each["digests"] for each in results] == [each["digests"] for each in memory]
    assert [each["losses"] for each in results] == [each["losses"] for each in memory]


@pytest.mark.parametrize("later", [2, 1])
def test_state_that_exists_once_comes_back(site: Site, storage: Path, later: int) -> None:
    """Nodes exchange parity of it in memory; on storage it lies once."""
    lost, (step,) = trained(site, storage, 2, 5, own=True)
    vanish(*lost)
    daemons = site.add(later, "--persist", str(storage))
    addresses = [each.address for each in daemons] * (2 // later)
    check_equal(
        run(Spec(addresses[0], steps=STEPS, options={"own": True}), 2, addresses), undisturbed(2, own=True), step
    )


def test_survivor_keeps_its_token_when_too_many_nodes_are_lost(site: Site, storage: Path) -> None:
    lost, (step,) = trained(site, storage, 3, 5)
    vanish(*lost[1:])
    daemons = [lost[0], *site.add(2, "--persist", str(storage))]
    results = run(Spec(daemons[0].address, steps=STEPS), 3, [each.address for each in daemons])
    check_equal(results, undisturbed(3), step)
    assert "can't be decoded" in results[0]["said"] or "is left" in results[0]["said"], results[0]["said"]


def test_storage_with_a_newer_history_beats_memory(site: Site, storage: Path) -> None:
    """The first node was away while the job went on from storage on another node, now lost."""
    (away,), (step,) = trained(site, storage, 1, 4)
    (other,), (later,) = trained(site, storage, 1, step + 4, daemons=site.add(1, "--persist", str(storage)))
    vanish(other)
    (result,) = run(Spec(away.address, steps=STEPS))
    check_equal([result], undisturbed(1), later)
    assert f"memory: the newest step there is step {step} (epoch 1)" in result["said"]


def test_launch_goes_on_from_memory_while_storage_is_away(site: Site, storage: Path) -> None:
    (daemon,), _ = trained(site, storage, 1, 4)
    storage.rename(storage.with_name("hidden"))
    assert "can't be read" in refused(daemon), "another launch may have gone further"
    launch = record_of(daemon).manifest.launch
    (result,) = run(Spec(daemon.address, steps=STEPS, environment={"REFT_LAUNCH": launch}))
    assert result["from"] == "memory" and "this launch goes on from memory" in result["said"]


def test_next_attach_goes_on_from_memory(site: Site, storage: Path) -> None:
    lost, (step,) = trained(site, storage, 1, 5)
    vanish(*lost)
    (daemon,) = site.add(1, "--persist", str(storage))
    died = Trainers(Spec(daemon.address, steps=STEPS, options={"seal_at": [9], "pause_at": [9]}))
    died.wait_for(9)
    assert not any(each.stored for each in inventory(daemon).slots), "a whole step closes the checkpoint"
    died.kill()
    (result,) = run(Spec(daemon.address, steps=STEPS))
    assert result["from"] == "memory" and result["began"] > step
    assert result["digests"] == undisturbed(1)[0]["digests"]


def test_checkpoint_stays_open_until_a_step_is_whole(site: Site, storage: Path) -> None:
    lost, (step,) = trained(site, storage, 1, 5)
    vanish(*lost)
    (daemon,) = site.add(1, "--persist", str(storage))
    died = Trainers(
        Spec(daemon.address, steps=STEPS, failpoints="snapshot.begin:kill", options={"pause_at": [step + 1]})
    )
    assert died.wait() != [0]
    version = next(slot.version for slot in inventory(daemon).slots if slot.stored)
    fetched = daemon.call("FetchCapsule", pb.CapsuleRequest(job="job", rank=0, version=version))
    assert fetched.capsule_digest == xxhash.xxh3_64_intdigest(fetched.capsule)
    (result,) = run(Spec(daemon.address, steps=STEPS))
    assert (result["began"], result["from"]) == (step, "storage")


def test_damaged_checkpoint_is_left_out(site: Site, storage: Path) -> None:
    lost, (older, newest) = trained(site, storage, 1, 3, 6)
    vanish(*lost)
    (path,) = storage.glob(f"job/*/e*-s{newest}/node-0.0/rank-0.slot")
    with open(path, "r+b") as file:
        file.seek(read_head(file.fileno())[1].geometry.data_offset + 100)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    (daemon,) = site.add(1, "--persist", str(storage))
    (result,) = run(Spec(daemon.address, steps=STEPS))
    check_equal([result], undisturbed(1), older)
    assert f"step {newest} (epoch 1) of rank 0 is damaged" in result["said"]


def test_cut_file_is_left_out_before_anything_is_opened(site: Site, storage: Path) -> None:
    lost, (older, newest) = trained(site, storage, 1, 3, 6)
    vanish(*lost)
    (path,) = storage.glob(f"job/*/e*-s{newest}/node-0.0/rank-0.slot")
    os.truncate(path, path.stat().st_size - 1)
    (daemon,) = site.add(1, "--persist", str(storage))
    (result,) = run(Spec(daemon.address, steps=STEPS))
    check_equal([result], undisturbed(1), older)
    assert f"the checkpoint of step {newest} (epoch 1) is damaged" in result["said"]


def test_no_usable_checkpoint_is_no_fresh_start(site: Site, storage: Path) -> None:
    lost, (step,) = trained(site, storage, 1, 5)
    vanish(*lost)
    (path,) = storage.glob(f"job/*/e*-s{step}/node-0.0/rank-0.slot")
    path.unlink()
    (daemon,) = site.add(1, "--persist", str(storage))
    said = refused(daemon)
    assert "has 1 checkpoint in" in said and "none can be used" in said


def test_checkpoints_of_no_known_history_are_no_fresh_start(site: Site, storage: Path) -> None:
    """An attach in between died before its decision came to storage, so nobody knows its base."""
    lost, _ = trained(site, storage, 1, 4)
    old = record_of(lost[0])
    vanish(*lost)
    first, between = messages.decision_from(old.decision).epoch, Epoch(2, b"2" * 16)
    third = Decision(Epoch(3, b"3" * 16), Version(between, 7), (between, first))
    CheckpointStore(StorageFolder(storage), "job").put_decision(old.manifest.lineage, third)
    (daemon,) = site.add(1, "--persist", str(storage))
    assert "went on from a step that none of them leads to" in refused(daemon)


def test_purged_job_starts_fresh(site: Site, storage: Path) -> None:
    (daemon,), _ = trained(site, storage, 1, 4)
    until(lambda: not any(rank.alive for rank in daemon.status("job").ranks), what="the trainer's end")
    daemon.call("Purge", pb.PurgeRequest(job="job"))
    (result,) = run(Spec(daemon.address, steps=STEPS))
    assert (result["began"], result["from"]) == (0, None)
    assert sorted(path.name for path in storage.glob("job/*/ENDED")) == ["ENDED"]


def test_two_lineages_are_named_and_one_can_be_chosen(site: Site, storage: Path) -> None:
    lineages = []
    for _ in range(2):
        lost, (step,) = trained(site, storage, 1, 4)
        lineages.append((record_of(lost[0]).manifest.lineage, step))
        storage.rename(storage.with_name(f"hidden{len(lineages)}"))
        storage.mkdir()
        vanish(*lost)
    for number, (lineage, _) in enumerate(lineages, 1):
        (storage / "job").mkdir(exist_ok=True)
        (storage.with_name(f"hidden{number}") / "job" / lineage).rename(storage / "job" / lineage)
    (daemon,) = site.add(1, "--persist", str(storage))
    said = refused(daemon)
    assert "storage has 2 lineages of job job" in said and all(lineage in said for lineage, _ in lineages)
    chosen, step = lineages[1]
    (result,) = run(Spec(daemon.address, steps=STEPS, environment={"REFT_LINEAGE": chosen}))
    check_equal([result], undisturbed(1), step)
    assert record_of(daemon).manifest.lineage == chosen


def test_storage_that_is_gone_or_hangs_is_not_empty(site: Site, storage: Path) -> None:
    lost, _ = trained(site, storage, 1, 4)
    vanish(*lost)
    (daemon,) = site.add(1, "--persist", str(storage))
    hidden = storage.rename(storage.with_name("hidden"))
    said = refused(daemon)
    assert f"storage {storage} can't be read" in said and "RestoreError" in said
    hidden.rename(storage)
    assert run(Spec(daemon.address, steps=STEPS))[0]["from"] == "storage"


@pytest.mark.parametrize("has_memory", [False, True])
def test_newest_history_wins_over_the_greatest_step(site: Site, storage: Path, has_memory: bool) -> None:
    """Storage, or memory, has step 8 of a history that an attach ended by going back to step 4."""
    lost, (step, _) = trained(site, storage, 1, 4, 8)
    old = record_of(lost[0])
    if not has_memory:
        vanish(*lost)
    first = messages.decision_from(old.decision)
    second = Decision(Epoch(2, b"2" * 16), Version(first.epoch, step), (first.epoch,))
    CheckpointStore(StorageFolder(storage), "job").put_decision(old.manifest.lineage, second)
    (daemon,) = lost if has_memory else site.add(1, "--persist", str(storage))
    (result,) = run(Spec(daemon.address, steps=STEPS))
    check_equal([result], undisturbed(1), step)
    decision = messages.decision_from(record_of(daemon).decision)
    assert decision.epoch.counter == 3 and {first.epoch, second.epoch} <= set(decision.known)


def test_torchrun_again_goes_on_from_storage(site: Site, storage: Path) -> None:
    """Daemons, trainers and memory are gone; the same command ends as it would have."""

    def torchrun(daemon: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.support.agent", "--nproc-per-node=2"]  # with forked workers
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=run1"]
        environment = {**os.environ, "REFT_DAEMON": daemon.address, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
        return subprocess.run(
            [*command, str(SCRIPT), *arguments],
            capture_output=True, text=True, env=environment, timeout=250, check=False,
        )  # fmt: skip

    (daemon,) = site.add(1, "--persist", str(storage))
    assert torchrun(daemon, str(storage)).returncode != 0
    vanish(daemon)
    (daemon,) = site.add(1, "--persist", str(storage))
    again, (plain,) = torchrun(daemon), site.add(1)
    assert again.returncode == 0, again.stderr
    assert "job run1 GOES ON FROM STORAGE: step" in again.stderr
    result, expected = (json.loads(each.stdout.splitlines()[-1]) for each in (again, torchrun(plain)))
    assert result["from"] == "storage" and 4 <= result["began"] <= 6
    assert result["digest"] == expected["digest"] and expected["began"] == 0


def refused(daemon: DaemonProcess) -> str:
    """Returns the output of an attach that fails."""
    trainers = Trainers(Spec(daemon.address, steps=STEPS))
    assert trainers.wait() == [1]
    return trainers.errors()


def inventory(daemon: DaemonProcess) -> pb.InventoryReply:
    reply: pb.InventoryReply = daemon.call("Inventory", pb.InventoryRequest(job="job"))
    return reply
