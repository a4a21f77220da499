"""Makes proved calls as another node does, and serves as a daemon does that knows a token."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc

from reft.wire import messages, proof, rpc
from reft.wire.proof import Challenges, ProvedCall, prove_call
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc


class ProvingCaller:
    """Makes calls over one channel, each with a proof, and checks the replies.

    Args:
        channel: to the daemon.
        token: what the calls prove.
        node_id: the node that the calls name; None: that of the daemon.
    """

    def __init__(self, channel: grpc.Channel, token: bytes, node_id: str | None = None) -> None:
        self._channel, self._token = channel, token
        self.protocol: proof.Metadata = rpc.PROTOCOL_METADATA  # what the calls say
        self.challenge = b""
        self._node_id = node_id if node_id is not None else self._hello().node_id
        self.answered: Sequence[tuple[str, str | bytes]] = ()  # metadata of the last reply
        self.calls: list[tuple[str, bytes, proof.Metadata]] = []  # all that was sent

    def _hello(self) -> pb.HelloReply:
        stub = pb_grpc.DaemonStub(self._channel)
        reply, call = stub.Hello.with_call(messages.hello(), timeout=10, metadata=rpc.PROTOCOL_METADATA)
        self.challenge = proof.challenge_in(call.trailing_metadata())
        return reply

    def call(self, method: str, request: Any, service: type | None = None, job: str | None = None) -> Any:
        """Makes a call; tries again under the challenge of the daemon.

        Args:
            method: name of the method.
            request: what is asked.
            service: class of the stub; None: that of trainers and the CLI.
            job: the job that the proof names; None: that of the request.

        Returns:
            The reply; of Read, a list of pieces.

        Raises:
            grpc.RpcError: the daemon has refused.
        """
        name, reply_type = rpc.method_of(service or pb_grpc.DaemonStub, method)
        for _ in range(2):
            named = messages.job_of(request) if job is None else job
            call, data = prove_call(self._token, self._node_id, name, named, self.challenge, request)
            self.calls.append((name, data, (*call.metadata(), *self.protocol)))
            try:
                reply = self._read(call) if method == "Read" else self._ask(call, reply_type)
                assert isinstance(reply, list) or self.challenge, "a proved reply tells the challenge"
                return reply
            except grpc.RpcError as error:
                challenge = proof.challenge_in(error.trailing_metadata())
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED or challenge in (b"", call.challenge):
                    if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED):
                        details = (error.details() or "").encode()
                        assert call.has_reply(error.trailing_metadata(), error.code().value[0], details), error
                    raise
                self.challenge = challenge
        raise AssertionError("the daemon told one challenge and wants another one")

    def _ask(self, call: ProvedCall, reply_type: type) -> Any:
        data, sent = self._channel.unary_unary(call.method).with_call(self.calls[-1][1], 10, self.calls[-1][2])
        self.answered = sent.trailing_metadata()
        assert call.has_reply(self.answered, 0, data)
        self.challenge = proof.challenge_in(sent.trailing_metadata())
        reply = reply_type.FromString(data)
        call.veil_reply(reply)
        return reply

    def _read(self, call: ProvedCall) -> list[bytes]:
        pieces = self._channel.unary_stream(call.method)(self.calls[-1][1], 10, self.calls[-1][2])
        found = [pb.Chunk.FromString(piece).data for piece in pieces]
        self.answered = pieces.initial_metadata()
        assert call.has_reply(self.answered, 0, b"")
        return found


class ProvingServer(grpc.GenericRpcHandler):
    """Answers any call with the same status, with proofs if it knows the token.

    Args:
        node_id: that Hello tells.
        token: None: it knows none.
        status: of each answer.
        reply: the message of each answer.
    """

    def __init__(
        self, node_id: str, token: bytes | None, status: grpc.StatusCode = grpc.StatusCode.OK, reply: Any = None
    ) -> None:
        self.challenges, self._token = Challenges(node_id), token
        self.status, self.reply = status, reply
        self.received: list[Any] = []  # metadata and bytes of all calls
        self.proved = 0  # calls with a proof
        self._hello = pb.HelloReply(protocol=messages.PROTOCOL, oldest=messages.OLDEST, node_id=node_id)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        details = handler_call_details
        if details.method.endswith("/Read"):
            return grpc.unary_stream_rpc_method_handler(functools.partial(self._read, details))
        return grpc.unary_unary_rpc_method_handler(functools.partial(self._answer, details))

    async def _answer(self, details: Any, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        metadata = context.invocation_metadata()
        self.received += [tuple(metadata), data]
        if details.method.endswith("/Hello"):
            context.set_trailing_metadata(self.challenges.metadata())
            return self._hello.SerializeToString()
        call = await self._proved(details.method, metadata, context)
        reply = type(self.reply or pb.InventoryReply())()
        if self.reply is not None:
            reply.CopyFrom(self.reply)
        if call is not None:
            call.veil_reply(reply)
        content = reply.SerializeToString() if self.status is grpc.StatusCode.OK else b"why"
        context.set_trailing_metadata(self._proof_of(call, content))
        if self.status is not grpc.StatusCode.OK:
            await context.abort(self.status, "why", self._proof_of(call, content))
        return content

    async def _read(self, details: Any, data: bytes, context: grpc.aio.ServicerContext) -> Any:
        metadata = context.invocation_metadata()
        self.received += [tuple(metadata), data]
        call = await self._proved(details.method, metadata, context)
        if self.status is not grpc.StatusCode.OK:
            await context.abort(self.status, "why", self._proof_of(call, b"why"))
        if call is not None:
            await context.send_initial_metadata(((proof.PROOF_KEY, call.reply_proof(0, b"")),))
        yield pb.Chunk(data=b"piece").SerializeToString()

    async def _proved(self, method: str, metadata: Any, context: grpc.aio.ServicerContext) -> ProvedCall | None:
        if self._token is None:
            return None
        try:
            call = self.challenges.check(metadata, method, (self._token,))
            self.proved += 1
            return call
        except proof.UnprovedCall as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error), self.challenges.metadata())
            raise

    def _proof_of(self, call: ProvedCall | None, content: bytes) -> Sequence[tuple[str, str | bytes]]:
        if call is None:
            return rpc.PROTOCOL_METADATA
        status = (proof.PROOF_KEY, call.reply_proof(self.status.value[0], content))
        return (status, *self.challenges.metadata(), *rpc.PROTOCOL_METADATA)


@contextlib.asynccontextmanager
async def serving(answers: ProvingServer, address: str = "") -> AsyncIterator[str]:
    """Serves any method at an address of this machine, or at a given one."""
    server = grpc.aio.server(options=rpc.OPTIONS)
    server.add_generic_rpc_handlers((answers,))
    port = server.add_insecure_port(address or "127.0.0.1:0")
    await server.start()
    try:
        yield address or f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.contextmanager
def rogue(answers: ProvingServer, address: str) -> Iterator[None]:
    """Serves any method at the address of a daemon that is gone, in a thread of its own."""
    loop = asyncio.new_event_loop()
    is_over = asyncio.Event()
    has_begun = threading.Event()

    async def serve() -> None:
        async with serving(answers, address):
            has_begun.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert has_begun.wait(10)
        yield
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()
