"""Idle processes in the place of trainers, which call daemons when a test asks them to.

    Trainer ── a line of JSON: address, method, request ──► fork: calls the daemon's unix socket
            ◄── a line of JSON: reply, or status and text ──

A lease is for the process that calls, by the word of the kernel. So a test can't lease for a
trainer: it lets the trainer call. The server imports gRPC, but never uses it.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.forks import Fork, serve, server

DEADLINE_S = 60.0
METHODS = pb.DESCRIPTOR.services_by_name["Daemon"].methods_by_name


class CallError(grpc.RpcError):
    """A call that a trainer made has failed."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Trainer:
    """An idle process in the place of a rank's trainer.

    Attributes:
        process: the process.
    """

    def __init__(self) -> None:
        name = f"reft-test-{secrets.token_hex(8)}"
        descriptor, log = tempfile.mkstemp(prefix="reft-test-")
        os.close(descriptor)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            listener.settimeout(DEADLINE_S)
            self.process = Fork(server(__name__), Path(log), os.environ, name=name)
            connection, _ = listener.accept()
        os.unlink(log)
        connection.settimeout(DEADLINE_S)
        self._line = connection.makefile("rw")
        connection.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, address: str, method: str, request: Any, timeout: float = 20.0) -> Any:
        """Lets the process call a daemon by its unix socket; returns the reply.

        Raises:
            CallError: the call failed, or the process has ended.
        """
        data = base64.b64encode(request.SerializeToString()).decode()
        try:
            print(json.dumps([address, method, data, timeout]), file=self._line, flush=True)
            answer = self._line.readline()
        except OSError:
            answer = ""
        if not answer:
            raise CallError(grpc.StatusCode.UNAVAILABLE, f"trainer {self.pid} has ended")
        code, text = json.loads(answer)
        if code:
            raise CallError(rpc.CODES[code], text)
        return GetMessageClass(METHODS[method].output_type).FromString(base64.b64decode(text))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._line.close()


def become(request: Mapping[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{request['name']}")
        lines = connection.makefile("rw")
    for text in lines:
        print(json.dumps(_answer(*json.loads(text))), file=lines, flush=True)


def _answer(address: str, method: str, data: str, timeout: float) -> tuple[int, str]:
    request = GetMessageClass(METHODS[method].input_type).FromString(base64.b64decode(data))
    with rpc.channel(address) as channel:
        try:
            reply = getattr(pb_grpc.DaemonStub(channel), method)(request, timeout=timeout)
        except grpc.RpcError as error:
            return error.code().value[0], error.details() or ""
    return 0, base64.b64encode(reply.SerializeToString()).decode()


if __name__ == "__main__":
    serve(become)
