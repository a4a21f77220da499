"""Tests reads from another node through the node's own daemon: trainers have no certificates."""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from reft.client.restore import remote_slots
from reft.client.restore.remote_slots import REMOTE_BYTES_PER_S, RemoteSlots, remote_read_s
from reft.core.commit.slots import SlotState
from reft.core.recovery.recovery import HeldSlot
from reft.errors import FormatError, RestoreError
from reft.wire import messages, rpc
from reft.wire.slot_format import PAGE
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.certificates import Certificates, why_not
from tests.support.jobs import Code, Job, refused, tcp_call, write

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
DATA_BYTES = 5 << 20  # several messages of the stream


@pytest.fixture
def job(start, tmp_path) -> Job:
    """Two nodes that reach each other only over TCP; rank 1 has sealed step 3."""
    flags = Certificates(tmp_path).flags("ours")
    job = Job([(start("--listen", "127.0.0.1:0", *flags), [rank]) for rank in range(2)])
    job.decide()
    (slot,) = job.slots(1, slots=1, data_bytes=DATA_BYTES)
    write(slot, job.version(3))
    return job


def held(job: Job) -> HeldSlot:
    (header,) = job.daemons[1].call("Inventory", pb.InventoryRequest(job="job")).slots
    return HeldSlot(job.hellos[1].node_id, 1, header.slot, SlotState.SEALED, job.version(3))


def remote(job: Job) -> RemoteSlots:
    nodes = {node.id: node for node in job.manifest.nodes}
    return RemoteSlots("job", job.daemons[0].address, job.hellos[0].node_id, nodes, 10.0, rpc.DaemonCalls())


@pytest.fixture
def channel(job) -> Iterator[grpc.Channel]:
    with rpc.channel(job.daemons[0].address) as channel:
        yield channel


def test_the_data_of_a_slot_come_from_another_node_range_by_range(job, channel):
    there = job.daemons[1].folder / "job" / held(job).slot
    slot = remote(job).slot(held(job), channel)
    assert slot.header.version == job.version(3)
    assert not slot.data.any(), "nothing of the data is copied in advance"
    parts = [np.zeros(n, np.uint8) for n in (5, 0, 3 << 20, 7)]
    slot.read(1000, *parts)
    data = there.read_bytes()[-slot.data.nbytes :]
    assert b"".join(part.tobytes() for part in parts) == data[1000 : 1000 + sum(part.nbytes for part in parts)]
    assert slot.bad_chunks() == []


def test_a_capsule_comes_from_another_node_or_from_the_own(job):
    for node, rank in ((1, 0), (0, 1)):
        version = messages.version_to(job.version(3))
        record = pb.CapsuleRecord(rank=rank, version=version, capsule=f"of {rank}".encode())
        keep = pb.KeepRequest(job="job", epoch=job.epoch, capsules=[record])
        with rpc.channel(job.daemons[node].address) as channel:
            pb_grpc.PeerStub(channel).Keep(keep, timeout=10)
        assert remote(job).capsule(job.hellos[node].node_id, rank, job.version(3)).capsule == record.capsule


def test_a_missing_slot_or_capsule_is_named(job, channel):
    with pytest.raises(
        FormatError, match=r"the data of rank 0 on node n1 cannot be read: node n1: no capsule of rank 0"
    ):
        remote(job).capsule(job.hellos[1].node_id, 0, job.version(3))
    gone = held(job)
    os.truncate(job.daemons[1].folder / "job" / gone.slot, DATA_BYTES)
    with pytest.raises(FormatError, match=r"the data of rank 1 on node n1 cannot be read: .*was cut"):
        remote(job).slot(gone, channel)
    job.daemons[1].kill()
    for read in (
        lambda: remote(job).slot(gone, channel),
        lambda: remote(job).capsule(gone.node, 0, job.version(3)),
    ):
        with pytest.raises(RestoreError, match="node n1 can't be reached"):
            read()


def test_the_deadline_of_a_read_grows_with_its_bytes(job, channel, monkeypatch):
    given = []

    class Stub(pb_grpc.DaemonStub):
        def __init__(self, channel: grpc.Channel) -> None:
            super().__init__(channel)
            read = self.Read
            self.Read = lambda request, timeout: given.append((request.size, timeout)) or read(request, timeout=timeout)

    monkeypatch.setattr(remote_slots.pb_grpc, "DaemonStub", Stub)
    slot = remote(job).slot(held(job), channel)
    slot.read(0, np.zeros(2 << 20, np.uint8))
    assert [size for size, _ in given] == [2 * PAGE, slot.header.geometry.data_offset, 2 << 20]
    assert [timeout for _, timeout in given] == [10.0 + size / REMOTE_BYTES_PER_S for size, _ in given]


def test_all_ranks_wait_for_the_rank_that_reads_most_from_other_nodes():
    def at(node: str, rank: int, nbytes: int) -> HeldSlot:
        return HeldSlot(node, rank, "s", SlotState.SEALED, None, data_bytes=nbytes)

    sources = {0: at("a", 0, 7 << 30), 1: at("gone", 1, 1 << 30), 2: at("gone", 2, 1 << 30), 3: at("a", 3, 3 << 30)}
    nodes = {"a": [0, 1], "b": [2, 3]}
    assert remote_read_s(sources, {0: 0, 1: 1, 2: 2, 3: 3}, nodes) == (3 << 30) / REMOTE_BYTES_PER_S
    assert remote_read_s(sources, {0: 0, 1: 1, 2: 1, 3: 1}, nodes) == (2 << 30) / REMOTE_BYTES_PER_S
    assert remote_read_s({0: sources[0]}, {0: 0}, nodes) == remote_read_s({}, {}, nodes) == 0


def test_calls_over_tcp_are_not_forwarded(start):
    job = Job([(start("--listen", "127.0.0.1:0"), [rank]) for rank in range(2)]).decide()
    address, token = job.hellos[0].addresses[0], job.manifest.token
    version, node = messages.version_to(job.version(3)), job.manifest.nodes[1]
    with refused(Code.PERMISSION_DENIED, "only callers at the unix socket"):
        tcp_call(address, "FetchCapsule", pb.CapsuleRequest(job="job", version=version, node=node), token)
    with refused(Code.PERMISSION_DENIED, "only callers at the unix socket"):
        tcp_call(address, "Read", pb.ReadRequest(job="job", slot="s", node=node), token)
