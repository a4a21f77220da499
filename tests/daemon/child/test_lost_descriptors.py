"""A child that has no room for a command's descriptors says so, and nothing else."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reft.failpoints import Failpoints
from reft_daemon.child.control_channel import TOO_MANY_FILES, ControlMessage, receive_message, send_message
from reft_daemon.mover.child import CommandServer
from reft_daemon.persist.child import StorageServer
from reft_daemon.persist.storage_folder import StorageFolder
from reft_replayer import child as replayer

COMMANDS = {
    "begin": {"job": "job", "file_bytes": 4096},
    "write": {
        "job": "job", "lineage": "0" * 16, "version": (1, "00" * 16, 1), "node": 0, "attempt": 1, "slots": [(0, [])],
    },
    "replay": {"order_bytes": 10, "file_bytes": [4096, 4096]},
}  # fmt: skip


def received(do: str) -> ControlMessage:
    """Returns a command as a process gets it that may open no file more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send_message(ours, {"do": do, "id": 7, **COMMANDS[do]}, [ours.fileno()])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            message, descriptors = receive_message(theirs)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not descriptors
    return message


def of_mover(message: ControlMessage, folder: Path) -> ControlMessage:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send_message(ours, message)
        ours.shutdown(socket.SHUT_WR)
        CommandServer(theirs, SimpleNamespace(serve=lambda: None, port=1)).run()  # type: ignore[arg-type]
        ready, answer = receive_message(ours), receive_message(ours)
    assert ready is not None and answer is not None
    return answer[0]


def of_persister(message: ControlMessage, folder: Path) -> ControlMessage:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        StorageServer(theirs, StorageFolder(folder))._answer(message, [])
        begun, answer = receive_message(ours), receive_message(ours)
    assert begun is not None and answer is not None
    return answer[0]


def of_replayer(message: ControlMessage, folder: Path) -> ControlMessage:
    return replayer._answer(message, [], Failpoints())


@pytest.mark.parametrize(("do", "ask"), [("begin", of_mover), ("write", of_persister), ("replay", of_replayer)])
def test_a_command_without_its_descriptors_is_refused_in_words(tmp_path, caplog, do, ask: Any):
    answer = ask(received(do), tmp_path)
    assert answer["done"] == 7 and answer["error"] == TOO_MANY_FILES
    assert not answer.get("differs") and "Traceback" not in caplog.text
