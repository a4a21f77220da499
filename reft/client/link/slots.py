"""The slots of this rank: leased from the node's daemon, mapped, touched, and pinned for CUDA."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reft.client.link.timed_read import in_time, preadv_in_time
from reft.client.memory.cuda import pin, unpin
from reft.client.memory.prefault import map_shared
from reft.config import Config
from reft.core.commit.slots import Slot
from reft.core.commit.version import Epoch
from reft.core.layout.layout import align
from reft.errors import FormatError
from reft.wire import local_socket, messages, rpc
from reft.wire.shm import map_file
from reft.wire.slot_format import PAGE, Bytes, SharedSlotMap, SlotMap, read_head, slot_of_head
from reft.wire.v1 import daemon_pb2 as pb

# Spare bytes of the table: it grows when a step counter moves to another device.
SPARE_TABLE = 4096
# Spare bytes for data: a few small leaves may appear later.
SPARE_DATA = 64 << 10
# Lower than any machine's speed of making pages. Extends the deadline of a lease.
ALLOCATION_BYTES_PER_S = 100 << 20


@dataclass
class SlotLeases:
    """One rank's leases of slots.

    Args:
        address: address of the daemon's gRPC socket.
        socket_path: path of the socket that passes descriptors, from HelloReply.local_socket.
        job, epoch, rank: identify the leasing rank.
        settings: deadlines, number of slots, chunk size.
        under_agent: whether a torchrun agent is this process's parent. Then this process is an
            orphan once the agent has ended.
        pins_for: the CUDA device that copies into the slots beside the host; None if there is none.
    """

    address: str
    socket_path: str
    job: str
    epoch: Epoch
    rank: int
    settings: Config
    under_agent: bool
    pins_for: torch.device | None
    calls: rpc.DaemonCalls

    def register(self) -> None:
        """Registers this process as the rank's trainer, so that the daemon notices its death."""
        self._call(self._request(0, 0, 0))

    def lease(self, data_bytes: int, table_bytes: int) -> list[MappedSlot]:
        """Returns mapped slots of this size with every page touched.

        Blocks until the daemon has made the memory. While the daemon must hold older slots, these
        are fewer than the settings ask for: see `lease_further`.

        Args:
            data_bytes: bytes of data in each slot; SPARE_DATA is added.
            table_bytes: bytes of the table in each slot; SPARE_TABLE is added.

        Raises:
            NoRoom: the slots don't fit into memory.
        """
        return self._lease(*capacities(data_bytes, table_bytes), [])

    def lease_further(self, mapped: Sequence[MappedSlot]) -> list[MappedSlot]:
        """Returns the slots that are missing beside the mapped ones, as large as these.

        Raises:
            NoRoom: the slots don't fit into memory.
        """
        geometries = [slot.map.header.geometry for slot in mapped]
        data_bytes = min(geometry.data_capacity for geometry in geometries)
        return self._lease(data_bytes, min(geometry.table_capacity for geometry in geometries), mapped)

    def lease_records(self, count: int, data_bytes: int, mapped: Sequence[MappedSlot] = ()) -> list[MappedSlot]:
        """Returns record slots of this rank beside the mapped ones, with every page touched.

        Args:
            count: the number of record slots, the mapped ones included.
            data_bytes: bytes of data in each of them.
            mapped: the record slots that this process has.

        Raises:
            NoRoom: the slots don't fit into memory.
        """
        request = self._request(0, 0, 0)
        request.records, request.record_bytes = count, data_bytes
        return self._ready(self._take_new(self._call(request), mapped))

    def _lease(self, data_bytes: int, table_bytes: int, mapped: Sequence[MappedSlot]) -> list[MappedSlot]:
        return self._ready(
            self._take_new(self._call(self._request(self.settings.slots, data_bytes, table_bytes)), mapped)
        )

    def _take_new(self, reply: pb.LeaseReply, mapped: Sequence[MappedSlot]) -> list[MappedSlot]:
        """Maps the slots of a reply that are not mapped yet."""
        known = {slot.name for slot in mapped}
        names = [slot.name for slot in reply.slots if slot.name not in known]
        return self.take(names, first=len(mapped)) if names else []

    def _ready(self, slots: list[MappedSlot]) -> list[MappedSlot]:
        """Touches and pins the pages of slots, and returns the slots."""
        for slot in slots:
            slot.touch()
            if self.pins_for is not None:
                slot.register(self.pins_for)
        return slots

    def take(self, names: list[str], keeps: bool = False, first: int = 0) -> list[MappedSlot]:
        """Maps slots of this rank.

        Args:
            names: names of the slots in the daemon's arena.
            keeps: whether the descriptors stay open until the slots are closed; those of memfds do
                in any case, since a restarted daemon needs them back.
            first: index of the first of them among this rank's slots.

        Raises:
            FormatError: a file is no slot, or is cut.
        """
        request = pb.SlotsRequest(job=self.job, epoch=messages.epoch_to(self.epoch), rank=self.rank, slots=names)
        descriptors = local_socket.ask_slots(self.socket_path, request, [], self.settings.attach_deadline_s)
        slots, rest = list[MappedSlot](), iter(descriptors)
        try:
            for index, (name, descriptor) in enumerate(zip(names, rest, strict=True), first):
                stays = keeps or is_memfd(descriptor)
                slots.append(MappedSlot.open(index, name, descriptor, os.fstat(descriptor).st_size, stays))
        except BaseException:
            # An open descriptor keeps the memory of a slot that the daemon takes for freed.
            for slot in slots:
                slot.close()
            local_socket.close_all(list(rest))
            raise
        return slots

    def open_stored(self, name: str) -> MappedSlot:
        """Opens a file of a checkpoint that this node's daemon has open, unmapped.

        Raises:
            FormatError: the file is no slot, is cut, or can't be read.
            RestoreError: storage hangs.
        """
        request = pb.SlotsRequest(job=self.job, epoch=messages.epoch_to(self.epoch), rank=self.rank, slots=[name])
        (descriptor,) = local_socket.ask_slots(self.socket_path, request, [], self.settings.attach_deadline_s)
        try:
            head, _ = in_time(lambda: read_head(descriptor), f"slot {name}")
            slot = slot_of_head(head, descriptor, preadv_in_time)
        except OSError as error:
            os.close(descriptor)
            raise FormatError(f"slot {name} can't be read from storage: {error}.") from error
        except BaseException:
            os.close(descriptor)
            raise
        return MappedSlot(0, name, descriptor, slot)

    def give_back(self, slots: list[MappedSlot]) -> None:
        """Passes the memfds of this process back to a restarted daemon.

        Raises:
            AttachError: the daemon does not take them all.
        """
        memfd_slots = [slot for slot in slots if slot.descriptor >= 0]
        for first in range(0, len(memfd_slots), local_socket.DESCRIPTORS_MAX):
            some = memfd_slots[first : first + local_socket.DESCRIPTORS_MAX]
            request = pb.SlotsRequest(
                job=self.job,
                epoch=messages.epoch_to(self.epoch),
                rank=self.rank,
                returned=[slot.name for slot in some],
            )
            descriptors = [slot.descriptor for slot in some]
            local_socket.ask_slots(self.socket_path, request, descriptors, self.settings.rpc_deadline_s)

    def release(self, is_refused: bool = False) -> None:
        """Ends the registration of this process.

        Args:
            is_refused: whether attach raised an error. Then the daemon undoes the decision.
        """
        epoch = messages.epoch_to(self.epoch)
        self._rpc("Release", pb.ReleaseRequest(job=self.job, epoch=epoch, rank=self.rank, refused=is_refused), 0)

    def _request(self, slots: int, data_bytes: int, table_bytes: int) -> pb.LeaseRequest:
        mine = os.sched_getaffinity(0)
        is_bound = len(mine) < (os.cpu_count() or 0)
        return pb.LeaseRequest(
            job=self.job, epoch=messages.epoch_to(self.epoch), rank=self.rank,
            under_agent=self.under_agent, slots=slots, data_bytes=data_bytes, table_bytes=table_bytes,
            chunk_bytes=self.settings.chunk_bytes, cpus=sorted(mine) if is_bound else [],
        )  # fmt: skip

    def _call(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        reply: pb.LeaseReply = self._rpc(
            "Lease", request, request.slots * request.data_bytes + request.records * request.record_bytes
        )
        return reply

    def _rpc(self, method: str, request: object, nbytes: int) -> Any:
        deadline_s = self.settings.attach_deadline_s + nbytes / ALLOCATION_BYTES_PER_S
        return self.calls.call(self.address, method, request, deadline_s)


def is_memfd(descriptor: int) -> bool:
    """Whether a slot's file is a memfd. One job may have such slots beside files of a tmpfs."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file system that knows no seals
        return False


def capacities(data_bytes: int, table_bytes: int) -> tuple[int, int]:
    """Returns the bytes of data and of the table for which `SlotLeases.lease` asks."""
    return align(data_bytes + SPARE_DATA, PAGE), align(table_bytes + SPARE_TABLE, PAGE)


log = logging.getLogger("reft")


@dataclass
class MappedSlot:
    """One mapped slot.

    Attributes:
        index: index among this rank's slots.
        name: name in the daemon's arena.
        descriptor: the open descriptor; -1 if closed. Stays open for a memfd, because a restarted
            daemon needs it back, and while the slot is restored.
        map: the parts of the slot.
    """

    index: int
    name: str
    descriptor: int
    map: SlotMap
    _bytes: Bytes | None = None  # None: a file on storage, which is not mapped
    _unpin: weakref.finalize[..., MappedSlot] | None = None
    _closer: weakref.finalize[..., MappedSlot] | None = None  # closes the descriptor of a left slot

    @classmethod
    def open(cls, index: int, name: str, descriptor: int, file_bytes: int, keeps: bool) -> MappedSlot:
        """Maps a slot, and takes ownership of the descriptor.

        Args:
            index, name: see the attributes.
            descriptor: descriptor of the slot's file.
            file_bytes: size of the file.
            keeps: whether the descriptor stays open until `close`.

        Raises:
            FormatError: the file is no slot, or is cut.
        """
        try:
            pages, whole = map_file(descriptor, file_bytes)
            # Forked DataLoader workers must not keep the pages alive, nor copy the page tables.
            pages.madvise(mmap.MADV_DONTFORK)
            slot = SharedSlotMap(whole, descriptor if keeps else None)
        except ValueError as error:
            os.close(descriptor)
            raise FormatError(f"the file of slot {name} is cut: {error}") from error
        except BaseException:
            os.close(descriptor)
            raise
        if not keeps:
            os.close(descriptor)
        return cls(index, name, descriptor if keeps else -1, slot, whole)

    def touch(self) -> None:
        """Maps every page now: the first write through a new mapping costs four times a later one.

        Reads each page instead of writing: for a read the kernel maps many pages at a time. A page
        of a shared mapping of shared memory is then writable, too.
        """
        map_shared(self._mapped_bytes)

    def register(self, device: torch.device) -> None:
        """Pins the pages for CUDA, so that copies of the device run beside the host.

        The pages stay pinned until `close`, or until this object is garbage-collected.
        """
        address = self._mapped_bytes.ctypes.data
        if error := pin(address, self._mapped_bytes.nbytes, device):
            log.warning("slot %s can't be pinned (CUDA error %d): copies will block the host.", self.name, error)
            return
        self.map.is_pinned = True
        self._unpin = weakref.finalize(self, unpin, address, device)
        self._unpin.atexit = False  # the end of the process unpins the pages

    @property
    def _mapped_bytes(self) -> Bytes:
        assert self._bytes is not None, "a slot on storage has no pages to touch or pin"
        return self._bytes

    def view(self) -> Slot:
        """Returns the facts that the reuse rule of slots needs."""
        header = self.map.header
        return Slot(self.index, header.state, header.version)

    def leave(self) -> None:
        """Lets all go with the last user of this object: a snapshot may still be written here."""
        if self.descriptor >= 0 and self._closer is None:
            self._closer = weakref.finalize(self, os.close, self.descriptor)
            self._closer.atexit = False  # the end of the process closes it

    def close(self) -> None:
        """Unpins the pages and closes the descriptor; the daemon keeps the slot.

        The mapping ends when the last reference to it is gone.
        """
        if self._unpin is not None:
            self._unpin()
        if self._closer is not None:
            self._closer()
        elif self.descriptor >= 0:
            os.close(self.descriptor)
