"""Whom the guard ends with its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from reft.config import Config
from reft.elastic.orphan_reaper import OrphanReaper
from reft.wire import daemon_launcher

SLEEPS = [sys.executable, "-c", "import time; time.sleep(100)"]
TRACKER = [*SLEEPS[:2], "import time; time.sleep(100)  # from multiprocessing.resource_tracker import main"]


def test_it_ends_workers_and_not_the_daemon_that_their_agent_started_again(tmp_path):
    reaper = OrphanReaper()
    worker = subprocess.Popen(SLEEPS, start_new_session=True)
    address, hello = daemon_launcher.find(
        Config.load(runtime_dir=str(tmp_path))
    )  # as the agent's DaemonRestarter does it
    try:
        reaper.look()
        reaper._process.stdin.close()  # all that the guard sees of the agent's end
        assert reaper._process.wait(30) == 0
        assert worker.wait(30) == -9
        daemon_launcher.hello(address)
    finally:
        worker.kill()
        os.kill(hello.pid, signal.SIGTERM)
        os.waitpid(hello.pid, 0)  # it is a child of this process


def test_it_ends_a_worker_that_leads_no_session_and_spares_what_was_there_and_what_cleans_up():
    before = subprocess.Popen(SLEEPS)
    reaper = OrphanReaper()
    worker, tracker = subprocess.Popen(SLEEPS), subprocess.Popen(TRACKER)
    try:
        assert os.getpgid(worker.pid) == os.getpgrp(), "a kill of its group would end this process"
        reaper.look()
        reaper._process.stdin.close()
        assert reaper._process.wait(30) == 0
        assert worker.wait(30) == -9
        assert before.poll() is None and tracker.poll() is None
    finally:
        for each in (before, worker, tracker):
            each.kill()
            each.wait()


def test_a_guard_that_is_closed_spares_the_workers():
    reaper = OrphanReaper()
    worker = subprocess.Popen(SLEEPS, start_new_session=True)
    try:
        reaper.look()
        reaper.close()
        assert reaper._process.returncode == 0 and worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
