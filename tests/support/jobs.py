"""Acts as a job's trainers: manifest, decision, leases, slots written in place, reports."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import Layout, Leaf, pack
from reft.failpoints import Failpoints
from reft.wire import capsule_format, local_socket, messages, rpc
from reft.wire.slot_format import SlotMap
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.slices import run_at_once
from reft_daemon.jobs import epochs
from reft_daemon.jobs.capsule_replication import NodePlacement
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.membership.retention import RetentionTimes
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.registry import Registry
from tests.support.daemons import DaemonProcess
from tests.support.proving import ProvingCaller
from tests.support.saying import report_of
from tests.support.trainer_forks import Trainer

CHUNK = 4096
CAPSULE = capsule_format.encode({"compared": {}})
Code = grpc.StatusCode


class Refused(grpc.RpcError):
    """A report that the daemon refused."""

    def __init__(self, reply: pb.LocalReply) -> None:
        super().__init__(reply.error)
        self.reply = reply

    def code(self) -> grpc.StatusCode:
        return rpc.CODES[self.reply.status]

    def details(self) -> str:
        return self.reply.error


@contextmanager
def refused(code: grpc.StatusCode, text: str = "") -> Iterator[None]:
    """Expects that a call or a report ends with this status. The message has `text` in it."""
    with pytest.raises(grpc.RpcError) as error:
        yield
    assert error.value.code() is code, error.value.details()
    assert text in error.value.details()


def layout_of(nbytes: int) -> Layout:
    return pack([Leaf("w", "uint8", (nbytes,), (1,), nbytes, False, (nbytes,), (0,))])


def epoch_of(counter: int) -> Epoch:
    return Epoch(counter, bytes([counter]) * 16)


class Job:
    """One job on one or several daemons.

    Args:
        nodes: each daemon with its ranks.
        name: the job's name.
        **facts: further fields of the manifest.
    """

    def __init__(
        self, nodes: Sequence[tuple[DaemonProcess, Sequence[int]]], name: str = "job", **facts: object
    ) -> None:
        self.daemons = [daemon for daemon, _ in nodes]
        self.home = {rank: i for i, (_, ranks) in enumerate(nodes) for rank in ranks}
        hellos = [daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)) for daemon in self.daemons]
        self.hellos = hellos
        self.counter = 0
        self.manifest = pb.Manifest(
            job=name, named=True, token=bytes(range(100, 132)), world=len(self.home), every=1, launch="launch",
            nodes=[
                pb.Node(name=f"n{i}", id=hellos[i].node_id, addresses=hellos[i].addresses, ranks=ranks)
                for i, (_, ranks) in enumerate(nodes)
            ],
        )  # fmt: skip
        self.manifest.MergeFrom(pb.Manifest(**facts))

    @property
    def name(self) -> str:
        return self.manifest.job

    @property
    def epoch(self) -> pb.Epoch:
        return messages.epoch_to(epoch_of(self.counter))

    def version(self, step: int, counter: int | None = None) -> Version:
        return Version(epoch_of(counter or self.counter), step)

    def decision(self, base: Version | None = None) -> pb.Decision:
        decision = pb.Decision(epoch=self.epoch)
        if base:
            decision.base.CopyFrom(messages.version_to(base))
        return decision

    def decide(self, base: Version | None = None, dropped: Sequence[str] = ()) -> Job:
        """Sends the decision of a new attach to every node."""
        self.counter += 1
        for i, daemon in enumerate(self.daemons):
            request = pb.DecideRequest(
                manifest=self.manifest, decision=self.decision(base), node_index=i, dropped=dropped
            )
            daemon.call("Decide", request)
        return self

    def close(self, ranks: Iterable[int] = ()) -> Job:
        """Closes the sessions of these ranks, or of all; a new attach needs them closed."""
        for rank in ranks or self.home:
            self.call(rank, "Release", pb.ReleaseRequest(job=self.name, epoch=self.epoch, rank=rank))
        return self

    def call(self, rank: int, method: str, request: object, timeout: float = 20.0) -> object:
        return self.daemons[self.home.get(rank, 0)].call(method, request, timeout)

    def lease_request(self, rank: int = 0, **changes: object) -> pb.LeaseRequest:
        facts = {
            "job": self.name, "epoch": self.epoch, "rank": rank, "slots": 2, "data_bytes": 2 * CHUNK,
            "table_bytes": CHUNK, "chunk_bytes": CHUNK,
        }  # fmt: skip
        return pb.LeaseRequest(**{**facts, **changes})

    def lease(self, rank: int = 0, trainer: Trainer | None = None, **changes: object) -> list[str]:
        """Leases slots for a trainer, or for this process; returns their names."""
        return [slot.name for slot in self.call_as(trainer, rank, "Lease", self.lease_request(rank, **changes)).slots]

    def call_as(self, trainer: Trainer | None, rank: int, method: str, request: object) -> object:
        """Calls the daemon of a rank, from a trainer or from this process."""
        if trainer is None:
            return self.call(rank, method, request)
        return trainer.call(self.daemons[self.home.get(rank, 0)].address, method, request)

    def descriptors(self, rank: int, names: Sequence[str]) -> list[int]:
        request = pb.SlotsRequest(job=self.name, epoch=self.epoch, rank=rank, slots=names)
        return local_socket.ask_slots(self.local_socket(rank), request, [], 10)

    def local_socket(self, rank: int = 0) -> str:
        """Returns the path of the local socket of the rank's daemon."""
        return self.hellos[self.home.get(rank, 0)].local_socket

    def maps(self, rank: int, names: Sequence[str]) -> list[SlotMap]:
        """Maps slots as their trainer does."""
        slot_maps = []
        for descriptor in self.descriptors(rank, names):
            pages = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
            slot_maps.append(SlotMap(np.frombuffer(pages, np.uint8)))
        return slot_maps

    def slots(self, rank: int = 0, trainer: Trainer | None = None, **changes: object) -> list[SlotMap]:
        """Leases and maps slots."""
        return self.maps(rank, self.lease(rank, trainer, **changes))

    def report(
        self, rank: int, answers: Mapping[int, StepAnswer], wait_ms: int = 0, timeout: float = 20.0, requested_every: int = 0,
    ) -> pb.ReportReply:  # fmt: skip
        request = pb.ReportRequest(
            job=self.name, epoch=self.epoch, rank=rank, steps=messages.report_to(report_of(answers)), wait_ms=wait_ms,
            requested_every=requested_every,
        )  # fmt: skip
        return self.send_report(rank, request, timeout)

    def send_report(
        self, rank: int, report: pb.ReportRequest, timeout: float = 20.0, protocol: int = messages.PROTOCOL
    ) -> pb.ReportReply:
        """Sends one report on a new connection; returns the reply.

        Raises:
            Refused: the daemon refused the report.
            TimeoutError: no reply came in time.
        """
        reply = ask(self.local_socket(rank), pb.LocalRequest(report=report, protocol=protocol), timeout)
        if reply.status:
            raise Refused(reply)
        return reply.report

    def headers(self, node: int = 0) -> dict[str, tuple[SlotState, int]]:
        """Returns name → (state, step) of every slot in a node's inventory."""
        reply = self.daemons[node].call("Inventory", pb.InventoryRequest(job=self.name))
        return {slot.slot: (SlotState(slot.state), slot.version.step) for slot in reply.slots}

    def whole(self, node: int = 0) -> int:
        return self.daemons[node].status(self.name).whole


def ask(path: str, request: pb.LocalRequest, timeout: float = 20.0) -> pb.LocalReply:
    """Sends one request over the local socket; returns the reply."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(path)
        connection.sendall(local_socket.frame(request))
        frames = local_socket.FrameReader()
        while data := connection.recv(1 << 16):
            for body in frames.feed(data):
                return pb.LocalReply.FromString(body)
    raise ConnectionError("the daemon has ended the connection")


def registry_of(arena: Arena, ttl_s: float = 1.0) -> Registry:
    """Returns the job registry of a daemon, without a daemon."""
    return Registry(arena, PeerChannels(None, ()), RetentionTimes(ttl_s, ttl_s), Failpoints(""), PeerChannels(None, ()))


def decide_now(job: JobRecord, request: pb.DecideRequest, placement: NodePlacement = NodePlacement()) -> None:  # noqa: B008
    """Takes a decision, all slices at once."""
    assert run_at_once(epochs.decide(job, request, placement))


def data_of(step: int, nbytes: int = 2 * CHUNK) -> bytes:
    return (f"step {step} ".encode() * nbytes)[:nbytes]


def write(
    slot: SlotMap, version: Version, upto: SlotState = SlotState.SEALED, nbytes: int = 2 * CHUNK,
    compared: Mapping[int, int] | None = None,
) -> None:  # fmt: skip
    """Writes a version into a slot as a trainer does. It stops in the state `upto`.

    Args:
        slot: where to write.
        version: the version to write.
        upto: the last state of the slot.
        nbytes: size of the data.
        compared: the digest of each cell in the capsule; None is no digest.
    """
    data = data_of(version.step, nbytes)
    layout = layout_of(len(data))
    slot.begin(version, layout.digest, messages.table_to(layout), len(data))
    slot.put_capsule(CAPSULE if compared is None else capsule_format.encode({"compared": dict(compared)}))
    slot.write(0, np.frombuffer(data, np.uint8))
    if upto >= SlotState.LANDED:
        slot.landed()
    if upto >= SlotState.SEALED:
        slot.sealed(np.fromiter(slot.digests_of(0, slot.chunks), np.uint64))


def tcp_call(
    address: str, method: str, request: object, token: bytes | None = None, service: type | None = None,
    node_id: str | None = None, job: str | None = None, tls: Tls | None = None,
) -> object:  # fmt: skip
    """Makes a call over TCP, as another node's daemon does.

    Args:
        address: of the daemon.
        method: name of the method.
        request: what is asked.
        token: what the call proves; None: nothing.
        service: class of the stub; None: that of trainers and the CLI.
        node_id: the node that the call names; None: the daemon's.
        job: the job that the proof names; None: that of the request.
        tls: of the caller; None: without TLS.
    """
    with rpc.channel(address, tls) if tls else grpc.insecure_channel(address, options=rpc.OPTIONS) as channel:
        if token is not None:
            return ProvingCaller(channel, token, node_id).call(method, request, service, job)
        stub = (service or pb_grpc.DaemonStub)(channel)
        return getattr(stub, method)(request, timeout=10, metadata=rpc.PROTOCOL_METADATA)


def slot_path(daemon: DaemonProcess, name: str, job: str = "job") -> Path:
    return daemon.folder / job / name


def descriptors_of(daemon: DaemonProcess) -> int:
    """Returns how many file descriptors the daemon has open."""
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
