"""Runs the verbs against a real daemon: their output and their exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from reft.cli.main import _watch, main
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import HEEDFUL, ROOT, DaemonProcess, until
from tests.support.trainers import Spec, run


def invoke(*arguments: str, daemon: str = ""):
    return CliRunner().invoke(main, list(arguments), env={"REFT_DAEMON": daemon}, catch_exceptions=False)


def brief_status(daemon: DaemonProcess) -> list[str]:
    return invoke("status", daemon=daemon.address).stdout.splitlines()


def make_job(daemon: DaemonProcess, name: str, script: str = "") -> None:
    """Makes a job that attached and did nothing: no trainer, no whole step."""
    node = pb.Node(name="test", id="0", addresses=[daemon.address], ranks=[0])
    manifest = pb.Manifest(job=name, named=True, token=bytes(32), world=1, nodes=[node], every=1, script=script)
    decision = pb.Decision(epoch=pb.Epoch(counter=1, ident=bytes(16)))
    daemon.call("Decide", pb.DecideRequest(manifest=manifest, decision=decision))


def test_no_daemon(tmp_path):
    result = invoke("status", "--daemon", f"unix:{tmp_path}/none.sock")
    assert (result.exit_code, result.stdout) == (10, "")
    address = f"unix:{tmp_path}/none.sock"
    assert f"no daemon answers at {address}: No such file" in result.stderr
    assert "No such file or directory.\nFix: start reft-daemon" in result.stderr


def test_no_daemon_as_json(tmp_path):
    result = invoke("status", "--json", "--daemon", f"unix:{tmp_path}/none.sock")
    assert result.stdout == ""
    error = json.loads(result.stderr)
    assert error["schema_version"] == 1 and error["error"]["exit_code"] == result.exit_code == 10
    assert error["error"]["hint"]


@pytest.mark.parametrize(
    "arguments",
    [["--watch", "--json"], ["--watch", "--check"], ["--watch", "--what-if", ""], ["--check", "--what-if", "lose=a"],
     ["--daemon", "nonsense"], ["a", "--job", "b"]],
)  # fmt: skip
def test_wrong_usage(arguments):
    assert invoke("status", *arguments).exit_code == 2


@pytest.mark.parametrize(
    "arguments", [["timeline"], ["recover"], ["recover", "--step", "3"], ["persist"], ["list"], ["export", "--to", "x"]]
)
def test_an_empty_name_of_a_job_is_wrong_usage(arguments, daemon):
    for as_json in ([], ["--json"]):
        result = invoke(*arguments, "", *as_json, daemon=daemon.address)
        assert (result.exit_code, result.stdout) == (2, "") and "it is empty; reft-cli status" in result.stderr


def test_a_file_of_an_export_without_bytes_is_wrong_usage(tmp_path):
    result = invoke("export", "job", "--to", str(tmp_path / "out"), "--max-shard", "0", daemon=f"unix:{tmp_path}/none")
    assert result.exit_code == 2 and "--max-shard is 0; a file holds at least one byte" in result.stderr


def test_an_empty_what_if_is_wrong_usage(daemon):
    make_job(daemon, "empty")
    result = invoke("status", "--what-if", "", daemon=daemon.address)
    assert result.exit_code == 2 and "can't be read" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["status", "--jsn"], ["status", "run1", "extra"], ["timeline", "j", "--rank", "x"], ["demo", "--steps", "1"], ["none"]],
)  # fmt: skip
def test_usage_errors_are_json_with_json(arguments):
    assert "Usage: " in invoke(*arguments).stderr
    result = invoke(*arguments, "--json")
    error = json.loads(result.stderr)["error"]
    assert (result.stdout, result.exit_code, error["exit_code"]) == ("", 2, 2)
    assert error["message"] and error["hint"].endswith("--help")


@pytest.mark.parametrize("verb", ["status", "recover", "purge", "timeline"])
def test_no_verb_offers_a_daemon_over_tcp(verb):
    daemon = invoke(verb, "--help").stdout.partition("--daemon")[2].partition("--help")[0]
    assert "unix:PATH" in daemon and ":port" not in daemon.lower()


def test_the_daemon_is_found_by_its_socket_in_the_runtime_folder(daemon):
    link = daemon.home / "daemon.sock"
    link.symlink_to(daemon.socket)
    environment = {"REFT_RUNTIME_DIR": str(daemon.home), "REFT_DAEMON": ""}
    result = CliRunner().invoke(main, ["status"], env=environment)
    assert result.exit_code == 0 and "no job is held" in result.stdout


def test_a_daemon_without_jobs_is_healthy(daemon):
    assert invoke("status", "--check", daemon=daemon.address).exit_code == 0


def test_a_job_without_a_whole_step_exits_with_warn_only_with_check(daemon):
    make_job(daemon, "empty")
    assert invoke("status", daemon=daemon.address).exit_code == 0
    result = invoke("status", "--check", "--json", daemon=daemon.address)
    document = json.loads(result.stdout)
    assert result.exit_code == 3
    assert document["health"] == document["jobs"][0]["health"] == "WARN"


def test_wrong_combinations_are_json_errors_with_json(daemon):
    make_job(daemon, "empty")
    for arguments in (["status", "--watch"], ["purge", "empty"]):
        result = invoke(*arguments, "--json", daemon=daemon.address)
        assert (result.stdout, result.exit_code, json.loads(result.stderr)["error"]["exit_code"]) == ("", 2, 2)


def test_no_such_job(daemon):
    for arguments in (["status", "--job", "other"], ["status", "other"], ["purge", "other", "--yes"]):
        result = invoke(*arguments, daemon=daemon.address)
        assert result.exit_code == 11
        assert "holds no job 'other'" in result.stderr


def test_a_damaged_record_is_one_error_with_a_remedy(tmp_path, monkeypatch):
    """The daemon knows no ranks of such a job, so its status has none."""
    monkeypatch.chdir(tmp_path)
    verbs = (["recover"], ["recover", "--step", "1"], ["timeline"], ["persist"], ["list"], ["export", "--to", "out"])
    held = DaemonProcess()
    try:
        make_job(held, "cut")
        held.kill()
        for record in (held.folder / "cut").glob("record.*"):
            record.write_bytes(b"cut")
        held.start()
        results = {" ".join(verb): invoke(*verb, "cut", daemon=held.address) for verb in verbs}
    finally:
        held.close()
    for verb, result in results.items():
        assert (result.exit_code, result.stdout) == (1, ""), verb
        assert "the record of job cut on" in result.stderr and "reft-cli purge cut on" in result.stderr, verb
    assert not list(tmp_path.iterdir())


def test_a_job_that_was_trained_is_shown_and_purged(daemon):
    run(Spec(daemon=daemon.address, job="trained", steps=3))
    result = invoke("status", "--check", "--job", "trained", daemon=daemon.address)
    assert result.exit_code == 0
    assert "health  OK  training has ended; step 3 is still held." in result.stdout
    assert "protect LOCAL  trainers can be lost now." in result.stdout
    assert invoke("status", "trained", daemon=daemon.address).stdout.startswith("job     trained")
    assert invoke("status", "--all", daemon=daemon.address).stdout.startswith("job     trained")
    (words,) = (line.split() for line in brief_status(daemon) if line.startswith("trained"))
    assert words[2:5] == ["ended", "OK", "3"] and words[-1].startswith("29m")
    (document,) = json.loads(invoke("status", "--json", daemon=daemon.address).stdout)["jobs"]
    assert document["state"] == "ended" and 0 < document["ended_s"] < 60 and 1740 < document["kept_s"] < 1800
    asked = invoke("purge", "trained", daemon=daemon.address)
    assert asked.exit_code == 2 and "--yes" in asked.stderr
    purged = json.loads(invoke("purge", "trained", "--yes", "--json", daemon=daemon.address).stdout)
    assert purged["freed_bytes"] > 0 and purged["other_nodes"] == []
    assert invoke("status", "--job", "trained", daemon=daemon.address).exit_code == 11
    assert not list(daemon.folder.glob("trained/*"))


def test_watch_ends_with_ctrl_c(daemon):
    command = [*HEEDFUL, sys.executable, "-m", "reft.cli.main", "status", "--watch", "--daemon", daemon.address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")])}
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)  # fmt: skip
    shown = [watcher.stdout.readline() for _ in range(6)]
    assert sum("no job is held" in line for line in shown) >= 2
    daemon.kill()
    until(lambda: "no daemon answers" in watcher.stdout.readline(), what="the message that the daemon is gone")
    watcher.send_signal(signal.SIGINT)
    _, errors = watcher.communicate(timeout=60)
    assert (watcher.returncode, errors) == (130, "")


class Terminal:
    """`reft-cli` on a pseudo terminal, as a user sees it."""

    def __init__(self, daemon: DaemonProcess, *arguments: str, **environment: str) -> None:
        self._person, terminal = pty.openpty()
        command = [*HEEDFUL, sys.executable, "-m", "reft.cli.main", *arguments, "--daemon", daemon.address]
        defaults = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]), "TERM": "xterm", "NO_COLOR": ""}
        self.process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal,
                                        env={**os.environ, **defaults, **environment})  # fmt: skip
        os.close(terminal)
        self.shown = b""

    def until(self, text: bytes) -> None:
        """Reads until the text was shown."""
        while text not in self.shown:
            self.shown += os.read(self._person, 4096)

    def rest(self) -> tuple[int, bytes]:
        """Returns the exit code, and everything that was shown."""
        with contextlib.suppress(OSError):  # the terminal has closed
            while piece := os.read(self._person, 4096):
                self.shown += piece
        os.close(self._person)
        return self.process.wait(60), self.shown


ENTER, LEAVE, BOLD = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[1m"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_watch_and_restores_the_terminal(daemon, number):
    terminal = Terminal(daemon, "status", "--watch")
    terminal.until(b"no job is held")
    terminal.process.send_signal(number)
    code, shown = terminal.rest()
    assert (code, ENTER in shown, LEAVE in shown) == (128 + number, True, True)


def test_watch_on_a_dumb_terminal_prints_plain_lines(daemon):
    terminal = Terminal(daemon, "status", "--watch", TERM="dumb")
    terminal.until(b"no job is held")
    terminal.process.send_signal(signal.SIGTERM)
    assert b"\x1b" not in terminal.rest()[1]


@pytest.mark.parametrize(
    ("surroundings", "colours"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_follow_no_color_and_term(daemon, surroundings, colours):
    make_job(daemon, "empty")
    code, shown = Terminal(daemon, "status", **surroundings).rest()
    assert (code, BOLD in shown, b"WARN" in shown) == (0, colours, True)


def press_ctrl_c(process: subprocess.Popen) -> set[int]:
    """Sends SIGINT until the process ends; returns the exit codes that are right.

    CPython misses a signal that arrives after its check for signals and before its read. On a busy
    machine the first one may just be slow; then the second one may end Python in its clean-up.
    """
    right = {130}
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
        right.add(-signal.SIGINT)
    return right


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1), (None, 130)])
def test_purge_asks_and_ctrl_c_exits_with_130(daemon, answer, code):
    make_job(daemon, "empty")
    person, terminal = pty.openpty()
    command = [*HEEDFUL, sys.executable, "-m", "reft.cli.main", "purge", "empty", "--daemon", daemon.address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")])}
    asking = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    question = b"Free the memory of job empty on "
    assert asking.stdout.read(len(question)) == question
    right = {code}
    if answer is None:
        right = press_ctrl_c(asking)
    else:
        os.write(person, f"{answer}\n".encode())
    asking.communicate(timeout=60)
    os.close(person)
    os.close(terminal)
    assert asking.returncode in right
    assert invoke("status", "--job", "empty", daemon=daemon.address).exit_code == (0 if code else 11)


@pytest.mark.parametrize(
    "arguments",
    [["status", "\udcff"], ["recover", "\udcff"], ["list", "\udcff"], ["status", "--daemon", "unix:/\udcff"]],
)
def test_words_that_are_no_utf_8_are_wrong_usage(daemon, arguments):
    """The terminal of a foreign system gives such words; Python holds their bytes as surrogates."""
    result = invoke(*arguments, daemon=daemon.address)
    assert (result.exit_code, result.stdout) == (2, "") and "has bytes that are no UTF-8." in result.stderr
    error = json.loads(invoke(*arguments, "--json", daemon=daemon.address).stderr)["error"]
    assert error["exit_code"] == 2 and error["hint"]


def test_watch_without_stdout_is_no_traceback(monkeypatch):
    """As under `>&-`: then Python has no sys.stdout."""
    looks = iter([["first"], ["second"]])

    def lines(*_: object) -> list[str]:
        for each in looks:
            return each
        raise KeyboardInterrupt

    monkeypatch.setattr("reft.cli.main._lines_now", lines)
    monkeypatch.setattr("reft.cli.main.WATCH_S", 0.0)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(KeyboardInterrupt):
        _watch("unix:/d.sock", pb.StatusRequest())


def test_ctrl_c_while_lines_are_made_exits_with_130(daemon, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reft.cli.status_text.brief_lines", interrupted)
    result = invoke("status", daemon=daemon.address)
    assert (result.exit_code, result.stderr) == (130, "")


def test_the_cli_loads_no_torch():
    code = "import sys, reft.cli.main, reft.cli.demo.run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_help_names_the_verbs_and_the_exit_codes():
    text = invoke("--help").stdout
    assert all(word in text for word in ("status", "recover", "purge", "demo", "no such job"))


def test_characters_that_the_terminal_lacks_are_replaced(daemon):
    make_job(daemon, "empty", "…")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {**os.environ, "PYTHONPATH": paths, "REFT_DAEMON": daemon.address, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-m", "reft.cli.main", "status"], capture_output=True, env=environment,
                          timeout=250, check=False)  # fmt: skip
    assert done.returncode == 0 and b"empty  ?, 1 rank" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["status", "--json"], ["status", "--watch"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_write_error_is_one_line(daemon, arguments, unbuffered):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {**os.environ, "PYTHONPATH": paths, "REFT_DAEMON": daemon.address, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "reft.cli.main", *arguments], stdout=full, stderr=subprocess.PIPE,
                              env=environment, text=True, timeout=250, check=False)  # fmt: skip
    assert done.returncode == 1 and "No space left" in done.stderr and done.stderr.count("\n") == 1
