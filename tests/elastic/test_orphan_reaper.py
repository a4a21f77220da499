"""Whom the guard ends with its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from reft.config import Config
from reft.elastic.orphan_reaper import Guard
from reft.wire import daemon_launcher

SLEEPS = [sys.executable, "-c", "import time; time.sleep(100)"]


def test_it_ends_workers_and_not_the_daemon_that_their_agent_started_again(tmp_path):
    guard = Guard()
    worker = subprocess.Popen(SLEEPS, start_new_session=True)
    address, hello = daemon_launcher.find(Config.load(runtime_dir=str(tmp_path)))  # as the agent's Reviver does it
    try:
        guard.look()
        guard._process.stdin.close()  # all that the guard sees of the agent's end
        assert guard._process.wait(30) == 0
        assert worker.wait(30) == -9
        daemon_launcher.hello(address)
    finally:
        worker.kill()
        os.kill(hello.pid, signal.SIGTERM)
        os.waitpid(hello.pid, 0)  # it is a child of this process
