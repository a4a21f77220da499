"""Serves the small socket of `reft.wire.handout`: descriptors of slots to the trainers that leased them, and who they are."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

from reft.errors import AttachError, ReftError
from reft.wire import handout
from reft.wire.process import stat_of
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import shortage
from reft_daemon.registry import Registry

log = logging.getLogger("reft.daemon")
DEADLINE_S = 5.0  # a caller that sends nothing is dropped
CONNECTIONS_MAX = 64
RETRY_S = 0.1


class Handout:
    """The server.

    Args:
        path: of the socket; its folder is the daemon's own.
        registry: the jobs whose slots are handed out.
    """

    def __init__(self, path: Path, registry: Registry) -> None:
        self.path = path
        self._registry = registry
        self._room = asyncio.Semaphore(CONNECTIONS_MAX)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(CONNECTIONS_MAX)

    async def serve(self) -> None:
        """Answers until it is cancelled."""
        loop = asyncio.get_running_loop()
        failing = False
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # Out of descriptors, mostly: the daemon must live on, and be asked again.
                if not failing:
                    log.error("the handout socket can't accept: %s", error)
                failing = True
                self._room.release()
                await asyncio.sleep(RETRY_S)
                continue
            failing = False
            asyncio.ensure_future(self._answer(connection)).add_done_callback(lambda _: self._room.release())

    def close(self) -> None:
        self._listener.close()
        self.path.unlink(missing_ok=True)

    async def _answer(self, connection: socket.socket) -> None:
        given: list[int] = []
        with connection:
            try:
                connection.setblocking(False)
                pid, uid = handout.peer(connection)
                if uid != os.getuid():
                    return
                try:
                    request = await asyncio.wait_for(self._receive(connection, given), DEADLINE_S)
                    reply = _introduction(pid) if request.who else self._reply(request, given)
                except (ReftError, ValueError) as error:
                    reply = [b"\0" + str(error).encode()[: handout.REQUEST_MAX - 1]], []
                connection.sendmsg(*reply)
            except (OSError, asyncio.TimeoutError) as error:
                log.warning("a caller of the handout socket was dropped: %s", error)
            finally:
                for descriptor in given:
                    os.close(descriptor)

    async def _receive(self, connection: socket.socket, given: list[int]) -> pb.HandoutRequest:
        loop = asyncio.get_running_loop()
        data = b""
        while True:
            readable = asyncio.Event()
            loop.add_reader(connection, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(connection)
            part, descriptors, _, _ = socket.recv_fds(connection, handout.REQUEST_MAX, handout.DESCRIPTORS_MAX)
            given += descriptors
            if len(given) > handout.DESCRIPTORS_MAX:
                raise ValueError(f"more than {handout.DESCRIPTORS_MAX} descriptors came")
            data += part
            request = handout.parse(data)
            if request is not None:
                return request
            if not part:
                raise ValueError("the request ended early")

    def _reply(self, request: pb.HandoutRequest, given: list[int]) -> tuple[list[bytes], list[tuple]]:
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        if request.returned:
            if len(given) != len(request.returned):
                raise AttachError(f"{len(given)} descriptors came for {len(request.returned)} slots.")
            for name in request.returned:
                slot = self._registry.arena.take_back(job.id, request.rank, name, given[0])
                given.pop(0)
                job.take_back(slot)
            return [b"\0"], []
        # A registered trainer may also read what other ranks of its job left on this node.
        held = job.all_slots
        ranks = {slot.rank for slot in held.values()} if request.rank in job.leases else {request.rank}
        unknown = [name for name in request.slots if name not in held or held[name].rank not in ranks]
        if unknown or not request.slots:
            raise AttachError(f"rank {request.rank} of job {job.id} has no slots {unknown} here.")
        return [bytes([len(request.slots)])], handout.ancillary([held[name].descriptor for name in request.slots])


def _introduction(pid: int) -> tuple[list[bytes], list[tuple]]:
    """Tells a process who it is.

    Raises:
        AttachError: this daemon does not see it, so would not notice its death.
    """
    try:
        facts = stat_of(pid)
    except OSError as error:
        raise shortage.told(error) from error
    if facts is None:
        raise AttachError(
            "it lives in a pid namespace that this daemon does not see.",
            "run reft-daemon in the trainers' container, or in the host's pid namespace (hostPID, --pid=host)",
        )
    return [b"\1" + pb.Caller(pid=pid, pid_start=facts.start, parent=facts.parent).SerializeToString()], []
