"""A machine with less: a small file system for a daemon, a network of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import DaemonProcess


@contextlib.contextmanager
def cramped_daemon(size: str, *flags: str) -> Iterator[DaemonProcess]:
    """Yields a daemon whose folder is a tmpfs of this size, or skips the test."""
    folder = Path(tempfile.mkdtemp(prefix="reft-test-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "reft-test", folder]
    if os.getuid() or subprocess.run(command, check=False).returncode:
        folder.rmdir()
        pytest.skip("mounting a small tmpfs needs root")
    folder.chmod(0o700)
    process = None
    try:
        process = DaemonProcess(*flags, folder=folder)
        yield process
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        if process:
            process.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def own_network(first: str = "true") -> Iterator[str]:
    """Yields the path of a network namespace in which nothing else runs, or skips the test.

    Args:
        first: a shell command that runs there before the loopback is up.
    """
    keeper = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", f"{first}; ip link set lo up && echo ready && exec cat"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "ready\n":
            pytest.skip(f"network namespaces can't be made here: {keeper.communicate()[1]}")
        yield f"/proc/{keeper.pid}/ns/net"
    finally:
        keeper.kill()
        keeper.communicate()
