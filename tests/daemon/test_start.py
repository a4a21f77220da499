"""Tests which conditions keep the daemon from starting, and how the daemon ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from reft.config import Config
from reft.errors import ConfigError, DaemonUnavailable
from reft.wire import daemon_launcher, messages
from reft.wire.process import oom_score
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import Arena
from reft_daemon.child.refusals import RefusalCounts
from reft_daemon.main import OOM_SCORE
from reft_daemon.persist.stored_reader import StoredReader
from reft_daemon.registry import PAUSE_S, Registry
from reft_daemon.server.callers import Caller, Door
from reft_daemon.server.judge import AdmittedCall
from reft_daemon.server.service import DaemonIdentity, DaemonService
from reft_daemon.server.settings import check_listen
from tests.support.certificates import Certificates, why_not
from tests.support.daemon_forks import daemon_fork
from tests.support.daemons import ROOT, DaemonProcess, until
from tests.support.jobs import Job, registry_of, slot_path
from tests.support.persisted import LINEAGE

IS_ROOT = os.getuid() == 0
IDLE_S = "2"  # on busy cores a test's first call may come a second after the daemon's start


@pytest.fixture
def executed(monkeypatch):
    """Starts the daemons of a test as users start them: `python -m reft_daemon`."""
    monkeypatch.setattr(DaemonProcess, "is_forked", False)


def run(*flags: object, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs a daemon that ends by itself; returns the exit code and the output."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        fork = daemon_fork([*map(str, flags)], {**os.environ, **(environment or {})}, Path(log.name))
        try:
            code = fork.wait(60)
        finally:
            fork.kill()
        text = log.read()
    assert "Traceback" not in text
    return code, text


@pytest.fixture
def registry(tmp_path) -> Registry:
    return registry_of(Arena(tmp_path / "arena", 0), ttl_s=0)


def flags(home: Path, arena: Path | None = None) -> list[object]:
    return ["--socket", home / "d.sock", "--dir", arena or home / "arena"]


def test_a_second_daemon_on_the_same_socket(daemon, tmp_path):
    code, text = run("--socket", daemon.socket, "--dir", tmp_path / "arena")
    assert code == 1 and f"pid {daemon.process.pid}" in text and "socket" in text
    assert daemon.answers()


def test_a_second_daemon_on_the_same_folder(daemon, tmp_path):
    code, text = run(*flags(tmp_path, daemon.folder))
    assert code == 1 and f"pid {daemon.process.pid}" in text and "arena" in text
    assert daemon.answers()


@pytest.mark.parametrize("name", ["", "a\nb", "n" * 256])
def test_a_node_without_a_name_for_people_is_refused(tmp_path, name):
    """No verb can name such a node; an unset variable in --node "$NODE" makes one."""
    code, text = run(*flags(tmp_path), "--node", name)
    assert code == 2 and "--node" in text and f"has {len(name)} characters; 1 to 255 printable" in text


@pytest.mark.parametrize("which", ["socket", "arena"])
@pytest.mark.parametrize("kind", ["open", "link", "file", "foreign"])
def test_a_folder_that_other_users_could_use_is_refused(tmp_path, which, kind):
    home, arena = tmp_path / "home", tmp_path / "arena"
    home.mkdir(mode=0o700)
    arena.mkdir(mode=0o700)
    bad = home if which == "socket" else arena
    if kind == "open":
        bad.chmod(0o777)
    elif kind == "foreign":
        if not IS_ROOT:
            pytest.skip("only root can give a folder away")
        os.chown(bad, 12345, 12345)
    else:
        bad.rmdir()
        if kind == "link":
            bad.symlink_to(tmp_path, target_is_directory=True)
        else:
            bad.write_text("")
    code, text = run(*flags(home, arena))
    assert code != 0 and str(bad) in text
    expected = {
        "open": f"others may write {bad} (mode 777)",
        "link": "not a folder",
        "foreign": "belongs to uid 12345",
        "file": "is not a folder",
    }
    assert expected[kind] in text
    assert not (home / "d.sock").exists() and not (arena / "node-id").exists()


@pytest.mark.parametrize(
    ("in_the_way", "words"),
    [("home/d.sock.lock", "--socket"), ("arena/lock", "--dir"), ("home", "--socket"), ("arena", "--dir")],
)
def test_a_file_system_that_takes_no_file_is_named_with_a_remedy(tmp_path, in_the_way, words):
    """As a full or read-only one: a folder lies in the way of a file, or a file above a folder."""
    for name in ("home", "arena"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "arena/node-id").write_text("0" * 16)
    if "/" in in_the_way:
        (tmp_path / in_the_way).mkdir()
        code, text = run(*flags(tmp_path / "home", tmp_path / "arena"))
    else:
        (tmp_path / "file").touch()
        places = {"home": tmp_path / "home", "arena": tmp_path / "arena"} | {in_the_way: tmp_path / "file" / "below"}
        code, text = run(*flags(places["home"], places["arena"]))
    assert code == 1 and words in text and "can't be made in" in text


@pytest.mark.parametrize("theirs", ["model.pt", "data/part-0", ".hidden"])
def test_a_folder_with_foreign_files_is_refused_and_unchanged(tmp_path, theirs):
    path = tmp_path / "arena" / theirs
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_text("precious")
    path.parent.parent.chmod(0o700)
    code, text = run(*flags(tmp_path), "--idle-exit", "0.1")
    assert code == 2 and f"such as {Path(theirs).parts[0]};" in text
    assert path.read_text() == "precious" and os.listdir(tmp_path / "arena") == [Path(theirs).parts[0]]


def test_foreign_files_in_the_folder_survive_the_daemons_exit(daemon):
    theirs = daemon.folder / "model.pt"
    theirs.write_text("precious")
    daemon.kill(signal.SIGTERM)
    assert os.listdir(daemon.folder) == ["model.pt"] and theirs.read_text() == "precious"


def test_a_daemon_starts_on_job_folders_that_a_clean_up_emptied(start, trainer):
    """`find /dev/shm -type f -delete` removes the files, and leaves the folders of jobs."""
    process = start()
    Job([(process, [0])]).decide()
    process.kill()
    for path in process.folder.rglob("*"):
        if path.is_file():
            path.unlink()
    process.start()
    assert process.answers()


@pytest.mark.parametrize("suffix", ["", ".ln"])
def test_a_file_at_the_socket_path_is_kept(tmp_path, suffix):
    path = tmp_path / f"notes{suffix}"
    path.write_text("precious")
    code, text = run("--socket", tmp_path / "notes", "--dir", tmp_path / "arena", "--idle-exit", "0.1")
    assert code == 2 and f"{path} exists, and is not a socket" in text and path.read_text() == "precious"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:50000", "node7:50000", "*:1", ":50000"])
def test_plain_text_beyond_loopback_is_refused(tmp_path, address):
    code, text = run(*flags(tmp_path), "--listen", address)
    assert code == 2 and "--tls-cert" in text and not list(tmp_path.iterdir())


def test_the_default_socket_is_where_trainers_connect(tmp_path):
    """Daemon and trainers use REFT_RUNTIME_DIR. Otherwise attach would start a second daemon."""
    place = {"REFT_RUNTIME_DIR": str(tmp_path / "run")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    process = subprocess.Popen(
        [sys.executable, "-m", "reft_daemon"], env={**os.environ, "PYTHONPATH": path, **place}, stderr=subprocess.PIPE
    )
    try:
        until(lambda: (tmp_path / "run/daemon.sock").exists(), what="the socket")
        address, answer = daemon_launcher.find(Config.load(place))
        assert answer.pid == process.pid and address == f"unix:{tmp_path}/run/daemon.sock"
    finally:
        process.terminate()
        process.communicate()


def test_attach_waits_for_a_silent_daemon_until_its_deadline(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "d.sock"))
        silent.listen()
        began = time.monotonic()
        place = {"REFT_DAEMON": f"unix:{tmp_path}/d.sock", "REFT_ATTACH_DEADLINE_S": "0.3"}
        with pytest.raises(DaemonUnavailable, match="in time"):
            daemon_launcher.find(Config.load(place))
        assert time.monotonic() - began < daemon_launcher.START_DEADLINE_S / 2


def test_insecure_is_logged_as_a_warning_at_each_start(start):
    process = start("--listen", "127.0.0.1:0", "--insecure")
    assert "--insecure: the state travels in plain text" in process.log.read_text()


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "*:7070", ":7070"])
def test_an_address_that_other_nodes_could_not_call_is_refused(tmp_path, address):
    code, text = run(*flags(tmp_path), "--listen", address, "--insecure")
    assert code == 2 and "names no address" in text and "e.g. --listen localhost" not in text.replace("\n", "")


def test_a_name_that_is_loopback_on_this_machine_is_refused(monkeypatch):
    """Debian's installer writes such an /etc/hosts: other nodes could not call the daemon."""
    genuine = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more: genuine("127.0.1.1", *more))
    settings = SimpleNamespace(listen="node7:7070", host="node7", tls=None, insecure=True)
    with pytest.raises(ConfigError, match=r"(?s)node7 is loopback on this machine.*as a number"):
        check_listen(settings)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_loopback_is_allowed(start, address):
    try:
        process = start("--listen", address)
    except RuntimeError as error:
        if "::1" in address and "can't listen" in str(error):
            pytest.skip("no IPv6 here")
        raise
    assert process.answers()


def test_a_port_in_use_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = run(*flags(tmp_path), "--listen", f"127.0.0.1:{port}")
    assert code == 2 and "Address already in use. Fix: " in text


@pytest.mark.parametrize(
    ("host", "says"),
    [("192.0.2.7", "Cannot assign requested address. Fix: "), ("no-such-host.invalid", "no-such-host.invalid:7070: ")],
)
def test_the_system_error_of_a_failed_listen_is_shown(tmp_path, host, says):
    code, text = run(*flags(tmp_path), "--listen", f"{host}:7070", "--insecure")
    assert code == 2 and says in text and "set GRPC_VERBOSITY" not in text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--memory", "plenty"], "is not a size"),
        (["--tls-cert", "cert.pem"], "give all three"),
        (
            ["--tls-cert", "/none/c", "--tls-key", "/none/k", "--tls-ca", "/none/a", "--listen", "127.0.0.1:0"],
            "--tls-cert",
        ),
        (["--listen", "127.0.0.1"], "is not HOST:PORT"),
        (["--listen", "7070"], "--listen 7070 is not HOST:PORT"),
        (["--listen", "127.0.0.1:²"], "is not HOST:PORT"),
        (["--bulk", "127.0.0.1:²"], "--bulk 127.0.0.1:² is neither"),
        (["--listen", "::1:0"], "[fd00::7]:29700"),
        (["--listen", "fd00::7:29700", "--insecure"], "[fd00::7]:29700"),
        (["--listen", "unix:/d.sock", "--insecure"], "is not HOST:PORT"),
        (["--token", "secret"], "No such option"),
        (["--ttl", "-5"], "--ttl -5 is not allowed"),
        (["--ttl-failed", "nan"], "--ttl-failed nan is not allowed"),
        (["--idle-exit", "-0.1"], "--idle-exit -0.1 is not allowed"),
        (
            ["--ttl-failed", "inf"],
            "--ttl-failed inf is not allowed: give a number of seconds, 0 to 316224000 (ten years)",
        ),
        (["--memory", "99999999999T"], "is too large; the limit is 1048576T"),
    ],
)
def test_invalid_flags_are_refused(tmp_path, more, says):
    code, text = run(*flags(tmp_path), *more)
    assert code == 2 and says in text


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("kind", "node", "listens", "says"),
    [
        ("nodes", "n1", True, "address=127.0.0.1:"),
        (
            "nodes",
            "n2",
            True,
            "daemon of user alice on node n1; --listen needs the certificate of the daemon on node n2",
        ),
        (
            "agents",
            "n1",
            True,
            "agent of user alice on node n1; --listen needs the certificate of the daemon on node n1",
        ),
        ("agents", "n1", False, "does not listen, and uses no certificates"),
    ],
)
def test_a_daemon_serves_with_its_own_certificate_only(start, tmp_path, kind, node, listens, says):
    certificates = Certificates(tmp_path / "certificates")
    tls = zip(("--tls-cert", "--tls-key", "--tls-ca"), certificates.files("ours", kind, "n1"), strict=True)
    more = ["--node", node, *(part for pair in tls for part in pair), *(["--listen", "127.0.0.1:0"] if listens else [])]
    if listens and says.startswith(("daemon", "agent")):
        code, text = run(*flags(tmp_path), *more)
        assert code == 2 and says in text and "certificates.sh" in text
    else:
        process = start(*map(str, more))
        until(lambda: says in process.log.read_text(), what="the line")  # it may answer before


def test_a_socket_path_that_is_too_long(tmp_path):
    long = tmp_path / ("x" * 100)
    code, text = run("--socket", long / "d.sock", "--dir", tmp_path / "arena")
    assert code == 2 and "the kernel allows 107" in text


def test_a_bad_variable(tmp_path):
    code, text = run(*flags(tmp_path), environment={"REFT_FAILPOINTS": "a:explode"})
    assert code == 2 and "failpoint" in text


def test_only_its_owner_can_open_the_sockets_and_the_slots(daemon, trainer):
    names = Job([(daemon, [0])]).decide().lease(0, trainer)
    for path in (daemon.socket, Path(f"{daemon.socket}.ln"), *(slot_path(daemon, name) for name in names)):
        assert path.stat().st_mode & 0o077 == 0
    assert (daemon.folder / "job").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("executed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_keeps_slots_and_removes_sockets(daemon, trainer, number):
    names = Job([(daemon, [0])]).decide().lease(0, trainer)
    daemon.process.send_signal(signal.SIGHUP)  # without TLS, SIGHUP has no effect
    daemon.process.send_signal(number)
    assert daemon.process.wait(60) == 0
    assert all(slot_path(daemon, name).exists() for name in names)
    assert not daemon.socket.exists() and not Path(f"{daemon.socket}.ln").exists()
    assert "Traceback" not in daemon.log.read_text()


def test_purge_frees_slots_at_the_end(start, trainer):
    process = start("--purge")
    Job([(process, [0])]).decide().lease(0, trainer)
    process.kill(signal.SIGTERM)
    assert not (process.folder / "job").exists()


def test_an_idle_daemon_exits(tmp_path):
    code, text = run(*flags(tmp_path), "--idle-exit", "0.3")
    assert code == 0 and "this daemon exits" in text


def test_a_daemon_with_a_job_does_not_exit(start, trainer):
    process = start("--idle-exit", IDLE_S, "--ttl-failed", IDLE_S)
    job = Job([(process, [0])]).decide()
    job.lease(0, trainer)
    with pytest.raises(subprocess.TimeoutExpired):
        process.process.wait(float(IDLE_S) + 1)
    trainer.kill()
    assert process.process.wait(60) == 0
    assert not (process.folder / "job").exists()


def test_a_daemon_stays_while_an_agent_of_its_node_waits(start, trainer):
    process = start("--idle-exit", IDLE_S)
    process.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL, agent_pid=trainer.pid))
    with pytest.raises(subprocess.TimeoutExpired):
        process.process.wait(float(IDLE_S) + 1)
    trainer.kill()
    assert process.process.wait(60) == 0


@pytest.mark.parametrize(("door", "stays"), [(Door.LOCAL, True), (Door.REMOTE, False)])
def test_a_hello_restarts_the_idle_time(registry, door, stays):
    """Between Hello and the decision no job exists yet that would keep the daemon running."""
    identity = DaemonIdentity("n", "", (), "", 0, False, True)
    registry.idle_since_s = float("-inf")
    hello = pb.HelloRequest(protocol=messages.PROTOCOL, job="job")
    asyncio.run(
        DaemonService(registry, identity, RefusalCounts().status).Hello(hello, AdmittedCall(Caller(door), None))
    )
    assert (registry.idle_since_s > 0) is stays


@pytest.mark.parametrize("method", ["Stored", "OpenStored"])
def test_a_question_about_storage_restarts_the_idle_time(registry, method):
    """The next one may come a while later, and until the decision no job keeps the daemon."""
    service = DaemonService(registry, DaemonIdentity("n", "", (), "", 0, False, True), RefusalCounts().status)
    registry.idle_since_s = float("-inf")
    request = {
        "Stored": pb.StoredRequest(job="job"),
        "OpenStored": pb.OpenStoredRequest(job="job", lineage=LINEAGE, name="e1-00010203-s40"),
    }[method]
    with contextlib.suppress(ConfigError):  # this daemon has no storage
        asyncio.run(getattr(service, method)(request, AdmittedCall(Caller(Door.LOCAL), None)))
    assert registry.idle_since_s > 0


def test_a_daemon_stays_while_files_are_opened_for_an_attach(registry, monkeypatch):
    """Objects may be fetched for longer than the idle time."""
    asked, answered = asyncio.Event(), asyncio.Event()

    class SlowPersister:
        root = "/storage"

        async def ask(self, *_: object, **__: object) -> dict[str, object]:
            asked.set()
            await answered.wait()
            return {"error": "it is damaged", "damaged": True}

    async def pause(seconds: float) -> None:
        raise asyncio.CancelledError

    async def exits() -> bool:
        registry.idle_since_s = float("-inf")
        with monkeypatch.context() as paused:
            paused.setattr(asyncio, "sleep", pause)
            try:
                await registry.expire_for_ever(1.0)
            except asyncio.CancelledError:
                return False
        return True

    async def run() -> None:
        registry.persists.reader = StoredReader(SlowPersister())
        request = pb.OpenStoredRequest(job="job", lineage=LINEAGE, name="e1-00010203-s40", ranks=[0])
        opening = asyncio.ensure_future(registry.open_stored(request))
        await asked.wait()
        assert not await exits(), "files are being opened"
        answered.set()
        assert (await opening).damage and await exits()
        request.ClearField("ranks")
        assert not (await registry.open_stored(request)).damage and not await exits(), "files wait for the decision"
        registry.persists.reader.close_pending("job")
        assert await exits()

    asyncio.run(run())


def test_a_time_to_live_of_zero_makes_no_busy_loop(registry, monkeypatch):
    paused = []

    async def pause(seconds: float) -> None:
        paused.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pause)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(registry.expire_for_ever(0))
    assert paused == [PAUSE_S] and PAUSE_S >= 0.01


def test_a_lack_of_descriptors_does_not_end_the_daemon(tmp_path):
    """Without a free descriptor no caller is served; once descriptors are free, all callers are."""
    process = DaemonProcess()
    try:
        pid = process.process.pid
        # The number of open descriptors depends on the machine. The daemon may open a few more, but
        # fewer than the callers take.
        room = psutil.Process(pid).num_fds() + 4
        subprocess.run(["prlimit", f"--pid={pid}", f"--nofile={room}"], check=True)
        idle = []
        for path in [f"{process.socket}.ln"] * 8 + [str(process.socket)] * 20:
            idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            idle[-1].settimeout(1)
            try:
                idle[-1].connect(path)
            except OSError:
                break
        until(lambda: "can't accept" in process.log.read_text(), what="the lack of descriptors")
        for connection in idle:
            connection.close()
        until(process.answers, what="the daemon's recovery")
        assert process.process.pid == pid and process.process.poll() is None
    finally:
        process.close()


def test_a_restart_takes_another_port_if_the_earlier_one_is_in_use(start):
    """With port 0 the daemon takes another port if its earlier port is in use."""
    process = start("--listen", "127.0.0.1:0")
    job = Job([(process, [0])]).decide()
    first = job.hellos[0].addresses[0]
    process.kill()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(first.rpartition(":")[2])))
        taken.listen()
        process.start()
        second = process.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).addresses[0]
    assert second != first


@pytest.mark.usefixtures("executed")
def test_the_daemon_is_ended_last_when_memory_is_short(start):
    """If the kernel lets it: a lower score needs CAP_SYS_RESOURCE."""
    program = f"import sys; from reft.wire.process import set_oom_score; sys.exit(not set_oom_score({OOM_SCORE}))"
    may_lower = subprocess.run([sys.executable, "-c", program]).returncode == 0
    daemon = start()
    score = int(Path(f"/proc/{daemon.process.pid}/oom_score_adj").read_text())
    assert score == (OOM_SCORE if may_lower else oom_score())
    assert may_lower or "oom_score_adj stays" in daemon.log.read_text()


class NestedDaemon(DaemonProcess):
    """A daemon, started as a command, whose socket lies below folders that are missing."""

    is_forked = False

    def start(self) -> None:
        self.socket = self.home / "a" / "b" / "d.sock"
        super().start()


def test_whatever_the_umask_is_others_write_nothing_that_a_daemon_makes(tmp_path):
    earlier = os.umask(0)
    try:
        daemon = NestedDaemon("--log", str(tmp_path / "log"), folder=tmp_path / "c" / "slots")
    finally:
        os.umask(earlier)
    try:
        Job([(daemon, [0])]).decide().lease(0)
        made = [path for folder in (daemon.home / "a", tmp_path) for path in (folder, *folder.rglob("*"))]
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in made if path != tmp_path}
    finally:
        daemon.close()
    assert modes.pop("log") & 0o022 == 0
    assert {mode for name, mode in modes.items() if mode & 0o077} == set()
    assert {"a", "b", "d.sock", "d.sock.ln", "c", "slots", "job", "record.0", "rank-0.slot-0"} <= set(modes)
