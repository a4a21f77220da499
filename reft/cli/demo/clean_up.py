"""Ends what a cluster started, and removes its folders, however the cluster's owner ended: normally, or by SIGKILL.

    owner ──pipe──► keeper: waits for the pipe's end ─► SIGKILLs every process with the mark ─► removes the folders

A process of its own rather than PR_SET_PDEATHSIG: that signal must be asked for between fork and exec, which is not
safe in an owner with threads (gRPC has them); it comes when the *thread* that forked ends; torchrun's workers, which
have sessions of their own, would not get it; and it removes no files. The mark is a variable of the environment that
every descendant inherits, so orphans and grandchildren are found too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from reft.config import child_environment

SWEEP_DEADLINE_S = 15.0
MARK = "REFT_RUNTIME_DIR"  # read by reft: a marked process can't meet a daemon of this user by accident either


def marked(folder: Path) -> list[psutil.Process]:
    """Every living process whose environment names `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # gone, or somebody else's
    return found


def sweep(folders: Sequence[Path]) -> None:
    """SIGKILLs what carries the mark of the first folder, until nothing does; then removes all folders."""
    end = time.monotonic() + SWEEP_DEADLINE_S
    while (left := marked(folders[0])) and time.monotonic() < end:
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=1.0)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def start(folders: Sequence[Path]) -> subprocess.Popen[bytes]:
    """A keeper; it sweeps once its stdin is closed, by `close` or by the end of this process."""
    command = [sys.executable, "-m", "reft.cli.demo.clean_up", *map(str, folders)]
    # A session of its own: Ctrl-C in the terminal must not reach it. No output: it may outlive its owner's pipes.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=child_environment(),
    )


if __name__ == "__main__":
    sys.stdin.buffer.read()
    sweep([Path(name) for name in sys.argv[1:]])
