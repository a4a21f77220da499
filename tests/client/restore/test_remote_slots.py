"""A slot on another node is read in ranges; a node that stops sending ends the load, and is named.

A server in this process stands for this node's daemon, which passes the other node's bytes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import xxhash

from reft.client.restore.executor import THREADS, LoadReport
from reft.client.restore.remote_slots import RemoteSlots
from reft.core.commit.slots import SlotState
from reft.core.recovery.plan import TransferSizes
from reft.core.recovery.recovery import HeldSlot
from reft.errors import FormatError, RestoreError
from reft.wire import rpc
from reft.wire.slot_format import PAGE, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.loads import CLEAN, SMALL, Job
from tests.support.shards import VERSION, Postbox

FAR = 2  # the old rank whose slot lies on a node without ranks
NODES = {"node0": [0], "node1": [1], "new": [FAR]}
DEADLINE_S = 1.0  # for nodes that stop; all others have more time
MESSAGE = 1000  # bytes; odd, so that ranges end within messages


class PassingOn(pb_grpc.DaemonServicer):
    """Sends a slot's bytes.

    Attributes:
        slot: all bytes of the slot's file.
        asked: the requests.
        stops_after: bytes of data after which nothing more comes; None: never.
        code: the status with which the call then ends; None: it does not end.
        released: ends a stream that has stopped.
        capsule_digests: the digests that the next capsules are sent with.
    """

    def __init__(self, slot: SlotMap) -> None:
        self.slot, self.asked, self.released = slot, list[pb.ReadRequest](), threading.Event()
        self.stops_after: int | None = None
        self.code: grpc.StatusCode | None = None
        self.capsule_digests: list[int] = []

    def Read(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> Iterator[pb.Chunk]:
        self.asked.append(request)
        data = self.slot._slot[request.offset : request.offset + request.size]
        for begin in range(0, request.size, MESSAGE):
            at = request.offset + begin - self.slot.header.geometry.data_offset
            if self.stops_after is not None and at >= self.stops_after:
                if self.code is not None:
                    context.abort(self.code, "node far: a chunk is damaged")
                self.released.wait(60)
                return
            yield pb.Chunk(data=data[begin : begin + MESSAGE].tobytes())

    def FetchCapsule(self, request: pb.CapsuleRequest, context: grpc.ServicerContext) -> pb.CapsuleRecord:
        digest = self.capsule_digests.pop(0) if self.capsule_digests else 0
        return pb.CapsuleRecord(rank=request.rank, capsule=b"tree", capsule_digest=digest)


@contextmanager
def far_slot(folder: Path, world: int, old: int, deadline_s: float = 20.0) -> Iterator[SimpleNamespace]:
    """Yields a job; the slot of one old rank is read from another node, each part in time."""
    job = Job(world, "none", 0)
    servicer = PassingOn(job.slots[old])
    server = grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_DaemonServicer_to_server(servicer, server)
    address = f"unix:{folder}/d.sock"
    server.add_insecure_port(address)
    server.start()
    remote = RemoteSlots(
        "job", address, "new", {"node2": pb.Node(id="node2", name="far-7")}, deadline_s, rpc.DaemonCalls()
    )
    source = HeldSlot("node2", old, "slot", SlotState.SEALED, VERSION)
    with rpc.channel(address) as channel:
        job.slots[old] = remote.slot(source, channel)
        opened = list(servicer.asked)
        servicer.asked.clear()
        yield SimpleNamespace(job=job, servicer=servicer, opened=opened, remote=remote, source=source, channel=channel)
    servicer.released.set()
    server.stop(None)


@pytest.fixture
def far(tmp_path) -> Iterator[SimpleNamespace]:
    """A job of three ranks."""
    with far_slot(tmp_path, 3, FAR) as job:
        yield job


def test_a_load_reads_ranges_of_a_slot_on_another_node(far):
    assert far.job.load(nodes=NODES) == [CLEAN] * 3
    assert far.job.is_whole()
    geometry = far.servicer.slot.header.geometry
    assert [(each.offset, each.size) for each in far.opened] == [(0, 2 * PAGE), (0, geometry.data_offset)]
    assert far.servicer.asked and all(each.size <= max(SMALL.piece, PAGE) for each in far.servicer.asked)
    ranges = sorted((each.offset, each.offset + each.size) for each in far.servicer.asked)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "each byte once"
    assert {each.node.id for each in far.servicer.asked} == {"node2"}


def test_a_changed_byte_of_a_slot_on_another_node_is_damage(far):
    far.servicer.slot.data[PAGE + 5] ^= 1
    assert far.job.load(nodes=NODES) == [CLEAN, CLEAN, LoadReport((FAR,))]


def test_damage_that_the_other_node_finds_is_damage(far):
    far.servicer.stops_after, far.servicer.code = 2 * PAGE, grpc.StatusCode.DATA_LOSS
    reports = far.job.load(nodes=NODES)
    assert [report.damaged for report in reports] == [(), (), (FAR,)]


def test_a_slot_without_its_end_is_damage(far):
    far.servicer.stops_after = 2 * PAGE + 100
    far.servicer.released.set()
    assert [report.damaged for report in far.job.load(nodes=NODES)] == [(), (), (FAR,)]


@pytest.mark.parametrize("stops_after", [0, 5 * PAGE + MESSAGE])
def test_a_node_that_stops_in_mid_stream_is_named_within_the_deadline(tmp_path, stops_after):
    with far_slot(tmp_path, 3, FAR, DEADLINE_S) as far:
        far.servicer.stops_after = stops_after
        # The others wait longer for its messages, and this server for a minute.
        results = far.job.load(nodes=NODES, box=Postbox(deadline_s=4 * DEADLINE_S))
    assert all(isinstance(result, RestoreError) for result in results), results
    assert str(results[FAR]).startswith(f"the data of rank {FAR} on node far-7 cannot be read: ")
    assert "did not answer in time" in str(results[FAR])


def test_reads_that_wait_for_a_stopped_node_are_dropped(tmp_path):
    """Else each of them would wait for one more deadline."""
    with far_slot(tmp_path, 2, 1, DEADLINE_S) as far:
        far.servicer.stops_after = 0
        box, sizes = Postbox(deadline_s=DEADLINE_S), TransferSizes(piece=4096, ahead=1 << 20)
        results = far.job.load(nodes={"node0": [0], "new": [1]}, box=box, sizes=sizes)
        assert isinstance(results[1], RestoreError)
        assert len(far.servicer.asked) <= 2 * THREADS, "those that began, and those begun before the error was seen"


def test_a_node_that_stops_while_its_slot_is_opened_is_named(tmp_path):
    with far_slot(tmp_path, 3, FAR, DEADLINE_S) as far:
        far.servicer.stops_after = -far.servicer.slot.header.geometry.data_offset
        with pytest.raises(RestoreError, match=f"the data of rank {FAR} on node far-7 cannot be read"):
            far.remote.slot(far.source, far.channel)


def test_bytes_go_into_all_targets_in_turn(far):
    data = far.servicer.slot._slot
    outs = [data[:n].copy() * 0 for n in (1, 0, MESSAGE, 3 * MESSAGE + 7, 5)]
    far.remote.read(far.source, far.channel, 100, *outs)
    at = 100
    for out in outs:
        assert (out == data[at : at + out.nbytes]).all()
        at += out.nbytes
    with pytest.raises(FormatError, match=r"gave \d+ of 4000 bytes"):
        far.servicer.released.set()
        far.servicer.stops_after = -far.servicer.slot.header.geometry.data_offset + 500
        far.remote.read(far.source, far.channel, 0, data[:4000].copy())


def test_a_capsule_that_changed_on_its_way_is_read_once_more_and_then_refused(far):
    right, wrong = (xxhash.xxh3_64_intdigest(each) for each in (b"tree", b"free"))
    far.servicer.capsule_digests = [wrong, wrong, wrong, right, right]
    with pytest.raises(FormatError, match="has a wrong digest"):
        far.remote.capsule("node2", FAR, VERSION)
    assert far.remote.capsule("node2", FAR, VERSION).capsule == b"tree"
    assert far.servicer.capsule_digests == [right], "read once more"


def test_a_capsule_is_read_once_the_daemon_is_back(far, tmp_path):
    """A connection that has failed is not used again: gRPC fails its calls for up to a second."""
    remote = replace(far.remote, address=f"unix:{tmp_path}/later.sock", own="node2")
    with pytest.raises(RestoreError, match="no daemon answers"):
        remote.capsule("node2", FAR, VERSION)
    server = grpc.server(ThreadPoolExecutor(1))
    pb_grpc.add_DaemonServicer_to_server(far.servicer, server)
    server.add_insecure_port(remote.address)
    server.start()
    assert remote.capsule("node2", FAR, VERSION).rank == FAR
    remote.calls.close()
    server.stop(None)
