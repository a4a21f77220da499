"""The channel between a daemon and a child of it: one socket pair, a JSON object a message.

    daemon    do, id, the command's fields, + descriptors ─►    child
              ◄───────────────────────────────────── ready      once, at the start
              ◄───────────────────────────────────── moved      bytes of a command, now and then
              ◄────────────────────── done, + descriptors       each command with an id, once

Both sides are of one version, and the pair has no name, so no other process can send. A message is
one datagram, at most MESSAGE_MAX bytes. The child ends when the channel ends. A child that ends
answers nothing more: the daemon takes each command without an answer for failed.
"""

from __future__ import annotations

import array
import errno
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from reft.core.commit.version import Epoch, Version
from reft.errors import AttachError
from reft.wire.local_socket import receive_descriptors

MESSAGE_MAX: Final = 64 << 10
DESCRIPTORS_MAX: Final = 64  # of one message
TOO_MANY_FILES: Final = "a process of the daemon has as many files open as it may (ulimit -n): raise the limit."

ControlMessage = Mapping[str, Any]


def send_message(channel: socket.socket, message: ControlMessage, descriptors: Sequence[int] = ()) -> None:
    """Sends a message whole.

    Raises:
        BlockingIOError: the channel does not wait, and the other side has not read enough.
        OSError: the channel has ended.
        ValueError: the message is too long.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MESSAGE_MAX or len(descriptors) > DESCRIPTORS_MAX:
        raise ValueError(
            f"a message of {len(data)} bytes and {len(descriptors)} descriptors; the limits are {MESSAGE_MAX} and "
            f"{DESCRIPTORS_MAX}."
        )
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([data], passed)


def receive_message(channel: socket.socket) -> tuple[ControlMessage, list[int]] | None:
    """Returns the next message and its descriptors, which the caller owns; None at the end.

    Descriptors for which this process has no room are lost. Then the message has none, but an
    `error`.

    Raises:
        BlockingIOError: the channel does not wait, and there is no message.
        OSError: the channel has ended.
    """
    data, descriptors, is_cut = receive_descriptors(channel, MESSAGE_MAX, DESCRIPTORS_MAX)
    if not data:
        return None
    message: ControlMessage = json.loads(data)
    if is_cut:
        message = {**message, "error": TOO_MANY_FILES, "damaged": False, "errno": errno.EMFILE}
    return message, descriptors


def check_descriptors(command: ControlMessage) -> None:
    """Raises AttachError if the descriptors of a command were lost, see `receive_message`."""
    if "error" in command:
        raise AttachError(command["error"])


def version_of(fields: Sequence[object]) -> Version:
    """Returns the version of the fields of a message, see `fields_of`."""
    counter, ident, step = fields
    return Version(Epoch(int(str(counter)), bytes.fromhex(str(ident))), int(str(step)))


def fields_of(version: Version) -> tuple[int, str, int]:
    """Returns a version as fields of a message."""
    return version.epoch.counter, version.epoch.ident.hex(), version.step
