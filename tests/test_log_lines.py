"""The log: no text from elsewhere forges a line, and no file grows for ever."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft import log_lines
from reft.log_lines import LINE_MAX, LineFormatter, LogFileHandler, QueuedLogHandler, escape
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, until
from tests.support.frozen import freeze, loop_disk, thaw


def test_an_audit_line_has_one_form(caplog):
    log_lines.audit("kill", pid=7, job="run-1", why="no progress", path="/a/b_c.pem", nothing="")
    assert [(each.name, each.levelname) for each in caplog.records] == [("reft.audit", "WARNING")]
    assert caplog.messages == ['kill: pid=7 job=run-1 why="no progress" path=/a/b_c.pem nothing=""']


@pytest.mark.parametrize(
    "name", ["a by=root", 'a"by=root', "a\nreft.audit kill: by=root", "a\x1b[2J", "a\u202eb", "ä=", "a,b", "a\x7f"]
)
def test_no_name_forges_a_field_of_an_audit_line(caplog, name):
    log_lines.audit("purge", job=name, by="pid 7")
    (line,) = caplog.messages
    job, _ = re.fullmatch(r'purge: job=("(?:[^"\\]|\\.)*") by=("pid 7")', line).groups()
    assert json.loads(job) == name and line.isprintable() and line.isascii()


@pytest.mark.parametrize("long", ["", "x", "a b", '"', "\x7f", "\n", "ü", "\U0001f600"])
@pytest.mark.parametrize("times", [1, 150, 700, 816, 4000, 100_000])
def test_no_long_value_pushes_a_field_out_of_an_audit_line(caplog, long, times):
    """Neither one long value nor five of them."""
    long *= times
    for texts in ((long, "b", "c c", "", "e"), [long] * 5):
        caplog.clear()
        log_lines.audit("kill", **dict(zip("abcde", texts, strict=True)))
        (line,) = caplog.messages
        assert len(line) <= LINE_MAX and line.isprintable() and line.isascii()
        fields = re.fullmatch("kill: " + " ".join(f"{key}=({VALUE})" for key in "abcde"), line)
        for text, field in zip(texts, fields.groups(), strict=True):
            shown = json.loads(field) if field.startswith('"') else field
            begin, mark, count = shown.rpartition("... (")
            is_cut = bool(mark) and count == f"{len(text)} characters)" and text.startswith(begin) and begin
            assert shown == text or (is_cut and len(text) > 40)


VALUE = r'"(?:[^"\\]|\\.)*"|[A-Za-z0-9._:/@+-]+'


def line_of(message: str, *args: object, error: Exception | None = None) -> str:
    information = (type(error), error, None) if error else None
    record = logging.LogRecord("reft", logging.INFO, __file__, 1, message, args, information)  # type: ignore[arg-type]
    return LineFormatter().format(record)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain, with ü and 日本", "plain, with ü and 日本"),
        ("a\nINFO forged", "a\\nINFO forged"),
        ("\r\x1b[2J\x07", "\\r\\x1b[2J\\x07"),
        ("\x9b31m", "\\x9b31m"),  # the same as ESC [ for terminals in 8-bit mode
        ("\u2028\u202e", "\\u2028\\u202e"),
    ],
)
def test_characters_of_control_are_escaped(text, escaped):
    assert escape(text) == escaped
    assert line_of("node %s", text).endswith(f" INFO reft node {escaped}")


@given(st.text())
def test_any_text_is_one_line_without_characters_of_control(text):
    line = line_of("%s", text)
    assert len(line.splitlines()) == 1 and "\x1b" not in line


def test_a_long_message_is_cut():
    line = line_of("%s", "x" * 100_000)
    assert len(line) < LINE_MAX + 100 and line.endswith("… (100000 characters)")


def test_a_traceback_keeps_its_lines_and_is_escaped():
    assert line_of("failed", error=ValueError("\x1b[31m\nforged")).endswith("ValueError: \\x1b[31m\nforged")


def test_a_log_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "FILE_BYTES", 2000)
    handler = LogFileHandler(tmp_path / "log")
    for number in range(200):
        handler.emit(logging.LogRecord("reft", logging.INFO, "", 1, f"line {number} " + "x" * 80, (), None))
    handler.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"log", "log.1"} and max(sizes.values()) <= 2000
    assert "line 199" in (tmp_path / "log").read_text()


def test_a_log_goes_on_where_its_folder_takes_no_second_file(tmp_path, monkeypatch):
    """As in /var/log, where only the file belongs to the user."""
    monkeypatch.setattr(log_lines, "FILE_BYTES", 2000)
    (tmp_path / "log.1" / "in the way").mkdir(parents=True)
    handler = LogFileHandler(tmp_path / "log")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    sizes = set()
    for number in range(200):
        handler.handle(logging.LogRecord("reft", logging.INFO, "", 0, f"line {number:<80}", (), None))
        assert (tmp_path / "log").read_text().splitlines()[-1].strip() == f"line {number}"
        sizes.add((tmp_path / "log").stat().st_size)
    handler.close()
    assert 2000 < max(sizes) < 4000 + 100, "a line more at most"


def test_a_log_on_a_full_disk_says_so_once_and_then_how_many_lines_are_missing(tmp_path, capfd):
    handler = LogFileHandler(Path("/dev/full"))
    handler.setFormatter(LineFormatter())

    def write(number: int) -> None:
        handler.handle(logging.LogRecord("reft", logging.INFO, "", 0, f"line {number}", (), None))

    for number in range(20):
        write(number)
    words = capfd.readouterr().err
    assert words.count("\n") == 1 and "the log /dev/full can't be written: No space left on device" in words
    handler.baseFilename = str(tmp_path / "log")
    handler.reopen()
    for number in (20, 21):
        write(number)
    handler.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.partition("reft")[2].strip(" .") for line in (lines[0], *lines[2:])] == ["line 20", "line 21"]
    assert "up to 20 lines" in lines[1] and capfd.readouterr().err == ""


def test_a_wrong_record_still_names_its_line(capfd):
    """A mistake in the code is no full disk."""
    handler = LogFileHandler(Path(os.devnull))
    handler.handle(logging.LogRecord("reft", logging.INFO, "", 0, "%d", ("x",), None))
    assert "TypeError" in capfd.readouterr().err


def test_every_program_of_the_daemon_logs_this_way():
    sources = [
        path for name in ("daemon", "reft") for path in (Path(log_lines.__file__).parents[1] / name).rglob("*.py")
    ]
    own = [path.name for path in sources if re.search(r"logging\.basicConfig|logging\.Formatter\(", path.read_text())]
    assert own == ["log_lines.py"]


def test_a_process_without_a_file_logs_escaped_lines_to_stderr():
    code = "import logging; from reft.log_lines import begin_log; begin_log(); logging.warning('%s', 'a\\n\\x1b[2J')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stderr.endswith("WARNING root a\\n\\x1b[2J\n")


def test_a_daemon_opens_its_log_anew_on_request(tmp_path):
    daemon = DaemonProcess("--log", str(tmp_path / "log"))
    try:
        os.rename(tmp_path / "log", tmp_path / "log.old")
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: (tmp_path / "log").exists(), what="the new file")
        daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL))
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
    finally:
        daemon.close()


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="can't be opened: Not a directory"):
        DaemonProcess("--log", str(tmp_path / "file" / "log"))


def test_a_daemon_serves_while_the_disk_of_its_log_hangs():
    with loop_disk() as disk:
        daemon = DaemonProcess("--log", str(disk / "log"))
        try:
            freeze(disk)
            daemon.socket.unlink()
            until(daemon.socket.exists, what="the new socket, of which the log gets a line")
            daemon.process.send_signal(signal.SIGHUP)
            daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL))
            thaw(disk)
            until(lambda: "removed the sockets" in (disk / "log").read_text(), what="the line")
        finally:
            thaw(disk)
            daemon.close()


@pytest.fixture
def hanging(tmp_path):
    """Yields the handler of a file that takes lines only once the event is set, and the event."""
    free = threading.Event()

    class HangingLogHandler(LogFileHandler):
        def emit(self, record: logging.LogRecord) -> None:
            free.wait()
            super().emit(record)

    queued = QueuedLogHandler(HangingLogHandler(tmp_path / "log"))
    yield queued, free
    free.set()
    queued.close()


def say(handler: logging.Handler, count: int) -> None:
    for number in range(count):
        handler.handle(logging.LogRecord("reft", logging.INFO, "", 0, "line %d", (number,), None))


def test_lines_beyond_the_bound_are_counted_while_a_log_hangs(hanging, tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "WAITING_MAX", 5)
    queued, free = hanging
    say(queued, 1)
    until(lambda: queued._waiting.empty(), what="the thread, which waits with the first line")
    say(queued, 8)
    free.set()
    queued.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:-1] == ["line 0", *(f"line {number}" for number in range(5))]
    assert lines[-1].startswith("3 lines before this one are missing")


def test_a_log_that_hangs_does_not_keep_a_program_from_its_end(hanging, tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "CLOSE_S", 0.1)
    queued, _ = hanging
    say(queued, 3)
    queued.close()
    assert (tmp_path / "log").read_text() == ""


def test_a_log_that_cannot_be_opened_anew_says_so_in_the_earlier_file(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    queued = QueuedLogHandler(LogFileHandler(folder / "log"))
    folder.rename(tmp_path / "other")
    queued.reopen()
    queued.close()
    assert "can't be opened anew: [Errno 2]" in (tmp_path / "other" / "log").read_text()


def test_a_burst_of_more_lines_than_may_wait_loses_none(tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "WAITING_MAX", 5)
    monkeypatch.setattr(log_lines, "ROOM_S", 60.0)
    queued = QueuedLogHandler(LogFileHandler(tmp_path / "log"))
    say(queued, 100)
    queued.close()
    assert (tmp_path / "log").read_text().splitlines() == [f"line {number}" for number in range(100)]
