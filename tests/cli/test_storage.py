"""`reft-cli list` and `reft-cli verify`: what memory and storage hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reft.cli import ask, purge_all, storage
from reft.cli import main as cli
from reft.cli.main import main
from reft.cli.storage import start_audit
from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.persist.stored_names import MANIFEST, CheckpointName, decision_file
from reft.errors import ConfigError, FormatError
from reft.wire import messages
from reft.wire.slot_format import read_head
from reft.wire.stored_format import StoredManifest, encode_manifest
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.persister import STALL_S
from reft_daemon.persist.storage_folder import StorageFolder
from tests.support.daemons import DaemonProcess
from tests.support.stored import persist, record_of
from tests.support.trainers import Spec, Trainers


def invoke(*arguments: str, daemon: str = "") -> Any:
    return CliRunner().invoke(main, list(arguments), env={"REFT_DAEMON": daemon}, catch_exceptions=False)


def test_ctrl_c_does_not_reach_the_program_that_reads_storage(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group, and that program would show a traceback."""
    with start_audit("list", str(tmp_path), "") as process:
        assert os.getpgid(process.pid) == process.pid != os.getpgrp()
        process.kill()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, Path, list[int]]]:
    """A daemon with a job in memory; a folder with two checkpoints of it, and their steps."""
    storage = tmp_path_factory.mktemp("storage")
    daemon = DaemonProcess("--persist", str(storage))
    trainers = Trainers(Spec(daemon.address, options={"seal_at": [3, 6, 9], "pause_at": [3, 6, 9]}))
    steps = []
    for at in (3, 6):
        trainers.wait_for(at)
        steps.append(persist(storage, [daemon]).step)
        trainers.let_go(at)
    trainers.wait_for(9)
    trainers.kill()
    yield daemon, storage, steps
    daemon.close()


def test_list_of_a_job_has_memory_and_storage(held: tuple[DaemonProcess, Path, list[int]]) -> None:
    daemon, _, (older, newest) = held
    result = invoke("list", "job", "--json", daemon=daemon.address)
    ((job),) = json.loads(result.stdout)["jobs"]
    rows = [(row["where"], row["step"], row["counts"]) for row in job["held"]]
    assert rows[0][0] == "memory" and rows[0][1] > newest
    assert rows[-2:] == [("storage", newest, True), ("storage", older, True)]
    in_memory = [step for where, step, counts in rows if where == "memory" and counts]
    assert len(in_memory) == len(rows) - 2 > 1
    for step in in_memory:
        back = invoke("recover", "job", "--step", str(step), "--json", daemon=daemon.address)
        assert json.loads(back.stdout)["in_memory"], "recover --step names the list"
    lacking = invoke("recover", "job", "--step", "1", daemon=daemon.address).stderr
    assert f"Memory has the steps {', '.join(map(str, in_memory))}, storage" in lacking
    assert {row["lineage"] for row in job["held"]} == {record_of(daemon).manifest.lineage}
    lines = invoke("list", "job", daemon=daemon.address).stdout.splitlines()
    assert lines[0] == "job job" and f"step {newest} (epoch 1)" in lines[-2] and lines[-2].startswith("  storage")


def test_memory_that_the_job_left_behind_does_not_count(held: tuple[DaemonProcess, Path, list[int]]) -> None:
    """Other nodes went on from a checkpoint while this one was away."""
    daemon, folder, (older, newest) = held
    record = record_of(daemon)
    epoch, lineage = messages.decision_from(record.decision).epoch, record.manifest.lineage
    later = Decision(Epoch(9, bytes(16)), Version(epoch, older), (epoch,))
    CheckpointStore(StorageFolder(folder), "job").put_decision(lineage, later)
    try:
        rows = json.loads(invoke("list", "job", "--json", daemon=daemon.address).stdout)["jobs"][0]["held"]
    finally:
        (folder / "job" / lineage / decision_file(later.epoch)).unlink()
    assert [(row["where"], row["step"], row["counts"]) for row in rows[:2]] == [
        ("storage", older, True), ("storage", newest, False),
    ]  # fmt: skip
    assert rows[2]["where"] == "memory" and not rows[2]["counts"] and "left behind" in rows[2]["note"]


def test_list_of_a_job_shows_storage_while_memory_cannot_be_listed(
    held: tuple[DaemonProcess, Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, _, (_, newest) = held

    def survey(*_: object) -> None:
        raise FormatError("the record of job job is damaged.", "reft-cli purge job")

    monkeypatch.setattr(storage, "survey", survey)
    shown, other = invoke("list", "job", daemon=daemon.address), invoke("list", "nobody", daemon=daemon.address)
    assert shown.exit_code == 0 and f"step {newest} (epoch 1)" in shown.stdout, shown.output
    assert "not listed: the record of job job is damaged." in shown.stdout
    assert other.exit_code == 1 and "Fix: reft-cli purge job" in other.stderr


def test_list_of_a_job_shows_memory_while_storage_cannot_be_listed(held: tuple[DaemonProcess, Path, list[int]]) -> None:
    daemon, folder, _ = held
    folder.rename(f"{folder}.away")
    try:
        shown, other = invoke("list", "job", daemon=daemon.address), invoke("list", "nobody", daemon=daemon.address)
    finally:
        Path(f"{folder}.away").rename(folder)
    assert shown.exit_code == 0 and "  memory   step " in shown.stdout, shown.output
    assert f"not listed: storage {folder} can't be read" in shown.stdout
    assert other.exit_code != 0 and "can't be read" in other.stderr


def test_list_of_a_folder_needs_no_daemon(held: tuple[DaemonProcess, Path, list[int]]) -> None:
    _, storage, (older, newest) = held
    (job,) = json.loads(invoke("list", f"{storage}/", "--json").stdout)["jobs"]
    assert job["job"] == "job" and [row["step"] for row in job["held"]] == [newest, older]


def test_what_is_not_there(held: tuple[DaemonProcess, Path, list[int]], tmp_path: Path) -> None:
    daemon, storage, _ = held
    assert invoke("list", "nothing", daemon=daemon.address).exit_code == 11
    assert invoke("verify", str(storage), "nothing").exit_code == 11
    missing = invoke("list", f"{tmp_path}/missing")
    assert missing.exit_code == 1 and "No such file" in missing.stderr
    assert "holds no job" in invoke("list", f"{tmp_path}/").stdout


def test_verify_finds_a_changed_byte(held: tuple[DaemonProcess, Path, list[int]]) -> None:
    _, storage, (older, newest) = held
    sound = invoke("verify", str(storage))
    assert sound.exit_code == 0 and "2 checkpoints read, 0 damaged." in sound.stdout
    (path,) = storage.glob(f"job/*/e*-s{newest}/node-0.0/rank-0.slot")
    whole = path.read_bytes()
    with open(path, "r+b") as file:
        at = read_head(file.fileno())[1].geometry.data_offset + 5
        file.seek(at)
        file.write(bytes([whole[at] ^ 1]))
    try:
        found = invoke("verify", str(storage), "job", "--json")
        assert found.exit_code == 1
        results = {each["name"]: each for each in json.loads(found.stdout)["checkpoints"]}
        assert {name.partition("-s")[2]: each["sound"] for name, each in results.items()} == {
            str(older): True,
            str(newest): False,
        }
        assert "wrong digest" in next(each["damage"] for each in results.values() if not each["sound"])
    finally:
        path.write_bytes(whole)


def test_damaged_manifest_is_named(held: tuple[DaemonProcess, Path, list[int]], tmp_path: Path) -> None:
    _, storage, (older, newest) = held
    (path,) = storage.glob(f"job/*/e*-s{newest}/MANIFEST.json")
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    try:
        (job,) = json.loads(invoke("list", f"{storage}/", "--json").stdout)["jobs"]
        assert [(row["where"], row["step"]) for row in job["held"]] == [("storage", older), ("damaged", -1)]
        assert invoke("verify", str(storage)).exit_code == 1
        done = json.loads(invoke("export", f"{storage}/job", "--to", str(tmp_path / "out"), "--json").stdout)
        assert done["step"] == older and f"-s{newest} is damaged, not used" in " ".join(done["notes"])
    finally:
        path.write_bytes(whole)


def test_file_beside_the_jobs_is_no_damaged_job(tmp_path: Path) -> None:
    """A nightly verify must not raise an alarm for a README.txt."""
    (tmp_path / "README.txt").write_text("checkpoints of our team")
    assert "holds no job" in invoke("list", f"{tmp_path}/").stdout
    verified = invoke("verify", str(tmp_path))
    assert (verified.exit_code, verified.stdout) == (0, "0 checkpoints read, 0 damaged.\n")


def test_words_from_storage_forge_no_line(tmp_path: Path) -> None:
    """A file on storage may hold control characters. A terminal would obey them."""
    version, lineage = Version(Epoch(1, bytes(16)), 3), "0123456789abcdef"
    folder = tmp_path / "run" / lineage / str(CheckpointName.of(version))
    folder.mkdir(parents=True)
    manifest = StoredManifest(version, "x\x1b[2J\nall is sound", lineage, "00" * 16, b"", b"", ())
    (folder / MANIFEST).write_bytes(encode_manifest(manifest, None))
    for verb in ("list", "verify"):
        shown = invoke(verb, str(tmp_path)).stdout
        assert "it belongs to job x\\x1b[2J\\nall is sound" in shown and "\x1b" not in shown


def test_job_that_cannot_be_read_hides_no_other(held: tuple[DaemonProcess, Path, list[int]]) -> None:
    """For example another user's, on shared storage; here a link to itself."""
    _, storage, steps = held
    for name in ("locked", "odd"):
        (storage / name).mkdir()
    os.rmdir(storage / "locked")
    os.symlink("locked", storage / "locked")
    (storage / "odd" / ("0" * 16)).touch()
    try:
        listed = {job["job"]: job["held"] for job in json.loads(invoke("list", f"{storage}/", "--json").stdout)["jobs"]}
        assert len(listed["job"]) == len(steps) and listed.keys() == {"job", "locked", "odd"}
        assert all("can't be read" in listed[name][0]["note"] for name in ("locked", "odd"))
        done = invoke("verify", str(storage), "--json")
        results = json.loads(done.stdout)["checkpoints"]
        assert done.exit_code == 1 and sum(each["sound"] for each in results) == len(steps)
        assert invoke("verify", str(storage), "locked").exit_code == 1
        assert "Too many levels" in invoke("verify", str(storage), "locked").stderr
    finally:
        os.unlink(storage / "locked")
        shutil.rmtree(storage / "odd")


def test_program_that_is_killed_amid_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def killed(*_: object, **__: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", """printf '{"jobs": ['; kill -9 $$"""], stdout=subprocess.PIPE)

    monkeypatch.setattr(storage, "start_audit", killed)
    done = invoke("list", f"{tmp_path}/")
    assert done.exit_code == 1 and "has ended in the middle of an answer" in done.stderr


def test_purge_waits_as_long_as_the_daemon_waits_for_storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else it would say that no daemon answers, while the daemon marks the lineage."""
    waits, address = [], f"unix:{tmp_path}/daemon.sock"

    def asked(address: str, method: str, request: Any, deadline_s: float = ask.DEADLINE_S) -> Any:
        if method == "Purge":
            waits.append(deadline_s)
            raise ConfigError("storage takes nothing for 60 s.")
        return pb.StatusReply(node="n", jobs=[pb.JobStatus(job="job", whole=-1, backing="tmpfs")])

    monkeypatch.setattr(cli, "ask", asked)
    monkeypatch.setattr(purge_all, "ask", asked)
    assert "takes nothing for 60 s" in invoke("purge", "job", "--yes", daemon=address).stderr
    with pytest.raises(ConfigError):
        purge_all.PurgeAllCommand(address, tmp_path)._free("job")
    assert len(waits) == 2 and min(waits) > STALL_S
