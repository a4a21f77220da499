"""The mover's process: carries out the commands of its daemon, see `mover.py`.

    main thread     reads commands
    reft-accept     accepts connections; each has a thread of its own (`range_server`)
    reft-pull_N     at most PULLS_MAX; the daemon sends no more pulls at a time
    reft-slot_N     as many: begin and seal, so that no pull waits for them, with its ticket

It maps slots. So when memory is short, the kernel should end this process rather than the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from reft.core.coding.exchange import PieceSizes
from reft.errors import ReftError
from reft.wire.shm import map_file
from reft.wire.slot_format import SlotMap, chunk_digest
from reft.wire.tls import Tls
from reft_daemon.child.control_channel import (
    ControlMessage,
    check_descriptors,
    receive_message,
    send_message,
    version_of,
)
from reft_daemon.mover import range_client
from reft_daemon.mover.range_client import MoverAddress, RangePull, SourceRefused
from reft_daemon.mover.range_protocol import PULLS_MAX, BrokenConnection
from reft_daemon.mover.range_server import OfferedSlot, RangeServer

log = logging.getLogger("reft.mover")
TELL_BYTES: Final = 64 << 20  # between two news of a pull


@dataclass
class ParityMap:
    """A parity slot that is being made.

    Attributes:
        job: the job of the slot.
        slot: the slot, mapped.
    """

    job: str
    slot: SlotMap


@dataclass
class RunningPull:
    """A pull that can be cancelled.

    Attributes:
        connection: to the source, once there is one.
    """

    is_cancelled: bool = False
    connection: socket.socket | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Ends the connection, now or when it is made."""
        with self.lock:
            self.is_cancelled = True
            if self.connection is not None:
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

    def use(self, connection: socket.socket) -> None:
        """Takes the connection; ends it if the pull is cancelled."""
        with self.lock:
            self.connection = connection
        if self.is_cancelled:
            self.cancel()


class CommandServer:
    """Carries out the daemon's commands.

    Args:
        channel: to the daemon.
        server: serves ranges of the offered slots.
        tls: reads the certificates for a connection to a source; None: plain TCP.
    """

    def __init__(self, channel: socket.socket, server: RangeServer, tls: Callable[[], Tls] | None = None) -> None:
        self._channel = channel
        self._server = server
        self._tls = tls
        self._pull_pool = ThreadPoolExecutor(PULLS_MAX, "reft-pull")
        self._slot_pool = ThreadPoolExecutor(PULLS_MAX, "reft-slot")
        self._folds: dict[int, ParityMap] = {}
        self._pulls: dict[int, RunningPull] = {}
        self._offered: dict[str, list[OfferedSlot]] = {}

    def run(self) -> None:
        """Carries out commands until the channel ends."""
        threading.Thread(target=self._server.serve, name="reft-accept", daemon=True).start()
        self._tell({"ready": True, "port": self._server.port})
        while received := receive_message(self._channel):
            message, descriptors = received
            try:
                check_descriptors(message)
                getattr(self, f"_{message['do']}")(message, descriptors)
            except ReftError as error:
                log.error("the command %s can't be carried out: %s", message["do"], error)
                if "id" in message:
                    self._tell({"done": message["id"], "error": error.message})
            except Exception as error:  # a slot that can't be mapped must not end the other turns
                log.exception("a command can't be carried out")
                if "id" in message:
                    self._tell({"done": message["id"], "error": str(error) or type(error).__name__})
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _tell(self, message: ControlMessage) -> None:
        with contextlib.suppress(OSError):  # the daemon has ended, and `run` ends too
            send_message(self._channel, message)

    # Commands

    def _offer(self, message: ControlMessage, descriptors: Sequence[int]) -> None:
        job = message["job"]
        slots = [] if message["anew"] else self._offered.get(job, [])
        for (rank, begin, size, nbytes, pieces), descriptor in zip(message["slots"], descriptors, strict=True):
            sizes = PieceSizes(*pieces) if pieces else None
            slots.append(OfferedSlot(rank, (begin, size), map_file(descriptor, nbytes)[1], sizes))
        self._offered[job] = slots
        self._server.offer(job, slots)

    def _grant(self, message: ControlMessage, _: Sequence[int]) -> None:
        self._server.grant(message["job"], bytes.fromhex(message["ticket"]), message["pace"])
        self._tell({"done": message["id"]})  # only now may another node use the ticket

    def _begin(self, message: ControlMessage, descriptors: Sequence[int]) -> None:
        slot = SlotMap(map_file(descriptors[0], message["file_bytes"])[1])
        self._folds[message["id"]] = ParityMap(message["job"], slot)
        self._start(message["id"], self._begin_slot, message)

    def _pull(self, message: ControlMessage, _: Sequence[int]) -> None:
        running = self._pulls[message["id"]] = RunningPull()
        self._pull_pool.submit(self._fold_and_tell, message, running)

    def _seal(self, message: ControlMessage, _: Sequence[int]) -> None:
        self._start(message["id"], self._seal_slot, message)

    def _drop(self, message: ControlMessage, _: Sequence[int]) -> None:
        self._folds.pop(message["fold"], None)

    def _cancel(self, message: ControlMessage, _: Sequence[int]) -> None:
        if running := self._pulls.get(message["command"]):
            running.cancel()

    def _forget(self, message: ControlMessage, _: Sequence[int]) -> None:
        job = message["job"]
        self._offered.pop(job, None)
        # No begin, pull or seal of the job is under way: the daemon awaits their answers.
        self._folds = {ident: fold for ident, fold in self._folds.items() if fold.job != job}

        arguments = (message["id"], self._end_connections, message)
        threading.Thread(target=self._answer, args=arguments, name="reft-forget", daemon=True).start()

    # Work in threads. No thread holds a slot when it answers: the daemon may free the slot then.

    def _start(self, ident: int, act: Callable[[ControlMessage], None], message: ControlMessage) -> None:
        self._slot_pool.submit(self._answer, ident, act, message)

    def _answer(self, ident: int, act: Callable[[ControlMessage], None], message: ControlMessage) -> None:
        try:
            act(message)
        except Exception as error:  # a bug that one command meets must not end the others
            log.exception("command %d has failed", ident)
            answer = {"done": ident, "error": str(error) or type(error).__name__}
        else:
            answer = {"done": ident}
        self._tell(answer)

    def _begin_slot(self, message: ControlMessage) -> None:
        slot = self._folds[message["id"]].slot
        slot.begin(version_of(message["version"]), bytes.fromhex(message["layout"]), b"", message["bytes"])
        slot.data[:] = 0

    def _seal_slot(self, message: ControlMessage) -> None:
        slot = self._folds.pop(message["fold"]).slot
        digests = np.array([chunk_digest(slot.chunk(index)) for index in range(slot.chunks)], np.uint64)
        slot.landed()
        slot.sealed(digests)

    def _end_connections(self, message: ControlMessage) -> None:
        if not self._server.forget(message["job"]):
            raise OSError(f"connections of job {message['job']} do not end")

    def _fold_and_tell(self, message: ControlMessage, running: RunningPull) -> None:
        folded = [0]  # the number of ranges
        answer: dict[str, object] = {"done": message["id"]}
        try:
            self._fold(message, running, folded)
        except SourceRefused as error:
            answer |= {"error": error.message, "refused": error.status.name}
        except (ReftError, OSError) as error:
            answer["error"] = str(error)
        except Exception as error:  # a bug that one pull meets must not end the others
            log.exception("pull %d has failed", message["id"])
            answer["error"] = str(error) or type(error).__name__
        self._pulls.pop(message["id"], None)
        self._tell({**answer, "count": folded[0]})

    def _fold(self, message: ControlMessage, running: RunningPull, count: list[int]) -> None:
        """Carries out a pull; `count[0]` says how many ranges were folded, also after an error."""
        source = MoverAddress(message["host"], message["port"], message["name"])
        ticket, version = bytes.fromhex(message["ticket"]), version_of(message["version"])
        ranges = [tuple(each) for each in message["ranges"]]
        code = (tuple(message["code"]), message["column"], message["block"])
        pull = RangePull(source, ticket, version, message["rank"], ranges, *code)
        slot = self._folds[message["fold"]].slot
        parity = slot.data[: slot.header.data_bytes]
        untold_bytes = 0
        if running.is_cancelled:
            raise BrokenConnection("the pull was cancelled.")
        with contextlib.closing(range_client.connect(pull, self._tls() if self._tls else None)) as connection:
            running.use(connection)
            for nbytes in range_client.fold_ranges(connection, pull, parity):
                count[0] += 1
                untold_bytes += nbytes
                if untold_bytes >= TELL_BYTES or count[0] == len(pull.ranges):
                    self._tell({"moved": message["id"], "bytes": untold_bytes})
                    untold_bytes = 0
