"""Signals that end a command wait: until a folder has a clean-up process, and while it works."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from reft.cli.demo import clean_up
from reft.cli.demo.cluster import Cluster
from reft.cli.rehearse.training import RehearsedCommand, RehearsedTraining
from reft.cli.signals import ENDING, deferring, unwinding
from tests.support.daemons import until


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """Yields an empty folder, in which temporary files are made from here on; not `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def left(temporary: Path) -> list[str]:
    return [each.name for each in temporary.glob("reft-*")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_comes_at_the_end_of_the_block(number, code):
    seen = []
    handlers = [signal.getsignal(each) for each in ENDING]
    with pytest.raises(SystemExit) as end, unwinding(), deferring():
        signal.raise_signal(number)
        seen.append("went on")
    assert (end.value.code, seen) == (code, ["went on"])
    assert [signal.getsignal(each) for each in ENDING] == handlers
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(ENDING)


def test_a_block_without_a_signal_changes_nothing():
    handlers = [signal.getsignal(each) for each in ENDING]
    with deferring():
        child = subprocess.run([sys.executable, "-c", "import signal; signal.raise_signal(15)"], check=False)
    assert child.returncode == -signal.SIGTERM, "a child hears its signals"
    assert [signal.getsignal(each) for each in ENDING] == handlers


def test_a_block_on_another_thread_leaves_signals_alone():
    seen = []

    def work() -> None:
        with deferring():
            seen.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["done"]


class SlowCleanUp:
    """A clean-up process that gets a signal while somebody waits for its end."""

    def __init__(self) -> None:
        self.stdin = io.BytesIO()
        self.is_done = False

    def wait(self) -> None:
        assert self.stdin.closed
        signal.raise_signal(signal.SIGTERM)
        self.is_done = True


def test_a_signal_does_not_cut_a_clean_up_short():
    process = SlowCleanUp()
    with pytest.raises(SystemExit), unwinding():
        clean_up.finish(process)
    assert process.is_done


def training(folder: Path) -> RehearsedTraining:
    return RehearsedTraining("a", RehearsedCommand([sys.executable, "-c", ""], folder), folder, timeout_s=60.0)


@pytest.mark.parametrize("begin", [training, lambda folder: Cluster(nodes=1)], ids=["rehearse", "demo"])
def test_a_signal_between_a_folder_and_its_clean_up_leaves_nothing(monkeypatch, temporary, tmp_path, begin):
    start = clean_up.start

    def interrupted(folders):
        signal.raise_signal(signal.SIGTERM)
        return start(folders)

    monkeypatch.setattr(clean_up, "start", interrupted)
    with pytest.raises(SystemExit), unwinding():
        begin(tmp_path)
    assert left(temporary) == []


@pytest.mark.parametrize("begin", [training, lambda folder: Cluster(nodes=1)], ids=["rehearse", "demo"])
def test_a_clean_up_that_can_not_start_leaves_nothing(monkeypatch, temporary, tmp_path, begin):
    def refused(folders):
        raise BlockingIOError("no process more")

    monkeypatch.setattr(clean_up, "start", refused)
    with pytest.raises(BlockingIOError):
        begin(tmp_path)
    assert left(temporary) == []


def test_a_sweep_finds_a_process_that_showed_no_environment_at_first(monkeypatch, tmp_path):
    folder = tmp_path / "swept"
    folder.mkdir()
    child = psutil.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], env={**os.environ, clean_up.MARK: str(folder)}
    )
    until(lambda: clean_up.marked(folder), 30, "that the child shows its environment")
    marked, calls = clean_up.marked, []

    def late(mark):
        calls.append(mark)
        return [] if len(calls) == 1 else marked(mark)

    monkeypatch.setattr(clean_up, "marked", late)
    clean_up.sweep([folder])
    assert not folder.exists() and not child.is_running()
