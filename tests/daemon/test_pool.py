"""`reft-daemon --spare`: memory that is there before it is needed, and goes to the slots."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft.core.budget import Limit
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon import memory, pool
from reft_daemon.pool import Pool
from tests.daemon.jobs import Job
from tests.support.daemons import until

MIB = 1 << 20


class Node:
    """A pool beside an arena that is only numbers."""

    def __init__(self, want: int, room: int = 1 << 30) -> None:
        self.held, self.room = 0, room
        self.pool = Pool(want, lambda: self.held, lambda: [Limit("the machine", self.room - self.pool.bytes, "less")])

    def present(self) -> int:
        """Bytes of the pool whose pages exist."""
        return os.fstat(self.pool._descriptor).st_blocks * 512


@pytest.fixture
def file(tmp_path) -> Iterator[int]:
    descriptor = os.memfd_create("slot")
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(pool, "CHUNK", 2 * MIB)


def test_a_slot_takes_what_is_ready_and_the_rest_anew(file, monkeypatch):
    node = Node(7 * MIB)
    node.pool.refill()
    assert node.present() == node.pool.bytes == 7 * MIB
    most = []
    allocate = os.posix_fallocate

    def watched(descriptor: int, at: int, count: int) -> None:
        allocate(descriptor, at, count)
        most.append(node.present() + os.fstat(descriptor).st_blocks * 512)

    monkeypatch.setattr(os, "posix_fallocate", watched)
    node.pool.allocate(file, 5 * MIB)
    assert most == [7 * MIB] * 3, "each piece is let go before the slot grows by it"
    assert node.present() == node.pool.bytes == 2 * MIB
    node.pool.allocate(file, 9 * MIB)
    assert (node.pool.bytes, os.fstat(file).st_blocks * 512) == (0, 9 * MIB)


def test_it_is_filled_up_to_what_the_arena_does_not_hold():
    node = Node(8 * MIB)
    node.held = 3 * MIB + 4096
    node.pool.refill()
    assert node.pool.bytes == 5 * MIB - 4096
    node.held = 8 * MIB
    node.pool.refill()
    assert node.pool.bytes == 5 * MIB - 4096, "what is there stays"
    node.held = 0
    node.pool.refill()
    assert node.pool.bytes == node.present() == 8 * MIB


def test_what_does_not_fit_is_not_begun_and_is_said_once(caplog):
    node = Node(8 * MIB, room=7 * MIB)
    with caplog.at_level(logging.WARNING):
        node.pool.refill()
        node.pool.refill()
    assert node.pool.bytes == node.present() == 0
    (line,) = caplog.messages
    assert "8.0 MiB" in line and "leaves 7.0 MiB" in line and "Fix: less" in line
    node.room = 9 * MIB
    node.pool.refill()
    assert node.pool.bytes == 8 * MIB


def test_without_the_flag_there_is_none(file):
    node = Node(0)
    node.pool.refill()
    node.pool.allocate(file, MIB)
    assert node.pool.bytes == 0 and os.fstat(file).st_blocks * 512 == MIB
    node.pool.close()


def test_spare_memory_is_free_for_slots_and_counts_for_nobody_else():
    free, with_spare = (memory.limits(5 * MIB, 2 * MIB, spare_bytes=spare) for spare in (0, 1 << 40))
    assert with_spare[0].free_bytes > free[0].free_bytes + (1 << 39)
    assert with_spare[1] == free[1], "--memory bounds slots, wherever their pages come from"


def spare_of(daemon) -> tuple[int, int]:
    status = daemon.call("Status", pb.StatusRequest())
    return status.spare_bytes, status.spare_limit_bytes


def shared_memory(daemon) -> int:
    """Bytes of memfds and tmpfs files that the daemon holds open."""
    found = 0
    for each in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        if "memfd:reft-spare" in os.readlink(each):
            found += each.stat().st_blocks * 512
    return found


def test_a_standby_daemon_has_memory_ready_and_its_first_arena_takes_it(start, trainer):
    daemon = start("--spare", "8MiB")
    until(lambda: spare_of(daemon) == (8 * MIB, 8 * MIB), what="spare memory")
    assert shared_memory(daemon) == 8 * MIB
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer.pid)
    held = daemon.call("Status", pb.StatusRequest()).held_bytes
    assert 0 < held < 8 * MIB
    assert spare_of(daemon)[0] == 8 * MIB - held == shared_memory(daemon)


def test_a_daemon_without_room_for_its_spare_memory_serves(start, trainer):
    daemon = start("--spare", "8MiB", "--memory", "6MiB")
    until(lambda: "spare memory stays at 0 B of 8.0 MiB" in daemon.log.read_text(), what="the line that says so")
    assert spare_of(daemon) == (0, 8 * MIB)
    assert Job([(daemon, [0])]).decide().lease(0, trainer.pid)
