"""Which processes the orphan reaper kills after the end of its agent."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

from reft.config import Config
from reft.elastic import orphan_reaper
from reft.elastic.orphan_reaper import OrphanReaper
from reft.wire import daemon_launcher

SLEEPS = [sys.executable, "-c", "import time; time.sleep(100)"]
TRACKER = [*SLEEPS[:2], "import time; time.sleep(100)  # from multiprocessing.resource_tracker import main"]


def test_it_kills_workers_but_not_a_daemon_that_the_agent_started(tmp_path):
    reaper = OrphanReaper()
    worker = subprocess.Popen(SLEEPS, start_new_session=True)
    # as the agent's DaemonRestarter does it
    address, hello = daemon_launcher.find(Config.load(runtime_dir=str(tmp_path)))
    try:
        reaper.look()
        reaper._process.stdin.close()  # the reaper sees nothing else of the agent's end
        assert reaper._process.wait(30) == 0
        assert worker.wait(30) == -9
        daemon_launcher.hello(address)
    finally:
        worker.kill()
        os.kill(hello.pid, signal.SIGTERM)
        os.waitpid(hello.pid, 0)  # the daemon is a child of this process


def test_it_kills_a_worker_without_a_session_but_no_earlier_child_or_resource_tracker():
    before = subprocess.Popen(SLEEPS)
    reaper = OrphanReaper()
    worker, tracker = subprocess.Popen(SLEEPS), subprocess.Popen(TRACKER)
    try:
        assert os.getpgid(worker.pid) == os.getpgrp(), "killing its group would kill this process"
        reaper.look()
        reaper._process.stdin.close()
        assert reaper._process.wait(30) == 0
        assert worker.wait(30) == -9
        assert before.poll() is None and tracker.poll() is None
    finally:
        for each in (before, worker, tracker):
            each.kill()
            each.wait()


def test_a_closed_reaper_kills_no_worker():
    reaper = OrphanReaper()
    worker = subprocess.Popen(SLEEPS, start_new_session=True)
    try:
        reaper.look()
        reaper.close()
        assert reaper._process.returncode == 0 and worker.poll() is None
    finally:
        worker.kill()
        worker.wait()


def test_processes_that_can_not_be_read_are_no_children(monkeypatch):
    """As with hidepid=1, where the kernel lists other users' processes and refuses to show them."""
    real = orphan_reaper.stat_of

    def stat_of(pid):
        if pid == 1:
            raise PermissionError(errno.EPERM, "hidden")
        return real(pid)

    monkeypatch.setattr(orphan_reaper, "stat_of", stat_of)
    reaper = OrphanReaper()
    worker = subprocess.Popen(SLEEPS, start_new_session=True)
    try:
        reaper.look()
        reaper._process.stdin.close()
        assert reaper._process.wait(30) == 0
        assert worker.wait(30) == -9
    finally:
        worker.kill()
        worker.wait()


def test_without_a_free_descriptor_the_list_of_the_round_before_stays(monkeypatch):
    reaper = OrphanReaper()
    worker = subprocess.Popen(SLEEPS, start_new_session=True)

    def full(*_):
        raise OSError(errno.EMFILE, "no descriptor is free")

    try:
        reaper.look()
        for name in ("listdir", "stat_of", "Path"):  # no descriptor from here on
            with monkeypatch.context() as patch:
                patch.setattr(orphan_reaper.os if name == "listdir" else orphan_reaper, name, full)
                reaper.look()
        reaper._process.stdin.close()
        assert reaper._process.wait(30) == 0
        assert worker.wait(30) == -9
    finally:
        worker.kill()
        worker.wait()
