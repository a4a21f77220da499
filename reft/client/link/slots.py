"""The slots of this rank: leased from its node's daemon, mapped, touched once, and registered with CUDA where there is one."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from reft.client.memory.cuda import pin, unpin
from reft.client.memory.prefault import map_shared
from reft.config import Config
from reft.core.commit.slots import Slot
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import align
from reft.wire import local_socket, messages, rpc
from reft.wire.shm import map_file
from reft.wire.slot_format import PAGE, Bytes, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

SPARE_TABLE = 4096  # bytes, so that a step counter that moves to another device does not outgrow the table
SPARE_DATA = 64 << 10  # bytes, so that a few small leaves that come later need no larger slots
ALLOCATION_BYTES_PER_S = 100 << 20  # slower than any machine makes pages; stretches the deadline of a lease


@dataclass
class SlotLeases:
    """One rank's way to its slots.

    Args:
        address: of the daemon's unix socket.
        socket_path: of the socket that hands out descriptors, from HelloReply.local_socket.
        job, epoch, rank: who leases.
        own: this process, as the daemon sees it.
        under_agent: whether a torchrun agent is this process's parent: once it is gone, this is an orphan.
        pins_for: the CUDA device whose copies into the slots are to run beside the host; None if there is none.
    """

    address: str
    socket_path: str
    job: str
    epoch: Epoch
    rank: int
    settings: Config
    own: local_socket.Caller
    under_agent: bool
    pins_for: torch.device | None

    def register(self) -> None:
        """Makes this process known as the rank's trainer, so that the daemon notices its death."""
        self._call(self._request(0, 0, 0))

    def lease(self, data_bytes: int, table_bytes: int) -> list[MappedSlot]:
        """Slots with room for so much, mapped, every page touched. Blocks for as long as memory takes to be made.

        Raises:
            NoRoom: they don't fit.
        """
        request = self._request(
            self.settings.slots, align(data_bytes + SPARE_DATA, PAGE), align(table_bytes + SPARE_TABLE, PAGE)
        )
        reply = self._call(request)
        slots = self.take([slot.name for slot in reply.slots], keeps=reply.backing == "memfd")
        for slot in slots:
            slot.touch()
            if self.pins_for is not None:
                slot.register(self.pins_for)
        return slots

    def take(self, names: list[str], keeps: bool = False) -> list[MappedSlot]:
        """Maps slots of this rank by name; `keeps`: their descriptors stay open until they are closed."""
        request = pb.SlotsRequest(job=self.job, epoch=messages.epoch_to(self.epoch), rank=self.rank, slots=names)
        descriptors = local_socket.ask_slots(self.socket_path, request, [], self.settings.attach_deadline_s)
        return [
            MappedSlot.open(i, name, descriptor, os.fstat(descriptor).st_size, keeps)
            for i, (name, descriptor) in enumerate(zip(names, descriptors, strict=True))
        ]

    def give_back(self, slots: list[MappedSlot]) -> None:
        """Gives a restarted daemon the memfds that this process kept for it."""
        kept = [slot for slot in slots if slot.descriptor >= 0]
        request = pb.SlotsRequest(
            job=self.job, epoch=messages.epoch_to(self.epoch), rank=self.rank, returned=[slot.name for slot in kept]
        )
        descriptors = [slot.descriptor for slot in kept]
        local_socket.ask_slots(self.socket_path, request, descriptors, self.settings.rpc_deadline_s)

    def release(self) -> None:
        """Takes the registration back."""
        self._rpc("Release", pb.ReleaseRequest(job=self.job, epoch=messages.epoch_to(self.epoch), rank=self.rank), 0)

    def whole(self) -> Version | None:
        """The newest version of this epoch that the daemon knows to be whole. Any error of the call is raised."""
        found = self._rpc("Status", pb.StatusRequest(job=self.job), 0).jobs
        return Version(self.epoch, found[0].whole) if found and found[0].whole >= 0 else None

    def _request(self, slots: int, data_bytes: int, table_bytes: int) -> pb.LeaseRequest:
        process, mine = self.own.process, os.sched_getaffinity(0)
        is_bound = len(mine) < (os.cpu_count() or 0)
        return pb.LeaseRequest(
            job=self.job, epoch=messages.epoch_to(self.epoch), rank=self.rank, pid=process.pid, pid_start=process.start,
            parent=self.own.parent if self.under_agent else 0, slots=slots, data_bytes=data_bytes, table_bytes=table_bytes,
            chunk_bytes=self.settings.chunk_bytes, cpus=sorted(mine) if is_bound else [],
        )  # fmt: skip

    def _call(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        reply: pb.LeaseReply = self._rpc("Lease", request, request.slots * request.data_bytes)
        return reply

    def _rpc(self, method: str, request: object, nbytes: int) -> Any:
        deadline_s = self.settings.attach_deadline_s + nbytes / ALLOCATION_BYTES_PER_S
        with rpc.channel(self.address) as channel:
            try:
                return getattr(pb_grpc.DaemonStub(channel), method)(request, timeout=deadline_s)
            except grpc.RpcError as error:
                raise rpc.error_of(error, self.address) from error


log = logging.getLogger("reft")


@dataclass
class MappedSlot:
    """One slot.

    Attributes:
        index: its place among this rank's slots.
        name: its name in the daemon's arena.
        descriptor: kept open only for a memfd, which a restarted daemon needs back, and while the slot is restored; else -1.
        map: its parts.
    """

    index: int
    name: str
    descriptor: int
    map: SlotMap
    _pages: mmap.mmap
    _bytes: Bytes
    _unpin: weakref.finalize[..., MappedSlot] | None = None

    @classmethod
    def open(cls, index: int, name: str, descriptor: int, file_bytes: int, keeps: bool) -> MappedSlot:
        """Maps a slot; takes the descriptor over, and keeps it open if asked to."""
        pages, whole = map_file(descriptor, file_bytes)
        # A DataLoader's forked workers must neither keep the pages alive nor pay for their page tables.
        pages.madvise(mmap.MADV_DONTFORK)
        if not keeps:
            os.close(descriptor)
        slot = SlotMap(whole, descriptor if keeps else None)
        return cls(index, name, descriptor if keeps else -1, slot, pages, whole)

    def touch(self) -> None:
        """Maps every page now: the first write through a new mapping costs four times the later ones.

        By reading: the kernel maps many pages at a time then, and pages of a shared mapping of shared
        memory may be written from then on.
        """
        map_shared(self._bytes)

    def register(self, device: torch.device) -> None:
        """Pins the pages for CUDA, so that a device's copies run beside the host; until `close`, or until nobody has the slot."""
        address = self._bytes.ctypes.data
        if error := pin(address, self._bytes.nbytes, device):
            log.warning("slot %s can't be pinned (CUDA error %d): copies will block the host.", self.name, error)
            return
        self._unpin = weakref.finalize(self, unpin, address, device)
        self._unpin.atexit = False  # the process's end does it

    def view(self) -> Slot:
        """What the reuse rule needs to know."""
        header = self.map.header
        return Slot(self.index, header.state, header.version)

    def close(self) -> None:
        """Unmaps; the slot itself stays with the daemon."""
        if self._unpin is not None:
            self._unpin()
        if self.descriptor >= 0:
            os.close(self.descriptor)
