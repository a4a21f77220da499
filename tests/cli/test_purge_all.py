"""After `reft-cli purge --all` nothing of a daemon is left, with and without a running daemon."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from reft.cli.main import main
from reft.cli.purge_all import PurgeAllCommand, PurgeResult, processes_with
from reft.config import Config, slots_folder
from reft.errors import AttachError, ConfigError, DaemonUnavailable
from reft.wire import daemon_launcher, messages
from reft.wire.process import stat_of
from reft.wire.v1 import daemon_pb2 as pb
from tests.cli.test_main import make_job
from tests.support.daemons import until
from tests.support.trainers import Spec, Trainers


@pytest.fixture
def place(tmp_path) -> Iterator[Path]:
    """A runtime folder of its own, with the slots that belong to it."""
    folder = tmp_path / "run"
    yield folder
    shutil.rmtree(slots_of(folder), ignore_errors=True)


def slots_of(place: Path) -> Path:
    return slots_folder(place / "daemon.sock")


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Keeps 1,024 descriptors open, so that new ones are too high for select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    try:
        with contextlib.ExitStack() as files:
            for _ in range(1024):
                files.enter_context(open(os.devnull))
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def leave_behind(place: Path) -> Path:
    """Makes what a killed daemon leaves behind; returns a slot."""
    slots = slots_of(place)
    for path in (*(place / name for name in ("daemon.sock.lock", "daemon.log", "start.lock", "store-29400.log")),
                 slots / "lock", slots / "node-id", slots / "job/record.0", slots / "job/rank-0.slot-0"):  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(4096))
    return slots / "job/rank-0.slot-0"


def purge_all(place: Path) -> PurgeResult:
    return PurgeAllCommand(f"unix:{place}/daemon.sock", place).run()


def typed(place: Path, *arguments: str, daemon: str = "") -> Result:
    environment = {"REFT_RUNTIME_DIR": str(place), "REFT_DAEMON": daemon}
    return CliRunner().invoke(main, ["purge", *arguments], env=environment, catch_exceptions=False)


def test_what_a_killed_daemon_left_is_removed(place):
    leave_behind(place)
    result = purge_all(place)
    assert result.removed == (str(slots_of(place)), str(place))
    assert not place.exists() and not slots_of(place).exists()
    assert (result.daemon, result.has_ended, result.freed) == (0, False, {})
    assert purge_all(place).removed == ()


def test_names_that_others_took_in_shared_memory_stop_nothing(place):
    """In /dev/shm anybody may make them; another user's folder can't even be entered."""
    slot = leave_behind(place)
    foreign = slot.parents[1].with_name(f"reft-{os.getuid()}-{place.parent.name[-8:]}")
    foreign.write_bytes(b"no folder")
    try:
        result = purge_all(place)
        assert not slot.exists() and str(foreign) not in result.left
    finally:
        foreign.unlink()


def test_files_of_others_stay_and_are_named(place):
    leave_behind(place)
    (place / "notes.txt").touch()
    result = purge_all(place)
    assert result.left[str(place)] == "notes.txt there is not reft's"
    assert os.listdir(place) == ["notes.txt"] and str(place / "daemon.log") in result.removed


def test_files_that_the_disk_keeps_are_named_and_all_others_removed(place):
    """As on a read-only disk: unlink can't remove a folder."""
    slot = leave_behind(place)
    (place / "daemon.log").unlink()
    (place / "daemon.log").mkdir()
    result = purge_all(place)
    assert "can't be removed" in result.left[str(place / "daemon.log")]
    assert os.listdir(place) == ["daemon.log"] and not slot.exists() and str(slots_of(place)) in result.removed


def test_slots_of_another_socket_are_named_not_removed(place):
    other = slots_of(place / "other")
    leave_behind(place / "other")
    try:
        assert purge_all(place).left[str(other)].endswith(f"rm -r {other}")
        with open(other / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert "another daemon of yours uses this folder" in purge_all(place).left[str(other)]
        assert other.exists()
    finally:
        shutil.rmtree(other)


def test_slots_that_a_process_has_mapped_are_refused(place):
    slot = leave_behind(place)
    with open(slot, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert os.getpid() in processes_with(slot.parents[1])
        with pytest.raises(AttachError, match=rf"1 process \(pid {os.getpid()}\) still uses slots"):
            purge_all(place)
    assert slot.exists() and (place / "daemon.log").exists(), "nothing was changed"
    assert processes_with(slot.parents[1]) == []


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("daemon.sock.lock", DaemonUnavailable, "no daemon answers"),
        ("start.lock", AttachError, "attach starts a daemon"),
    ],
)
def test_a_daemon_that_does_not_answer_or_starts_now_is_left_alone(place, name, error, words):
    slot = leave_behind(place)
    with open(place / name) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(error, match=words):
            purge_all(place)
    assert slot.exists() and (place / "daemon.log").exists()


def test_a_daemon_over_tcp_is_refused(place):
    with pytest.raises(ConfigError, match="can't reach the files"):
        PurgeAllCommand("node1:29700", place)


def test_a_daemon_that_attach_started_is_ended_and_leaves_nothing(place):
    address, hello = daemon_launcher.find(Config(runtime_dir=str(place)))
    trainers = Trainers(Spec(address, job="run1", options={"seal_at": [4], "pause_at": [4]}))
    try:
        trainers.wait_for(4)
        refused = typed(place, "--all", "--yes")
        assert refused.exit_code == 1 and "job run1 trains on" in refused.stderr
    finally:
        trainers.kill()
    assert slots_of(place).exists()
    until(lambda: typed(place, "--all").exit_code == 2, what="the daemon's news that its trainer has ended")
    with many_descriptors():
        done = typed(place, "--all", "--yes", "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["schema_version"], document["daemon_ended"]) == (0, 1, True)
    (job,) = document["jobs"]
    assert job["job"] == "run1" and job["freed_bytes"] > 0
    assert document["removed"] == [str(slots_of(place)), str(place)]
    assert not place.exists() and not slots_of(place).exists()
    process = stat_of(hello.pid)
    assert process is None or process.state == "Z", "only its parent, this test, has not taken note of the end"
    assert typed(place, "--all", "--yes").exit_code == 0, "also where nothing is"


def test_a_daemon_of_a_person_goes_on_without_jobs(daemon, place):
    make_job(daemon, "empty")
    document = json.loads(typed(place, "--all", "--yes", "--json", daemon=daemon.address).stdout)
    assert [job["job"] for job in document["jobs"]] == ["empty"]
    assert (document["daemon_ended"], document["removed"]) == (False, [])
    (reason,) = (each["reason"] for each in document["left"] if each["path"] == str(daemon.socket))
    assert reason.startswith("attach did not start this daemon") and reason.endswith(f"kill {document['daemon_pid']}")
    assert not daemon.call("Status", pb.StatusRequest()).jobs


def test_a_daemon_of_another_protocol_is_refused_before_a_job_is_freed(daemon, place, monkeypatch):
    make_job(daemon, "kept")

    def hello(*_: object) -> None:
        raise AttachError("the daemon speaks protocol 999.")

    monkeypatch.setattr(daemon_launcher, "hello", hello)
    with pytest.raises(AttachError, match="999"):
        PurgeAllCommand(daemon.address, place).run()
    assert daemon.status("kept").job == "kept"


def test_a_launch_that_may_start_its_job_again_is_refused(daemon, place):
    daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL, agent_pid=os.getpid()))
    refused = typed(place, "--all", "--yes", daemon=daemon.address)
    assert refused.exit_code == 1 and f"torchrun (pid {os.getpid()}) runs here" in refused.stderr


@pytest.mark.parametrize("arguments", [[], ["run1", "--all"]])
def test_purge_takes_a_job_or_all(place, arguments):
    assert typed(place, *arguments).exit_code == 2


def test_the_lines_of_a_result():
    result = PurgeResult("node1", {"run1": 6 << 20}, 7, True, ("/tmp/reft-0",), {}, ("node2",))
    assert result.lines() == [
        "job run1: freed 6.0 MiB.",
        "The daemon, pid 7, has ended.",
        "Removed /tmp/reft-0",
        "Nothing of reft is left on this node.",
        "Other nodes may hold these jobs: run this command on node2 too.",
    ]
    assert PurgeResult("", {}, 0, False, (), {}, ()).lines() == ["Nothing of reft is on this node."]
    assert PurgeResult("", {}, 0, False, (), {"/x": "why"}, ()).lines() == ["Left    /x: why"]
