"""Tests `reft-daemon --spare`: memory is allocated before it is needed, and slots take it."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from reft.core.budget import MemoryLimit
from reft.core.commit.slots import SlotState
from reft.errors import ConfigError
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import limits, pool
from reft_daemon.arena.pool import SpareFiles, SparePool
from reft_daemon.server.settings import parse_spare
from tests.support.daemons import until
from tests.support.jobs import Job, slot_path, write

MIB = 1 << 20


class Node:
    """A pool beside a simulated arena, which has only numbers."""

    def __init__(self, folder: Path, want: SpareFiles, room: int = 1 << 30) -> None:
        self.held, self.room = 0, room
        bounds = lambda: [MemoryLimit("the machine", self.room - self.pool.bytes, "less")]  # noqa: E731
        self.pool = SparePool(want, folder, lambda: self.held, bounds)

    def present(self) -> int:
        """Returns the bytes of the pool whose pages exist."""
        return sum(os.fstat(each).st_blocks * 512 for each in self.pool._ready)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def make(folder) -> Iterator[Callable[..., Node]]:
    made = []

    def node(*want: int, room: int = 1 << 30) -> Node:
        made.append(Node(folder, SpareFiles(*want), room))
        return made[-1]

    yield node
    for each in made:
        each.pool.close()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(pool, "CHUNK", 2 * MIB)


def test_a_slot_takes_a_ready_file(make, folder):
    node = make(2, 3 * MIB)
    node.pool.refill()
    assert node.present() == node.pool.bytes == 6 * MIB and node.pool.ready_bytes(5) == 6 * MIB
    assert not list(folder.iterdir()), "nothing is left behind if the daemon is killed"
    inode = os.fstat(node.pool._ready[-1]).st_ino
    (folder / "slot").write_bytes(b"left by an earlier daemon")
    for name, wanted, got in (("slot", 2 * MIB, 2 * MIB), ("longer", 4 * MIB, 3 * MIB)):
        descriptor = node.pool.take(folder / name, wanted)
        facts = os.fstat(descriptor)
        assert (facts.st_size, facts.st_blocks * 512, facts.st_mode & 0o777) == (got, got, 0o600)
        assert os.stat(folder / name).st_ino == facts.st_ino
        assert name == "longer" or facts.st_ino == inode
        assert os.read(descriptor, got) == bytes(got)
        os.close(descriptor)
    assert node.pool.take(folder / "more", MIB) is None
    assert node.pool.bytes == node.pool.ready_bytes(1) == 0


def test_the_pool_is_filled_up_to_what_the_arena_does_not_hold(make, folder):
    node = make(4, 2 * MIB)
    node.held = 3 * MIB
    node.pool.refill()
    assert node.pool.bytes == 4 * MIB
    node.held = 8 * MIB
    node.pool.refill()
    assert node.pool.bytes == 4 * MIB, "existing spare files stay"
    node.held = 0
    node.pool.refill()
    assert node.pool.bytes == node.present() == 8 * MIB


def test_files_that_do_not_fit_are_not_begun_and_logged_once(make, caplog):
    node = make(2, 4 * MIB, room=7 * MIB)
    with caplog.at_level(logging.WARNING):
        node.pool.refill()
        node.pool.refill()
    assert node.pool.bytes == node.present() == 0
    (line,) = caplog.messages
    assert "8.0 MiB" in line and "leaves 7.0 MiB" in line and "Fix: less" in line
    node.room = 9 * MIB
    node.pool.refill()
    assert node.pool.bytes == 8 * MIB


def test_free_memory_is_checked_before_each_chunk(make, monkeypatch):
    node, fill, present = make(1, 6 * MIB), pool._fill, []

    def shrinking(descriptor: int, pages: np.ndarray, begin: int) -> None:
        fill(descriptor, pages, begin)
        present.append(os.fstat(descriptor).st_blocks * 512)
        node.room = 3 * MIB  # another process took the rest

    monkeypatch.setattr(pool, "_fill", shrinking)
    node.pool.refill()
    assert present == [2 * MIB] and node.pool.bytes == 0


def test_an_unfinished_file_is_given_back(make, monkeypatch, caplog):
    node, write = make(2, 4 * MIB), os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        if len(node.pool._ready) == 1 and at == 2 * MIB:
            raise OSError(28, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    node.pool.refill()
    assert node.pool.bytes == node.present() == 4 * MIB
    assert "No space left" in caplog.text


def test_without_the_flag_there_are_no_spare_files(make, folder):
    node = make()
    node.pool.refill()
    assert node.pool.bytes == 0 and node.pool.take(folder / "slot", MIB) is None


def test_spare_memory_counts_as_free_for_slots_only():
    free, with_spare = (limits.limits(5 * MIB, 2 * MIB, spare_bytes=spare) for spare in (0, 1 << 40))
    assert with_spare[0].free_bytes > free[0].free_bytes + (1 << 39)
    assert with_spare[1] == free[1], "--memory bounds slots, wherever their pages come from"


@pytest.mark.parametrize("text", ["64GiB", "x1MiB", "2x", "-2x1MiB", "2 x", "2xlarge", "²x1MiB", "9999999x1T"])
def test_an_invalid_spare_flag_is_refused(text):
    assert parse_spare("3x2MiB") == SpareFiles(3, 2 * MIB) and parse_spare("") == SpareFiles()
    with pytest.raises(ConfigError):
        parse_spare(text)


def spare_of(daemon) -> tuple[int, int]:
    status = daemon.call("Status", pb.StatusRequest())
    return status.spare_bytes, status.spare_limit_bytes


def test_a_standby_daemon_has_slots_ready_and_its_first_arena_takes_them(start, trainer):
    daemon = start("--spare", "3x4MiB")
    until(lambda: spare_of(daemon) == (12 * MIB, 12 * MIB), what="spare memory")
    ready = nameless(daemon.process.pid)
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer, slots=2)
    assert spare_of(daemon)[0] == 4 * MIB
    assert {os.stat(slot_path(daemon, name)).st_ino for name in names} < ready
    for slot in job.maps(0, names):
        write(slot, job.version(1))
    assert {state for state, _ in job.headers().values()} == {SlotState.SEALED}


def nameless(pid: int) -> set[int]:
    """Returns the inodes of the daemon's unnamed files."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the socket of a call may close meanwhile
            target = os.readlink(descriptor)
            if target.endswith("(deleted)") and "/reft-test-" in target:
                found.add(os.stat(descriptor).st_ino)
    return found


def test_a_daemon_without_memory_for_spare_files_serves(start, trainer):
    daemon = start("--spare", "2x4MiB", "--memory", "6MiB")
    until(lambda: "spare files take 0 B of the 8.0 MiB wanted" in daemon.log.read_text(), what="the log line")
    assert spare_of(daemon) == (0, 8 * MIB)
    assert Job([(daemon, [0])]).decide().lease(0, trainer)
