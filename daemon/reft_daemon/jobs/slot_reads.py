"""Reads bytes of a sealed slot.

The readers are ranks and daemons of other nodes, and this daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np

from reft.core.commit.slots import SlotState
from reft.errors import AttachError, FormatError, ReftError
from reft.wire import messages, rpc
from reft.wire.slot_format import Bytes
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile
from reft_daemon.jobs.job_record import JobRecord

READ_CHUNK = 1 << 20  # bytes per message of Read; larger messages were slower


class UnreadableSlot(ReftError):
    """The slot does not exist, or does not hold the requested version.

    Args:
        status: the gRPC status with which the call ends.
    """

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read(job: JobRecord | None, request: pb.ReadRequest) -> AsyncIterator[bytes]:
    """Yields the requested bytes in pieces of READ_CHUNK.

    Raises:
        UnreadableSlot: the slot does not exist, or holds another version.
        FormatError: the slot was cut, can't be read, or has a damaged header; or, in a checked
            read, a damaged chunk.
    """
    slot = {**job.slots.files, **job.slots.stored}.get(request.slot) if job else None
    if slot is None:
        raise UnreadableSlot(grpc.StatusCode.NOT_FOUND, f"no slot {request.slot!r} of job {request.job!r} here")
    header = slot.map.reread()
    if header.state is not SlotState.SEALED or header.version != messages.version_from(request.version):
        raise UnreadableSlot(grpc.StatusCode.FAILED_PRECONDITION, f"slot {request.slot} holds {header.version} now")
    end = min(request.offset + request.size, slot.file_bytes)
    if request.checked:
        await asyncio.to_thread(_check_digests, slot, request.offset, end)
    for at in range(request.offset, end, READ_CHUNK):
        try:
            data = await slot.pread(min(READ_CHUNK, end - at), at)
        except OSError as error:  # the hardware has lost a page of this memory, or storage fails
            raise FormatError(f"byte {at} of slot {slot.name} can't be read: {error}.") from error
        yield data


async def read_here(job: JobRecord, request: pb.ReadRequest, into: Bytes) -> None:
    """Fills `into` with the requested bytes of a slot of this daemon.

    Raises:
        UnreadableSlot, FormatError: see `read`; also FormatError if fewer or more bytes came.
    """
    data_read = b"".join([data async for data in read(job, request)])
    if len(data_read) != into.nbytes:
        raise FormatError(f"slot {request.slot} gave {len(data_read)} of {into.nbytes} bytes.")
    into[:] = np.frombuffer(data_read, np.uint8)


def status_of(error: ReftError) -> grpc.StatusCode:
    """Returns the gRPC status for a failed read."""
    return error.status if isinstance(error, UnreadableSlot) else rpc.status_of(error)


def _check_digests(slot: SlotFile, begin: int, end: int) -> None:
    """Raises FormatError if the data between two file offsets has a damaged chunk."""
    header = slot.map.header
    size, data = header.geometry.chunk_bytes, header.geometry.data_offset
    first, last = max(begin - data, 0) // size, min(-(-max(end - data, 0) // size), slot.map.chunks)
    digests = slot.map.digests
    for index, digest in enumerate(slot.map.digests_of(first, last), first):
        if digest != int(digests[index]):
            raise FormatError(f"chunk {index} of slot {slot.name}, {header.version}, has a wrong digest.")


def is_damage(error: BaseException) -> bool:
    """Whether a failed read shows that the slot is damaged, gone, or of another version."""
    if isinstance(error, (FormatError, UnreadableSlot)):
        return True
    codes = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
    return isinstance(error, grpc.RpcError) and error.code() in codes


def living_ranks(job: JobRecord) -> list[int]:
    """Returns the ranks whose trainers live on this node, ascending."""
    return sorted(rank for rank, lease in job.leases.items() if lease.watch is not None)


def refuse_living(job: JobRecord) -> None:
    """Raises AttachError while trainers of the job live."""
    if ranks := living_ranks(job):
        raise AttachError(
            f"process {job.leases[ranks[0]].process.pid} trains rank {ranks[0]} of job {job.id}.",
            "end the job's trainers first; or let the job attach again, which finds lost nodes without a rebuild",
        )
