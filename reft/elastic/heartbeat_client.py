"""Sends this agent's heartbeats to daemons, and receives signals from its own daemon.

    _beat    every BEAT_S: AgentBeat ─► own daemon, which names watchers ─► their daemons
    _listen  always: Signals ─► own daemon, which answers when a node's signal changes ─► on_news

Both are threads. No heartbeat waits for the reply to another one: if this node's own daemon is
stopped, the other daemons must still hear this agent, or they would declare the node lost. No error
here reaches the agent: without answers the rendezvous behaves as torch's own.

Heartbeats to other nodes are proved (reft/wire/proof.py). Nothing is taken from the answers but the
challenge for the next heartbeat, so the answers need no proof.

Calls to the own daemon say the protocol, too. A daemon of another protocol, which took the place of
the earlier one, hears neither this agent nor other nodes, and would call them lost.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from reft.core.membership.agent_policy import AgentReaction, react
from reft.core.membership.failure_detector import BEAT_S, AgentPhase, NodeReport
from reft.core.membership.gossip_targets import neighbours, ring_of
from reft.wire import messages, rpc
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.proof import ProvedCall, challenge_in, prove_call
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

CALL_S = 1.0
PENDING_MAX = 3  # unanswered heartbeats to one daemon
WAIT_MS = 5000
LAST_WORD_S = 1.0
_BEAT, _ = rpc.method_of(pb_grpc.DaemonStub, "AgentBeat")


@dataclass(frozen=True)
class RoundMembers:
    """One round, as the daemons are told.

    Attributes:
        token: of the agents and daemons of the launch.
        job_token: the job's token, for the own daemon's trainers; empty without a job key.
    """

    job: str
    node_id: str
    launch: str
    round: int
    token: bytes = field(repr=False)
    nodes: tuple[pb.Node, ...] = field(compare=False)
    job_token: bytes = field(default=b"", repr=False)


@dataclass
class DaemonChannel:
    """A channel to one daemon.

    Attributes:
        channel: gRPC's.
        generation: of the certificates that the channel uses.
        challenge: the newest one that the daemon has told.
        is_unreached: whether the daemon of another node did not answer.
    """

    channel: grpc.Channel
    generation: int
    challenge: bytes = b""
    is_unreached: bool = False


class HeartbeatClient:
    """One agent's connection to the daemons; see the module.

    Args:
        address: of this node's daemon.
        restarter: starts that daemon again, and knows this agent's pid as the daemon sees it.
        tls: for the daemons of other nodes; None: plain text.
        on_news: called with a round and the reaction to its signals whenever a signal changes;
            called from a thread of this client.

    Attributes:
        whole: the newest step of the job that the own daemon ever called whole; -1: none.
    """

    def __init__(
        self,
        address: str,
        restarter: DaemonRestarter,
        tls: Tls | None,
        on_news: Callable[[RoundMembers, AgentReaction], None],
    ) -> None:
        self._address, self._restarter, self._tls, self._on_news = address, restarter, tls, on_news
        self.whole = -1
        self._round_members: RoundMembers | None = None
        self._phase = AgentPhase.TRAINING
        self._watchers: list[pb.Node] = []
        self._must_send_nodes = True
        self._pending: Counter[str] = Counter()
        self._channels: dict[str, DaemonChannel] = {}  # by address
        self._wake, self._closed = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._listen)]

    def begin(self, round_members: RoundMembers) -> None:
        """Starts the heartbeats of a round: the agent's workers run in this round now."""
        # The watchers are computed here: this node's daemon may be stopped just when a round
        # begins.
        nodes = {node.id: node for node in round_members.nodes}
        watchers = [nodes[ident] for ident in neighbours(round_members.node_id, ring_of(nodes))]
        self._round_members, self._phase, self._watchers, self._must_send_nodes = (
            round_members,
            AgentPhase.TRAINING,
            watchers,
            True,
        )
        self._wake.set()
        if not self._threads[0].is_alive():
            for thread in self._threads:
                thread.start()

    def say(self, phase: AgentPhase) -> None:
        """Changes the phase that the heartbeats report."""
        self._phase = phase
        self._wake.set()

    def close(self, last: AgentPhase) -> None:
        """Sends one last phase, and stops.

        Returns when the daemons have answered, or after LAST_WORD_S.
        """
        if self._round_members is not None:
            self._phase, targets = last, self._targets()
            for _ in range(2):  # the second time under a challenge that the first answer has told
                calls = {target: call for target in targets if (call := self._send(*target))}
                targets = [target for target, call in calls.items() if not _is_heard(call)]
        self.stop()

    def stop(self) -> None:
        """Ends both threads and sends nothing."""
        self._closed.set()
        self._wake.set()
        for each in list(self._channels.values()):
            each.channel.close()

    # Heartbeats

    def _beat(self) -> None:
        while not self._closed.is_set():
            for name, address in self._targets():
                self._send(name, address)
            self._wake.wait(BEAT_S)
            self._wake.clear()

    def _targets(self) -> list[tuple[str, str]]:
        """Returns (node id, address) of all daemons to send to; "" is the own daemon."""
        watchers = [(node.id, _address_of(node)) for node in self._watchers]
        return [("", self._address), *((name, address) for name, address in watchers if address)]

    def _send(self, name: str, address: str, is_repeated: bool = False) -> grpc.Future | None:
        round_members = self._round_members
        if round_members is None or self._pending[name] >= PENDING_MAX:
            return None
        request = pb.AgentBeatRequest(
            job=round_members.job,
            node_id=round_members.node_id,
            launch=round_members.launch,
            round=round_members.round,
            pid=self._restarter.agent_pid,
            phase=messages.agent_to(self._phase),
        )
        if not name:
            request.token, request.job_token = round_members.token, round_members.job_token
            if self._must_send_nodes:
                request.nodes.extend(round_members.nodes)
        try:
            call, proved = self._start_call(name, address, round_members, request)
        except (ValueError, OSError):  # another thread closed the channel, or the socket is another user's
            return None
        self._pending[name] += 1
        call.add_done_callback(lambda done: self._answered(name, address, round_members, done))
        if proved is not None:
            call.add_done_callback(lambda done: self._note_challenge(name, address, done, proved, is_repeated))
        return call

    def _start_call(
        self, name: str, address: str, round_members: RoundMembers, request: pb.AgentBeatRequest
    ) -> tuple[grpc.Future, ProvedCall | None]:
        """Starts a call; returns it, and what it proves. A unix socket takes no proof.

        Raises:
            ValueError: the channel is closed.
            OSError: another user may have made the unix socket of another daemon.
        """
        daemon = self._channel(address)
        if address.startswith("unix:"):
            if name:
                rpc.check_private(address)
            beat = pb_grpc.DaemonStub(daemon.channel).AgentBeat
            return beat.future(request, timeout=CALL_S, metadata=rpc.PROTOCOL_METADATA), None
        call, data = prove_call(
            round_members.token,
            name or round_members.node_id,
            _BEAT,
            request.job,
            daemon.challenge,
            request,
        )
        metadata = (*call.metadata(), *rpc.PROTOCOL_METADATA)
        method_call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = daemon.channel.unary_unary(_BEAT)
        return method_call.future(data, timeout=CALL_S, metadata=metadata), call

    def _answered(self, name: str, address: str, round_members: RoundMembers, call: grpc.Future) -> None:
        self._pending[name] -= 1
        if call.cancelled():
            return
        error = call.exception()
        is_unreached = isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE
        if name:
            self._channels[address].is_unreached = is_unreached
            return
        if round_members is not self._round_members:
            return
        if error is not None:  # a restarted daemon does not know the round
            self._must_send_nodes = True
            if is_unreached:
                self._restarter.refused(self._address)
            return
        reply: pb.AgentBeatReply = call.result()
        self._must_send_nodes = reply.unknown_round
        self._watchers = list(reply.watchers)
        if reply.HasField("whole"):
            self.whole = max(self.whole, reply.whole)

    def _note_challenge(self, name: str, address: str, call: Any, proved: ProvedCall, is_repeated: bool) -> None:
        """Takes the challenge of an answer; sends a heartbeat again that was refused for it."""
        challenge = b"" if call.cancelled() else challenge_in(call.trailing_metadata())
        if challenge not in (b"", proved.challenge):
            self._channels[address].challenge = challenge
            if call.code() is grpc.StatusCode.UNAUTHENTICATED and not is_repeated:
                self._send(name, address, is_repeated=True)

    def _channel(self, address: str) -> DaemonChannel:
        generation = self._tls.generation if self._tls else 0
        daemon = self._channels.get(address)
        if daemon is None or (daemon.generation != generation and daemon.is_unreached):
            if daemon:
                daemon.channel.close()
            daemon = self._channels[address] = DaemonChannel(rpc.channel(address, self._tls), generation)
        return daemon

    # Signals

    def _listen(self) -> None:
        version = 0
        stub = pb_grpc.DaemonStub(self._channel(self._address).channel)
        while not self._closed.is_set():
            round_members = self._round_members
            assert round_members is not None
            request = pb.SignalsRequest(job=round_members.job, version=version, wait_ms=WAIT_MS)
            try:
                reply: pb.SignalsReply = stub.Signals(
                    request, timeout=WAIT_MS / 1000 + CALL_S, metadata=rpc.PROTOCOL_METADATA
                )
            except (grpc.RpcError, ValueError):
                version = 0
                self._closed.wait(BEAT_S)
                continue
            version = reply.version
            if (reply.launch, reply.round) == (round_members.launch, round_members.round):
                reports = [
                    NodeReport(each.node_id, messages.signal_from(each.signal), each.reason) for each in reply.nodes
                ]
                self._on_news(round_members, react(round_members.node_id, reports))
            else:
                version = 0  # the answer was about another round: ask again for all signals
                self._closed.wait(BEAT_S)


def _is_heard(call: grpc.Future) -> bool:
    """Returns whether the other side has accepted a call, once it has answered."""
    try:
        return call.exception(timeout=LAST_WORD_S) is None
    except (grpc.FutureTimeoutError, grpc.FutureCancelledError):
        return False


def _address_of(node: pb.Node) -> str:
    """Returns the address at which another node's daemon is called.

    A unix socket is used only if there is no other address. Then the node is on this machine.
    """
    return next((address for address in node.addresses if not address.startswith("unix:")), "".join(node.addresses[:1]))
