"""Signs of life of this agent to daemons, and signals of the other nodes from its own daemon, beside the agent's own loop.

    Listener      every BEAT_S: AgentBeat ──► own daemon, which says whom else to tell ──► daemons of other nodes
    two threads   always: Signals ──────────► own daemon: held back until a node's signal changes ─► on_news

No beat waits for the reply of another: a stopped daemon of our own must not make us silent to the others, who would give
this node up. Nothing here raises into the agent: without answers the rendezvous is as torch has it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from reft.core.membership.agent_policy import AgentReaction, react
from reft.core.membership.failure_detector import BEAT_S, AgentPhase, NodeReport
from reft.core.membership.gossip_targets import neighbours, ring_of
from reft.wire import messages, rpc
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

CALL_S = 1.0
UNDER_WAY_MAX = 3  # beats to one daemon without an answer
WAIT_MS = 5000
LAST_WORD_S = 1.0


@dataclass(frozen=True)
class RoundMembers:
    """One round, as the daemons are told of it."""

    job: str
    node_id: str
    launch: str
    round: int
    token: bytes
    nodes: tuple[pb.Node, ...] = field(compare=False)


class HeartbeatClient:
    """See the module.

    Args:
        address: of this node's daemon.
        restarter: starts that daemon again; knows by which pid it sees this agent.
        tls: for the daemons of other nodes; None means plain text.
        on_news: told what the signals of a term mean, as often as they change; called from a thread of the listener.
    """

    def __init__(
        self,
        address: str,
        restarter: DaemonRestarter,
        tls: Tls | None,
        on_news: Callable[[RoundMembers, AgentReaction], None],
    ) -> None:
        self._address, self._restarter, self._tls, self._on_news = address, restarter, tls, on_news
        self._term: RoundMembers | None = None
        self._phase = AgentPhase.TRAINING
        self._watchers: list[pb.Node] = []
        self._must_introduce = True
        self._under_way: Counter[str] = Counter()
        self._channels: dict[str, tuple[grpc.Channel, int]] = {}  # with the generation of the certificates
        self._unreached: set[str] = set()  # addresses of other nodes
        self._wake, self._closed = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._listen)]

    def begin(self, term: RoundMembers) -> None:
        """The agent's workers run in this round now."""
        # Who listens to us is known without our own daemon, which may be stopped just when a round begins.
        nodes = {node.id: node for node in term.nodes}
        watchers = [nodes[each] for each in neighbours(term.node_id, ring_of(nodes))]
        self._term, self._phase, self._watchers, self._must_introduce = term, AgentPhase.TRAINING, watchers, True
        self._wake.set()
        if not self._threads[0].is_alive():
            for thread in self._threads:
                thread.start()

    def say(self, phase: AgentPhase) -> None:
        """What the agent does from now on."""
        self._phase = phase
        self._wake.set()

    def close(self, last: AgentPhase) -> None:
        """Says a last word; returns when the daemons have heard it, or after LAST_WORD_S."""
        if self._term is not None:
            self._phase = last
            calls = [call for call in (self._send(*target) for target in self._targets()) if call]
            for call in calls:
                try:
                    call.result(timeout=LAST_WORD_S)
                except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                    continue
        self.stop()

    def stop(self) -> None:
        """Ends both threads without a word."""
        self._closed.set()
        self._wake.set()
        for channel, _ in list(self._channels.values()):
            channel.close()

    # Beats

    def _beat(self) -> None:
        while not self._closed.is_set():
            for name, address in self._targets():
                self._send(name, address)
            self._wake.wait(BEAT_S)
            self._wake.clear()

    def _targets(self) -> list[tuple[str, str]]:
        """(node, address) of all who are told; "" is our own daemon."""
        others = [(node.id, _address_of(node)) for node in self._watchers]
        return [("", self._address), *((name, address) for name, address in others if address)]

    def _send(self, name: str, address: str) -> grpc.Future | None:
        term = self._term
        if term is None or self._under_way[name] >= UNDER_WAY_MAX:
            return None
        request = pb.AgentBeatRequest(
            job=term.job,
            node_id=term.node_id,
            launch=term.launch,
            round=term.round,
            pid=self._restarter.agent_pid,
            phase=messages.agent_to(self._phase),
        )
        if not name:
            request.token = term.token
            if self._must_introduce:
                request.nodes.extend(term.nodes)
        stub = pb_grpc.DaemonStub(self._channel(address))
        try:
            call: grpc.Future = stub.AgentBeat.future(request, timeout=CALL_S, metadata=rpc.token_metadata(term.token))
        except ValueError:  # the channel was closed under us
            return None
        self._under_way[name] += 1
        call.add_done_callback(lambda done: self._answered(name, address, term, done))
        return call

    def _answered(self, name: str, address: str, term: RoundMembers, call: grpc.Future) -> None:
        self._under_way[name] -= 1
        if call.cancelled():
            return
        error = call.exception()
        is_unreached = isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE
        if name:
            (self._unreached.add if is_unreached else self._unreached.discard)(address)
            return
        if term is not self._term:
            return
        if error is not None:  # a daemon that was started anew knows nothing
            self._must_introduce = True
            if is_unreached:
                self._restarter.refused(self._address)
            return
        reply: pb.AgentBeatReply = call.result()
        self._must_introduce = reply.unknown_round
        self._watchers = list(reply.watchers)

    def _channel(self, address: str) -> grpc.Channel:
        generation = self._tls.generation if self._tls else 0
        channel, made_at = self._channels.get(address, (None, -1))
        if channel is None or (made_at != generation and address in self._unreached):
            if channel:
                channel.close()
            channel = rpc.channel(address, self._tls)
            self._channels[address] = channel, generation
        return channel

    # Signals

    def _listen(self) -> None:
        version = 0
        stub = pb_grpc.DaemonStub(self._channel(self._address))
        while not self._closed.is_set():
            term = self._term
            assert term is not None
            request = pb.SignalsRequest(job=term.job, version=version, wait_ms=WAIT_MS)
            try:
                reply: pb.SignalsReply = stub.Signals(request, timeout=WAIT_MS / 1000 + CALL_S)
            except (grpc.RpcError, ValueError):
                version = 0
                self._closed.wait(BEAT_S)
                continue
            version = reply.version
            if (reply.launch, reply.round) == (term.launch, term.round):
                signs = [
                    NodeReport(each.node_id, messages.signal_from(each.signal), each.reason) for each in reply.nodes
                ]
                self._on_news(term, react(term.node_id, signs))
            else:
                version = 0  # what was held against another round must be judged again
                self._closed.wait(BEAT_S)


def _address_of(node: pb.Node) -> str:
    """Where another node's daemon is called; by a unix socket only if it has nothing else: then it is on this machine."""
    return next((address for address in node.addresses if not address.startswith("unix:")), "".join(node.addresses[:1]))
