"""The replayer's process: recomputes copies, one order at a time.

    daemon                                       replayer
              ◄────────────────────── ready      once, when torch is loaded
      replay  + descriptors of the order,
              base, target and records ────►     see `section_replay`
              ◄─────────────────────── done      error and kind, or none; CPU seconds

To stop an order, the daemon kills this process. No slot is mapped between two orders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from reft.errors import FormatError, ReftError
from reft.failpoints import Failpoints
from reft.replay.section_replay import CopiesDiffer, replay
from reft.wire.shm import map_file
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import replay_pb2
from reft_daemon.child.control_channel import ControlMessage, check_descriptors, receive_message, send_message

log = logging.getLogger("reft.replayer")


def serve(channel: socket.socket, failpoints: Failpoints) -> None:
    """Carries out orders until the channel ends."""
    send_message(channel, {"ready": os.getpid()})
    while received := receive_message(channel):
        message, descriptors = received
        cpu_s, began_s = time.process_time(), time.monotonic()
        try:
            answer = _answer(message, descriptors, failpoints)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        with contextlib.suppress(OSError):  # the daemon has ended, and this loop ends too
            cost = {"cpu_s": time.process_time() - cpu_s, "took_s": time.monotonic() - began_s}
            send_message(channel, {**answer, **cost})


def _answer(message: ControlMessage, descriptors: Sequence[int], failpoints: Failpoints) -> ControlMessage:
    """Carries out an order; returns the answer, which holds no slot."""
    try:
        _carry_out(message, descriptors, failpoints)
    except CopiesDiffer as error:
        return {"done": message["id"], "error": error.message, "differs": True}
    except (ReftError, OSError, ValueError) as error:
        return {"done": message["id"], "error": error.message if isinstance(error, ReftError) else str(error)}
    except Exception as error:  # a bug that one order meets must not end the others
        log.exception("an order can't be carried out")
        return {"done": message["id"], "error": str(error) or type(error).__name__}
    return {"done": message["id"]}


def _carry_out(message: ControlMessage, descriptors: Sequence[int], failpoints: Failpoints) -> None:
    check_descriptors(message)
    order_file, *slot_files = descriptors
    data = os.pread(order_file, message["order_bytes"], 0)
    try:
        order = replay_pb2.ReplayOrder.FromString(data)
    except DecodeError as error:
        raise FormatError(f"the order can't be read: {error}.") from error
    base, target, *records = (
        SlotMap(map_file(descriptor, nbytes)[1])
        for descriptor, nbytes in zip(slot_files, message["file_bytes"], strict=True)
    )
    replay(order, base, target, records, failpoints)
