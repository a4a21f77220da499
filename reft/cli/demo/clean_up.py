"""Ends the processes of a cluster and removes its folders.

It does so even if the owner was SIGKILLed.

    owner ── pipe ──► clean-up process: waits until the pipe closes
                      ─► SIGKILL to every process with the mark ─► removes the folders

Why a process and not PR_SET_PDEATHSIG? That signal must be requested between fork and exec, which
is not safe in an owner with threads (gRPC has some). It is sent when the forking *thread* ends.
torchrun's workers have sessions of their own and would not get it. And it removes no files. The
mark is an environment variable that every descendant inherits, so orphans and grandchildren are
found too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from reft.cli.signals import deferring
from reft.config import child_environment

SWEEP_DEADLINE_S = 15.0
MARK = "REFT_RUNTIME_DIR"  # reft reads it too, so a marked process can't use the user's own daemon


def marked(folder: Path) -> list[psutil.Process]:
    """Returns every living process whose environment names `folder`."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue  # the process has ended, or belongs to another user
    return processes


def sweep(folders: Sequence[Path]) -> None:
    """Kills every process with the mark of the first folder; then removes all folders."""
    end, is_clean = time.monotonic() + SWEEP_DEADLINE_S, False
    while not is_clean and time.monotonic() < end:
        while (processes := marked(folders[0])) and time.monotonic() < end:
            for process in processes:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            psutil.wait_procs(processes, timeout=1.0)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        # A process that was just being started shows no environment. It may write files meanwhile.
        is_clean = not marked(folders[0]) and not any(folder.exists() for folder in folders)


def start(folders: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Starts a clean-up process.

    It works when its stdin is closed: by `close`, or by the end of this process.
    """
    command = [sys.executable, "-m", "reft.cli.demo.clean_up", *map(str, folders)]
    # Its own session: Ctrl-C in the terminal must not reach it. No output: it may outlive its
    # owner's pipes.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=child_environment(),
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    """Lets a clean-up process work, and returns when that is done. Signals come afterwards."""
    assert process.stdin is not None
    with deferring():
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    sweep([Path(name) for name in sys.argv[1:]])
