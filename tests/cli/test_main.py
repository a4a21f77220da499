"""The verbs against a real daemon: what they print, and their exit codes."""

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

from reft.cli.main import main
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import HEEDFUL, ROOT, DaemonProcess, until
from tests.support.trainers import Spec, run


def invoke(*arguments: str, daemon: str = ""):
    return CliRunner().invoke(main, list(arguments), env={"REFT_DAEMON": daemon}, catch_exceptions=False)


def make_job(daemon: DaemonProcess, name: str, script: str = "") -> None:
    """A job that attached and did nothing: no trainer, nothing whole."""
    node = pb.Node(name="test", id="0", addresses=[daemon.address], ranks=[0])
    manifest = pb.Manifest(job=name, named=True, token=bytes(32), world=1, nodes=[node], every=1, script=script)
    decision = pb.Decision(epoch=pb.Epoch(counter=1, ident=bytes(16)))
    daemon.call("Decide", pb.DecideRequest(manifest=manifest, decision=decision))


def test_no_daemon(tmp_path):
    found = invoke("status", "--daemon", f"unix:{tmp_path}/none.sock")
    assert (found.exit_code, found.stdout) == (10, "")
    address = f"unix:{tmp_path}/none.sock"
    assert f"no daemon answers at {address}: connect failed" in found.stderr
    assert "No such file or directory. Fix: start reft-daemon" in found.stderr


def test_no_daemon_as_json(tmp_path):
    found = invoke("status", "--json", "--daemon", f"unix:{tmp_path}/none.sock")
    assert found.stdout == ""
    error = json.loads(found.stderr)
    assert error["schema_version"] == 1 and error["error"]["exit_code"] == found.exit_code == 10
    assert error["error"]["hint"]


@pytest.mark.parametrize(
    "arguments",
    [["--watch", "--json"], ["--watch", "--check"], ["--watch", "--what-if", ""], ["--check", "--what-if", "lose=a"],
     ["--daemon", "nonsense"], ["x"]],
)  # fmt: skip
def test_wrong_usage(arguments):
    assert invoke("status", *arguments).exit_code == 2


def test_an_empty_question_is_not_taken_for_none(daemon):
    make_job(daemon, "empty")
    found = invoke("status", "--what-if", "", daemon=daemon.address)
    assert found.exit_code == 2 and "can't be read" in found.stderr


@pytest.mark.parametrize(
    "arguments",
    [["status", "--jsn"], ["status", "extra"], ["purge"], ["timeline", "j", "--rank", "x"], ["demo", "--steps", "1"], ["none"]],
)  # fmt: skip
def test_a_command_line_that_can_not_be_read_is_told_as_json_too(arguments):
    assert "Usage: " in invoke(*arguments).stderr
    found = invoke(*arguments, "--json")
    error = json.loads(found.stderr)["error"]
    assert (found.stdout, found.exit_code, error["exit_code"]) == ("", 2, 2)
    assert error["message"] and error["hint"].endswith("--help")


@pytest.mark.parametrize("verb", ["status", "recover", "purge", "timeline"])
def test_no_verb_offers_a_daemon_over_tcp_which_tells_nobody_anything(verb):
    daemon = invoke(verb, "--help").stdout.partition("--daemon")[2].partition("--help")[0]
    assert "unix:PATH" in daemon and ":port" not in daemon.lower()


def test_the_daemon_is_found_by_its_socket_in_the_runtime_folder(daemon):
    link = daemon.home / "daemon.sock"
    link.symlink_to(daemon.socket)
    environment = {"REFT_RUNTIME_DIR": str(daemon.home), "REFT_DAEMON": ""}
    found = CliRunner().invoke(main, ["status"], env=environment)
    assert found.exit_code == 0 and "no job is held" in found.stdout


def test_nothing_held_is_no_alarm(daemon):
    assert invoke("status", "--check", daemon=daemon.address).exit_code == 0


def test_a_job_with_nothing_whole_is_a_warning_only_with_check(daemon):
    make_job(daemon, "empty")
    assert invoke("status", daemon=daemon.address).exit_code == 0
    found = invoke("status", "--check", "--json", daemon=daemon.address)
    document = json.loads(found.stdout)
    assert found.exit_code == 3
    assert document["health"] == document["jobs"][0]["health"] == "WARN"


def test_wrong_usage_is_json_too_where_that_was_asked_for(daemon):
    make_job(daemon, "empty")
    for arguments in (["status", "--watch"], ["purge", "empty"]):
        found = invoke(*arguments, "--json", daemon=daemon.address)
        assert (found.stdout, found.exit_code, json.loads(found.stderr)["error"]["exit_code"]) == ("", 2, 2)


def test_no_such_job(daemon):
    for arguments in (["status", "--job", "other"], ["purge", "other", "--yes"]):
        found = invoke(*arguments, daemon=daemon.address)
        assert found.exit_code == 11
        assert "holds no job 'other'" in found.stderr


def test_a_job_that_was_trained_is_shown_and_purged(daemon):
    run(Spec(daemon=daemon.address, job="trained", steps=3))
    found = invoke("status", "--check", "--job", "trained", daemon=daemon.address)
    assert found.exit_code == 0
    assert "health  OK  training has ended; step 3 is still held." in found.stdout
    asked = invoke("purge", "trained", daemon=daemon.address)
    assert asked.exit_code == 2 and "--yes" in asked.stderr
    purged = json.loads(invoke("purge", "trained", "--yes", "--json", daemon=daemon.address).stdout)
    assert purged["freed_bytes"] > 0 and purged["other_nodes"] == []
    assert invoke("status", "--job", "trained", daemon=daemon.address).exit_code == 11
    assert not list(daemon.folder.glob("trained/*"))


def test_watching_ends_with_ctrl_c(daemon):
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
    """`reft-cli` as a person has it before him: what it shows comes from a pseudo terminal."""

    def __init__(self, daemon: DaemonProcess, *arguments: str, **surroundings: str) -> None:
        self._person, terminal = pty.openpty()
        command = [*HEEDFUL, sys.executable, "-m", "reft.cli.main", *arguments, "--daemon", daemon.address]
        usual = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]), "TERM": "xterm", "NO_COLOR": ""}
        self.process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal,
                                        env={**os.environ, **usual, **surroundings})  # fmt: skip
        os.close(terminal)
        self.shown = b""

    def until(self, text: bytes) -> None:
        """Reads until it was shown."""
        while text not in self.shown:
            self.shown += os.read(self._person, 4096)

    def rest(self) -> tuple[int, bytes]:
        """Its exit code, and all that it has shown."""
        with contextlib.suppress(OSError):  # the terminal's end
            while piece := os.read(self._person, 4096):
                self.shown += piece
        os.close(self._person)
        return self.process.wait(60), self.shown


ENTER, LEAVE, BOLD = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[1m"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_watching_gives_the_terminal_back(daemon, number):
    seen = Terminal(daemon, "status", "--watch")
    seen.until(b"no job is held")
    seen.process.send_signal(number)
    code, shown = seen.rest()
    assert (code, ENTER in shown, LEAVE in shown) == (128 + number, True, True)


def test_watching_on_a_terminal_that_knows_no_screen(daemon):
    seen = Terminal(daemon, "status", "--watch", TERM="dumb")
    seen.until(b"no job is held")
    seen.process.send_signal(signal.SIGTERM)
    assert b"\x1b" not in seen.rest()[1]


@pytest.mark.parametrize(
    ("surroundings", "colours"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_only_where_they_are_wanted(daemon, surroundings, colours):
    make_job(daemon, "empty")
    code, shown = Terminal(daemon, "status", **surroundings).rest()
    assert (code, BOLD in shown, b"WARN" in shown) == (0, colours, True)


def press_ctrl_c(process: subprocess.Popen) -> None:
    """As often as it takes: CPython does not hear a signal that comes when it has looked for signals, and is about to read."""
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
            return


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1), (None, 130)])
def test_purge_asks_and_ctrl_c_is_no_answer(daemon, answer, code):
    make_job(daemon, "empty")
    person, terminal = pty.openpty()
    command = [*HEEDFUL, sys.executable, "-m", "reft.cli.main", "purge", "empty", "--daemon", daemon.address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")])}
    asking = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    question = b"Free nothing whole of job empty on "
    assert asking.stdout.read(len(question)) == question
    if answer is None:
        press_ctrl_c(asking)
    else:
        os.write(person, f"{answer}\n".encode())
    asking.communicate(timeout=60)
    os.close(person)
    os.close(terminal)
    assert asking.returncode == code
    assert invoke("status", "--job", "empty", daemon=daemon.address).exit_code == (0 if code else 11)


def test_the_cli_loads_no_torch():
    code = "import sys, reft.cli.main, reft.cli.demo.run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_help_names_the_verbs_and_the_exit_codes():
    text = invoke("--help").stdout
    assert all(word in text for word in ("status", "recover", "purge", "demo", "11 no such job"))


def test_a_terminal_of_another_encoding_shows_what_it_has(daemon):
    make_job(daemon, "empty", "…")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {**os.environ, "PYTHONPATH": paths, "REFT_DAEMON": daemon.address, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-m", "reft.cli.main", "status"], capture_output=True, env=environment,
                          timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0 and b"empty  ?, 1 rank" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["status", "--json"], ["status", "--watch"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_can_not_be_written_is_said_in_a_line(daemon, arguments, unbuffered):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {**os.environ, "PYTHONPATH": paths, "REFT_DAEMON": daemon.address, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "reft.cli.main", *arguments], stdout=full, stderr=subprocess.PIPE,
                              env=environment, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 1 and "No space left" in done.stderr and done.stderr.count("\n") == 1
