"""Tests processes by pid and start time: alive, dead, zombie, reused pid, orphan."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reft.wire.process import Process, stat_of


def test_this_process():
    facts = stat_of(os.getpid())
    assert facts.state in "RSD" and facts.parent == os.getppid()
    assert Process(os.getpid(), facts.start).is_alive


def test_another_process_with_the_same_pid():
    assert not Process(os.getpid(), stat_of(os.getpid()).start - 1).is_alive


def test_the_dead_and_zombies_are_not_alive():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process(child.pid, stat_of(child.pid).start)
    assert process.is_alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    assert stat_of(child.pid).state == "Z"
    assert not process.is_alive
    child.stdin.close()
    child.wait()
    assert stat_of(child.pid) is None and not process.is_alive


def test_a_name_with_brackets_and_spaces_does_not_confuse():
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') R 1 2 (', 0, 0, 0); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert stat_of(child.pid).parent == os.getpid()
        child.stdin.close()


def test_a_process_that_can_not_be_read_does_not_count_as_dead(monkeypatch):
    me = Process(os.getpid(), stat_of(os.getpid()).start)
    monkeypatch.setattr(Path, "read_text", fail)
    for ask in (lambda: me.is_alive, lambda: me.is_orphan(1)):
        with pytest.raises(OSError, match="Too many open files"):
            ask()


def fail(*_: object, **__: object) -> str:
    raise OSError(errno.EMFILE, "Too many open files")


def test_orphans():
    me = Process(os.getpid(), stat_of(os.getpid()).start)
    assert not me.is_orphan(0)
    assert not me.is_orphan(os.getppid())
    assert me.is_orphan(os.getppid() + 1)
    assert not Process(me.pid, me.start - 1).is_orphan(1)


def test_a_process_name_that_is_no_utf8_is_accepted():
    """The kernel cuts names at 15 bytes, even within a character."""
    states = []

    def rename() -> None:
        ctypes.CDLL(None).prctl(15, "обучение_модели".encode(), 0, 0, 0)
        states.append(stat_of(threading.get_native_id()))

    thread = threading.Thread(target=rename)
    thread.start()
    thread.join()
    assert states and states[0].parent == os.getppid()
