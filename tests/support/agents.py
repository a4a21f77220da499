"""A fake torchrun agent: a process that only sends heartbeats.

`python -m tests.support.agents`, driven by `Agent`.

Its arguments are the address of its own daemon, and a file. It writes into the file the number of
the newest request that the daemon has answered. Each line of input is an AgentBeatRequest in hex,
which replaces the one before, for example for another phase or round. The process ends with its
input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from reft.core.membership.failure_detector import BEAT_S
from reft.wire import rpc
from reft.wire.proof import challenge_in, prove_call
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemons import ROOT, until

TOKEN = bytes(range(32))
CALL_S = 1.0
BEAT, _ = rpc.method_of(pb_grpc.DaemonStub, "AgentBeat")
Spawn = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]


def spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT)


class Agent:
    """One node's fake agent.

    Args:
        address: the address of its daemon, as the agent sees it.
        job: the job's name.
        node_id: the id of the node.
        nodes: all members of the round.
        run: starts the agent's command, with a pipe as input.
    """

    def __init__(self, address: str, job: str, node_id: str, nodes: Sequence[pb.Node], run: Spawn = spawn) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="reft-agent-")
        self._answered_path, self._sent = Path(self._folder.name) / "heard", 0
        self.process = run([sys.executable, "-m", "tests.support.agents", address, str(self._answered_path)])
        self.request = pb.AgentBeatRequest(job=job, node_id=node_id, launch="launch", round=1, nodes=nodes, token=TOKEN)
        self.say()

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self, **changes: object) -> None:
        """Changes fields of all further heartbeats."""
        self.request.MergeFrom(pb.AgentBeatRequest(**changes))
        assert self.process.stdin is not None
        self.process.stdin.write(self.request.SerializeToString().hex().encode() + b"\n")
        self.process.stdin.flush()
        self._sent += 1

    def await_heard(self) -> None:
        """Waits until its own daemon has answered the newest heartbeat."""
        until(
            lambda: self._answered_path.exists() and int(self._answered_path.read_text() or 0) >= self._sent,
            what="the agent's beat",
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def main(address: str, answered_path: str) -> None:
    requests: list[pb.AgentBeatRequest] = []
    ended = threading.Event()
    watchers: list[pb.Node] = []
    challenges: dict[str, bytes] = {}
    channels = {address: rpc.channel(address)}

    def listen() -> None:
        for line in sys.stdin:
            requests.append(pb.AgentBeatRequest.FromString(bytes.fromhex(line)))
            requests[-1].pid = os.getpid()
        ended.set()

    def send(node_id: str, to: str) -> None:
        """Sends a heartbeat; over TCP with a proof, again when the daemon tells its challenge."""
        if to not in channels:
            channels[to] = grpc.insecure_channel(to, options=rpc.OPTIONS)
        request, number = requests[-1], len(requests)
        challenge = challenges.get(to, b"")
        if to == address:
            call = pb_grpc.DaemonStub(channels[to]).AgentBeat.future(request, timeout=CALL_S)
        else:
            passed_on = pb.AgentBeatRequest()
            passed_on.CopyFrom(request)
            passed_on.ClearField("nodes")
            passed_on.ClearField("token")
            proved, data = prove_call(TOKEN, node_id, BEAT, request.job, challenge, passed_on)
            metadata = (*proved.metadata(), *rpc.PROTOCOL_METADATA)
            call = channels[to].unary_unary(BEAT).future(data, timeout=CALL_S, metadata=metadata)

        def answered(call: grpc.Future) -> None:
            if call.cancelled():
                return
            told = challenge_in(call.trailing_metadata())
            if to != address and told not in (b"", challenge):
                challenges[to] = told
                if call.exception() is not None and not challenge:
                    send(node_id, to)
            if to == address and call.exception() is None:
                watchers[:] = call.result().watchers or watchers
                Path(answered_path).write_text(str(number))

        # The callback also holds a reference to the call: gRPC cancels a call without references.
        call.add_done_callback(answered)

    threading.Thread(target=listen, daemon=True).start()
    # No call waits for another one: a stopped daemon must not delay heartbeats to other daemons.
    while not ended.wait(BEAT_S if requests else BEAT_S / 10):
        if requests:
            send("", address)
            for node in list(watchers):
                send(node.id, node.addresses[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
