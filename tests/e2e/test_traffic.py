"""What a snapshot costs: bytes between nodes, counted by the kernel, and bytes in a rank's slot.

The state of `tests.support.train_mlp` has a closed formula at every width. The expected bytes are
computed here from the formula, not by the tested code.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from reft.core.commit.slots import SlotState
from reft.core.membership.failure_detector import BEAT_S
from reft.core.membership.gossip_targets import REACH
from reft.wire.slot_format import Header, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import slot_path
from tests.support.trainers import Spec, Trainers

WARM = 5  # snapshots before the count begins: connections open, and ranks compare all bytes
SLOTS = 3
CHUNK = 256 << 10  # bytes: the default
# Bytes of one snapshot beside capsules and digests. Measured for one neighbour: 180 to 810 bytes of
# frames, and 1900 on busy cores.
RECORD_BYTES = 48  # rank, version, sizes and tags of a capsule's record
KEEP_BYTES = 48  # job and epoch of the message that carries records
OUTCOME_BYTES = 40  # of one outcome; a parent sends a child two for a step: open, and whole
REPORT_BYTES = 50  # of one report to the parent: a step is open, or all ranks below have sealed it
REPEAT_S = 0.3  # a report is sent again after this time, until the step is decided
FRAMES_BYTES = 3200  # HTTP/2 frames and replies with one neighbour, for one rank of the node
# A node sends one heartbeat every BEAT_S to each of at most four nodes, with any number of nodes.
BEAT_BYTES = 150  # of one heartbeat: job, round, two ids, and the node's own report
HEARD_BYTES = 30  # of one heartbeat, for each neighbour: when it was last heard
BEAT_FRAMES = 500  # HTTP/2 frames of one heartbeat, and the reply to a neighbour's heartbeat
CAPSULE_VARIES = 0.01  # capsules of the same state differ in the digits of their numbers


@dataclass(frozen=True)
class Case:
    """One job: a rank writes shards of stripes of k data and f parity shards.

    Attributes:
        nodes: number of nodes, each with its own daemon.
        each: ranks on a node.
        f: number of node losses to survive.
        w: packets of a shard: 1 for XOR and copies, 2 for EVENODD with k = 2.
        width: of the model.
        snapshots: number of snapshots that are counted.
    """

    nodes: int
    each: int
    f: int
    w: int
    width: int
    snapshots: int

    @property
    def k(self) -> int:
        return self.nodes - self.f

    @property
    def world(self) -> int:
        return self.nodes * self.each

    # The state

    @property
    def leaves(self) -> list[int]:
        """Bytes of each replicated leaf: fp32 parameters, AdamW's moments and step counter."""
        width = self.width
        linear = [16 * width, width, width * width, width, width * 4, 4]
        return [nbytes for n in [*linear, width, width] for nbytes in (4 * n, 4 * n, 4 * n, 4)]

    @property
    def inline_leaves(self) -> int:
        """Bytes of the leaves that differ by rank, because forward writes them.

        BatchNorm's mean, variance and counter of batches.
        """
        return 2 * 4 * self.width + 8

    # The formula: |P| (k + f) / (D k), with its padding

    @property
    def padding(self) -> int:
        """Bytes between the leaves: each leaf begins at a multiple of 64."""
        return sum(up(nbytes, 64) - nbytes for nbytes in self.leaves)

    def shard(self, rank: int) -> int:
        """Returns the bytes of one shard of a rank.

        Each rank of a node gets an equal lane of the cell.
        A lane is cut into D k shards of w packets.
        """
        units = sum(up(nbytes, 64) for nbytes in self.leaves) // 64
        index = rank % self.each
        lane = (units * (index + 1) // self.each - units * index // self.each) * 64
        return self.w * up(-(-lane // (self.nodes * self.k * self.w)), 8)

    def sections(self, rank: int) -> list[tuple[int, int]]:
        """Returns begin and size of the rank's data shards, and of its parity.

        They count in the slot.
        """
        data, parity = self.k * self.shard(rank), self.f * self.shard(rank)
        return [(0, data), (up(data, CHUNK), parity)]

    def chunks(self, rank: int) -> int:
        return sum(up(nbytes, CHUNK) // CHUNK for _, nbytes in self.sections(rank))


def up(nbytes: int, to: int) -> int:
    """Returns the next multiple of `to`."""
    return -(-nbytes // to) * to


SMALL, LARGE = Case(3, 1, 1, 1, 64, 40), Case(3, 1, 1, 1, 512, 40)
TWO_LOST = Case(4, 1, 2, 2, 64, 10)
TWO_EACH = Case(2, 2, 1, 1, 128, 10)
CASES = [SMALL, LARGE, TWO_LOST, TWO_EACH]
each_case = pytest.mark.parametrize("case", CASES, ids=["small", "large", "two lost", "two ranks a node"])


@dataclass(frozen=True)
class Sent:
    """The bytes that a daemon has sent until now.

    Attributes:
        sockets: connection → bytes by the kernel's count, for all established TCP connections.
        capsules, round, beats: bytes by the daemon's own count.
        beat_count: number of heartbeats.
        at_s: time of this count, by the monotonic clock.
    """

    sockets: dict[str, int]
    capsules: int
    round: int
    beats: int
    beat_count: int
    at_s: float


@dataclass(frozen=True)
class Done:
    """A job that has ended.

    Attributes:
        sent: for each node, its counts before and after.
        results: for each rank, its result.
        slots: for each rank, its slots.
    """

    sent: list[tuple[Sent, Sent]]
    results: list[dict[str, Any]]
    slots: list[list[SlotMap]]

    def newest(self, rank: int) -> Header:
        sealed = [slot.header for slot in self.slots[rank] if slot.header.state is SlotState.SEALED]
        return max(sealed, key=lambda header: header.seq)


@contextmanager
def started(count: int) -> Iterator[list[DaemonProcess]]:
    """Yields daemons that reach each other over TCP."""
    daemons: list[DaemonProcess] = []
    try:
        for _ in range(count):
            daemons.append(DaemonProcess("--listen", "127.0.0.1:0"))
        yield daemons
    finally:
        for daemon in daemons:
            daemon.close()


@functools.cache
def trained(case: Case) -> Done:
    """Runs a job whose steps all become whole; returns its counts, results and slots."""
    last = WARM + case.snapshots
    # Each step is sealed before the next begins, so no step is skipped. At a pause no message is
    # under way.
    options = {"width": case.width, "tolerate": case.f, "slots": SLOTS, "pause_at": [WARM, last],
               "seal_at": list(range(1, last + 1))}  # fmt: skip
    with started(case.nodes) as daemons:
        daemon_of_rank = [daemon for daemon in daemons for _ in range(case.each)]
        trainers = Trainers(
            Spec("", steps=last + 1, options=options), case.world, [daemon.address for daemon in daemon_of_rank]
        )
        counts = []
        for step in (WARM, last):
            trainers.wait_for(step)
            for daemon in daemons:
                until(lambda daemon=daemon, step=step: daemon.status("job").whole == step, what=f"whole({step})")
            counts.append([sent_by(daemon) for daemon in daemons])
            trainers.let_go(step)
        assert trainers.wait() == [0] * case.world, trainers.errors()[-3000:]
        slots = [
            [SlotMap(np.fromfile(slot_path(home, f"rank-{rank}.slot-{i}"), np.uint8)) for i in range(SLOTS)]
            for rank, home in enumerate(daemon_of_rank)
        ]
    return Done(list(zip(*counts, strict=True)), trainers.results(), slots)


def sent_by(daemon: DaemonProcess) -> Sent:
    status = daemon.call("Status", pb.StatusRequest())
    return Sent(
        tcp_bytes(status.pid), status.capsule_bytes_sent, status.round_bytes_sent, status.beat_bytes_sent,
        status.beats_sent, time.monotonic(),
    )  # fmt: skip


def tcp_bytes(pid: int) -> dict[str, int]:
    """Returns connection → bytes sent, for a process's established TCP connections.

    Unix sockets do not count.
    """
    if not shutil.which("ss"):
        return {}
    command = ["ss", "-tinHpO", "state", "established"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    bytes_by_connection = {}
    for line in done.stdout.splitlines():
        if f"pid={pid}," in line:
            count = re.search(r"\bbytes_sent:(\d+)", line)
            bytes_by_connection[" ".join(line.split()[2:4])] = int(count[1]) if count else 0  # ss leaves out a zero
    return bytes_by_connection


@dataclass(frozen=True)
class Traffic:
    """A node's average bytes for one snapshot.

    `owed` has the bytes that it had to send to each holder.

    Attributes:
        tcp: on all TCP connections.
        capsules: in messages that carry capsules.
        round: in the messages of the round.
        beats: in heartbeats.
        beat_count: number of heartbeats.
        seconds: the time of one snapshot.
        owed: the capsules of the node's ranks, and 8 bytes for each of their chunks.
    """

    tcp: float
    capsules: float
    round: float
    beats: float
    beat_count: float
    seconds: float
    owed: int


def traffic(case: Case, node: int) -> Traffic:
    done = trained(case)
    before, after = done.sent[node]
    # No connection was closed: its count would be missing.
    assert before.sockets.keys() <= after.sockets.keys()
    tcp = sum(after.sockets.values()) - sum(before.sockets.values())
    ranks = range(node * case.each, (node + 1) * case.each)
    owed = sum(done.newest(rank).capsule_bytes + 8 * case.chunks(rank) for rank in ranks)
    n = case.snapshots
    return Traffic(
        tcp / n, (after.capsules - before.capsules) / n, (after.round - before.round) / n,
        (after.beats - before.beats) / n, (after.beat_count - before.beat_count) / n, (after.at_s - before.at_s) / n, owed,
    )  # fmt: skip


@each_case
def test_every_step_became_whole(case):
    for result in trained(case).results:
        steps = WARM + case.snapshots + 1
        assert (result["stats"]["snapshots"], result["stats"]["skipped"]) == (steps, 0)
        assert result["sealed"] == [True, steps]


@each_case
def test_daemons_send_only_capsules_digests_and_the_round(case):
    for node in range(case.nodes):
        node_traffic = traffic(case, node)
        least, most = case.f * node_traffic.owed, case.f * (node_traffic.owed + case.each * RECORD_BYTES + KEEP_BYTES)
        # The capsule of a late rank travels in its own message.
        most += case.f * (case.each - 1) * KEEP_BYTES
        assert least * (1 - CAPSULE_VARIES) <= node_traffic.capsules <= most * (1 + CAPSULE_VARIES)
        # Busy cores make the step longer, so reports are repeated more often.
        report_bytes = 2 * REPORT_BYTES * (1 + node_traffic.seconds / REPEAT_S)
        assert 0 < node_traffic.round <= (report_bytes if node else 2 * OUTCOME_BYTES * (case.nodes - 1))


@each_case
def test_heartbeats_have_a_limited_rate_and_size(case):
    """The bytes depend neither on the state nor on the number of steps.

    A node sends heartbeats to at most four nodes.
    """
    neighbours = min(case.nodes - 1, 2 * REACH)
    for node in range(case.nodes):
        node_traffic = traffic(case, node)
        # Two more heartbeats: at the begin and the end of the count.
        assert node_traffic.beat_count * case.snapshots <= neighbours * (
            node_traffic.seconds * case.snapshots / BEAT_S * 1.25 + 2
        )
        assert node_traffic.beats <= node_traffic.beat_count * (BEAT_BYTES + HEARD_BYTES * neighbours)


@pytest.mark.skipif(
    not shutil.which("ss"), reason="ss of iproute2 is missing: no other tool prints the bytes sent on a socket"
)
@each_case
def test_sockets_send_no_more_bytes_than_the_daemons_count(case):
    for node in range(case.nodes):
        node_traffic = traffic(case, node)
        counted_bytes = node_traffic.capsules + node_traffic.round + node_traffic.beats
        beats = BEAT_FRAMES * (node_traffic.beat_count + 2 * case.nodes / case.snapshots)
        assert counted_bytes <= node_traffic.tcp <= counted_bytes + FRAMES_BYTES * (case.nodes - 1) * case.each + beats


def test_a_larger_state_sends_only_more_inline_leaves_and_digests():
    """No byte of a replicated leaf moves between nodes.

    The state is 49 times larger. The traffic grows only by inline leaves and digests.
    """
    growth = sum(LARGE.leaves) - sum(SMALL.leaves)
    assert sum(LARGE.leaves) > 20 * sum(SMALL.leaves)
    for node in range(SMALL.nodes):
        small, large = traffic(SMALL, node), traffic(LARGE, node)
        more = LARGE.inline_leaves - SMALL.inline_leaves + 8 * (LARGE.chunks(node) - SMALL.chunks(node))
        digits = CAPSULE_VARIES * small.owed
        assert abs(large.capsules - small.capsules - more) <= digits
        assert abs(large.round - small.round) <= 2 * REPORT_BYTES * (1 + large.seconds / REPEAT_S)
        # Replies and frames depend on the load of the cores, but vary by less than a thousandth of
        # the state.
        beats = large.beats + BEAT_FRAMES * (large.beat_count + 2 * LARGE.nodes / LARGE.snapshots)
        assert large.tcp - small.tcp <= more + growth / 1000 + beats


@each_case
def test_a_rank_writes_the_bytes_of_the_formula(case):
    written = [result["stats"]["bytes"] for result in trained(case).results]
    for rank, nbytes in enumerate(written):
        most = (case.k + case.f) * case.shard(rank) + case.inline_leaves
        # Padding between leaves, and behind the last leaf, is not written again in each snapshot.
        tail = case.nodes * case.k * (8 * case.w)
        assert most - case.padding - tail <= nbytes <= most
        bytes_of_rank = sum(case.leaves) * (case.k + case.f) / (case.nodes * case.k * case.each)
        assert nbytes - case.inline_leaves == pytest.approx(bytes_of_rank, abs=case.padding + tail)
    # All ranks together write every live byte of the state once, and the parity.
    parity = sum(case.f * case.shard(rank) for rank in range(case.world))
    assert sum(written) == sum(case.leaves) + parity + case.world * case.inline_leaves


@each_case
def test_slots_are_zero_beyond_the_formula(case):
    done = trained(case)
    for rank in range(case.world):
        assert done.newest(rank).data_bytes == case.chunks(rank) * CHUNK
        for slot in done.slots[rank]:
            assert slot.header.state is SlotState.SEALED and slot.bad_chunks() == []
            rest = slot.data.copy()
            for begin, nbytes in case.sections(rank):
                assert rest[begin : begin + nbytes].any()
                rest[begin : begin + nbytes] = 0
            assert not rest.any()
