"""The slots and capsules that a restore reads: mapped on this node, streamed from other nodes."""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from reft.client.link.slots import MappedSlot, SlotLeases
from reft.core.commit.version import Version
from reft.core.recovery.recovery import HeldParity, HeldRecord, HeldSlot, RecoveryPlan
from reft.errors import FormatError, RestoreError
from reft.wire import messages, rpc
from reft.wire.slot_format import PAGE, Bytes, SlotMap, best_header
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

# A tenth of what one daemon delivers on a slow network: several ranks may read from it at once.
REMOTE_BYTES_PER_S = 10 << 20
FETCH_BYTES = 4 << 20  # of one call: a node that stops sending is found within one deadline
# The daemon answers, but the data is damaged or gone. The source counts as damaged, like a damaged
# local slot.
_LOST = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND)


def remote_read_s(
    sources: Mapping[int, HeldSlot], reader_of: Mapping[int, int], nodes: Mapping[str, Sequence[int]]
) -> float:
    """Returns how long ranks may wait for reads from other nodes, in seconds.

    The rank that reads most from other nodes decides.

    Args:
        sources: old rank, or parity number → its slot.
        reader_of: the same → new rank that reads it.
        nodes: node id → the ranks that run there now.
    """
    remote_bytes = Counter[int]()
    for old, source in sources.items():
        if reader_of[old] not in nodes.get(source.node, ()):
            remote_bytes[reader_of[old]] += source.data_bytes
    return max(remote_bytes.values(), default=0) / REMOTE_BYTES_PER_S


@dataclass(frozen=True)
class RemoteSlots:
    """Slots and capsules of one job on other nodes, read through this node's own daemon.

    This node's daemon has the certificates and knows the routes to the other daemons.

    Args:
        job: name of the job.
        address: address of this node's daemon.
        own: id of this node.
        nodes: node id → the node.
        deadline_s: deadline of one call; time for its bytes is added.
        calls: makes the calls that have no stream.
        tokens: of the job, for nodes whose tokens this node's daemon does not know.
    """

    job: str
    address: str
    own: str
    nodes: Mapping[str, pb.Node]
    deadline_s: float
    calls: rpc.DaemonCalls
    tokens: tuple[bytes, ...] = field(default=(), repr=False)

    def slot(self, source: HeldSlot, channel: grpc.Channel) -> SlotMap:
        """Returns a slot on another node, without its data: reading the data asks that node.

        Raises:
            FormatError: the slot is damaged or missing.
            RestoreError: the other node's daemon did not return the slot.
        """
        headers = np.zeros(2 * PAGE, np.uint8)
        self.read(source, channel, 0, headers)
        geometry = best_header(headers).geometry
        # The pages of the data stay untouched, so they take no memory.
        buffer = np.frombuffer(mmap.mmap(-1, geometry.file_bytes), np.uint8)
        self.read(source, channel, 0, buffer[: geometry.data_offset])
        return RemoteSlotMap(buffer, self, source, channel)

    def capsule(self, node: str, rank: int, version: Version) -> pb.CapsuleRecord:
        """Returns a capsule that a node keeps. One that changed on its way is read once more.

        Raises:
            FormatError: the capsule is damaged or missing, or has changed twice.
            RestoreError: that node's daemon did not return the capsule.
        """
        request = pb.CapsuleRequest(
            job=self.job,
            rank=rank,
            version=messages.version_to(version),
            node=self._remote_node(node),
            tokens=self.tokens,
        )

        def fetch() -> pb.CapsuleRecord:
            with self._errors(node, rank), self.calls.channel(self.address) as channel:
                record: pb.CapsuleRecord = rpc.invoke(channel, "FetchCapsule", request, self.deadline_s)
            return record

        record = fetch()
        if not messages.is_as_sealed(record):
            record = fetch()
            messages.check_capsule(record)
        return record

    def earlier(self, plan: RecoveryPlan, rank: int) -> Iterator[bytes]:
        """Yields the available capsules of a rank's steps before the plan's base."""
        for version, node in plan.earlier.get(rank, ()):
            with contextlib.suppress(FormatError, RestoreError):
                yield self.capsule(node, rank, version).capsule

    def read(self, source: HeldSlot, channel: grpc.Channel, offset: int, *outs: Bytes) -> None:
        """Fills each of `outs` in turn with bytes of a slot's file.

        The bytes come in a stream, within the deadline of one call. A caller reads a few MiB at a
        time, so a node that stops sending is found within the deadline.

        Raises:
            FormatError: the slot is damaged or missing.
            RestoreError: the other node's daemon did not return the bytes.
        """
        assert source.version is not None, "a slot without a version cannot be read"
        size = sum(out.nbytes for out in outs)
        request = pb.ReadRequest(
            job=self.job,
            slot=source.slot,
            version=messages.version_to(source.version),
            offset=offset,
            size=size,
            node=self._remote_node(source.node),
            tokens=self.tokens,
        )
        targets, arrived = [out for out in outs if out.nbytes], 0
        with self._errors(source.node, source.rank):
            stub = pb_grpc.DaemonStub(channel)
            for chunk in stub.Read(request, timeout=self.deadline_s + size / REMOTE_BYTES_PER_S):
                data = np.frombuffer(chunk.data, np.uint8)
                arrived += data.nbytes
                while data.nbytes and targets:
                    n = min(data.nbytes, targets[0].nbytes)
                    targets[0][:n] = data[:n]
                    targets[0], data = targets[0][n:], data[n:]
                    if not targets[0].nbytes:
                        targets.pop(0)
        if arrived != size:
            raise FormatError(f"slot {source.slot} on node {source.node} gave {arrived} of {size} bytes.")

    def _remote_node(self, node: str) -> pb.Node | None:
        """Returns the node that this node's daemon shall ask; None: this node itself."""
        return None if node == self.own else self.nodes[node]

    @contextlib.contextmanager
    def _errors(self, node: str, rank: int) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            name = self.nodes[node].name if node in self.nodes else node
            kind = FormatError if error.code() in _LOST else RestoreError
            raise kind(
                f"the data of rank {rank} on node {name} cannot be read: {rpc.error_of(error, self.address)}"
            ) from error


class RemoteSlotMap(SlotMap):
    """A slot on another node: headers, table, digests and capsule are here, data are read there.

    `data` has no bytes before `fetch`.

    Args:
        slot: all bytes of the slot's file; those of the data are used only after `fetch`.
        remote: reads the slot.
        source: the slot.
        channel: to this node's daemon; open while the slot is read.
    """

    def __init__(self, slot: Bytes, remote: RemoteSlots, source: HeldSlot, channel: grpc.Channel) -> None:
        super().__init__(slot)
        self._remote, self._source, self._channel = remote, source, channel

    def fetch(self) -> None:
        """Reads all data of the version into `data`; see `RemoteSlots.read`."""
        data = self.data[: self.header.data_bytes]
        for begin in range(0, data.nbytes, FETCH_BYTES):
            self.read(begin, data[begin : begin + FETCH_BYTES])

    def read(self, begin: int, *outs: Bytes) -> None:
        """Fills each of `outs` in turn with the data from `begin` on; see `RemoteSlots.read`."""
        self._remote.read(self._source, self._channel, self.header.geometry.data_offset + begin, *outs)


@dataclass(frozen=True)
class SlotOpener:
    """Opens the slots and capsules that this rank reads, and closes them.

    Args:
        leases: maps slots of this node.
        remote: reads slots of other nodes.
        capsules: old rank → its capsule at the plan's base, for those that were read before.
    """

    leases: SlotLeases
    remote: RemoteSlots
    capsules: Mapping[int, pb.CapsuleRecord] = field(default_factory=dict)
    _mapped: list[MappedSlot] = field(default_factory=list)
    _channels: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def slot(self, source: HeldSlot) -> SlotMap:
        """Returns a slot; its descriptor stays open until `close`.

        Raises:
            FormatError: the slot is damaged or missing.
            RestoreError: the other node's daemon did not return the slot.
        """
        if source.node != self.remote.own:
            return self.remote.slot(source, self._channels.enter_context(rpc.channel(self.remote.address)))
        if source.is_stored:
            self._mapped.append(self.leases.open_stored(source.slot))
            return self._mapped[-1].map
        slot = self.leases.take([source.slot], keeps=True)[0]
        self._mapped.append(slot)
        # Pinning costs a second for some gigabytes, so each rank pins its own slot only.
        is_own = source.rank == self.leases.rank and not isinstance(source, (HeldParity, HeldRecord))
        if self.leases.pins_for is not None and is_own:
            slot.register(self.leases.pins_for)
        return slot.map

    def with_data(self, source: HeldSlot) -> SlotMap:
        """Returns a slot whose `data` may be used; that of another node is read now.

        Raises:
            FormatError, RestoreError: see `slot`.
        """
        slot = self.slot(source)
        if isinstance(slot, RemoteSlotMap):
            slot.fetch()
        return slot

    def capsule(self, plan: RecoveryPlan, old: int) -> pb.CapsuleRecord:
        """Returns the capsule, at the plan's base, of an old rank that lost its slot.

        Raises:
            FormatError: the capsule is damaged or missing.
            RestoreError: the daemon that keeps the capsule did not return it.
        """
        held = plan.capsules[old]
        return self.capsules.get(old) or self.remote.capsule(held.node, old, held.version)

    def close(self) -> None:
        """Closes the mapped slots, and the channels to slots on other nodes."""
        for slot in self._mapped:
            slot.close()
        self._channels.close()
