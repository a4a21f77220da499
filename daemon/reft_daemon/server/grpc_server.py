"""The daemon's gRPC servers: their limits, the protocol check, and refused bytes.

    call ─► protocol: none in common ─► refused with both numbers; the request is not parsed
        └─► request can't be parsed ─► refused
             └─► service ─► reply, with this daemon's protocol as metadata

Anyone who reaches a port may send anything before showing a token. gRPC alone would log a traceback
for each request that can't be parsed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from reft.errors import AttachError
from reft.wire import rpc
from reft_daemon import __version__

CALLS_MAX = 1024  # calls at the same time
SERVICES = "/reft.v1."
HELLO = "/reft.v1.Daemon/Hello"  # has the protocol in its request


def server(must_say_protocol: bool = False) -> grpc.aio.Server:
    """Returns a server without services and ports.

    Args:
        must_say_protocol: whether each call must say the caller's protocol, as daemons do. Trainers
            and the CLI say it in Hello.
    """
    checkers = [_ProtocolChecker(must_say_protocol), _RequestChecker()]
    return grpc.aio.server(options=rpc.OPTIONS, interceptors=checkers, maximum_concurrent_rpcs=CALLS_MAX)


class _ProtocolChecker(grpc.aio.ServerInterceptor):
    """Refuses callers without a common protocol; says this daemon's protocol in replies."""

    def __init__(self, must_say_protocol: bool) -> None:
        self._must_say_protocol = must_say_protocol

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        metadata = details.invocation_metadata
        has_protocol = self._must_say_protocol or rpc.says_protocol(metadata)
        if handler is None or not has_protocol or not details.method.startswith(SERVICES) or details.method == HELLO:
            return handler
        try:
            rpc.check_peer(metadata, "you speak", f"this daemon (reft {__version__})")
        except AttachError as error:
            refuse = _refusing(str(error))
            return handler._replace(
                request_deserializer=None,
                unary_unary=handler.unary_unary and refuse,
                unary_stream=handler.unary_stream and refuse,
            )
        return handler._replace(
            unary_unary=handler.unary_unary and _saying_protocol(handler.unary_unary),
            unary_stream=handler.unary_stream and _saying_protocol_first(handler.unary_stream),
        )


def _refusing(text: str) -> Callable[..., Awaitable[Any]]:
    """Returns a method that refuses each request."""

    async def refuse(_: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.abort(rpc.STATUS_OF[AttachError], text)

    return refuse


def _saying_protocol(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Returns a method whose reply is followed by this daemon's protocol."""

    async def answer_once(request: Any, context: grpc.aio.ServicerContext) -> Any:
        context.set_trailing_metadata(rpc.PROTOCOL_METADATA)
        return await answer(request, context)

    return answer_once


def _saying_protocol_first(answer: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Returns a method that says this daemon's protocol before the first piece of its reply."""

    async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await context.send_initial_metadata(rpc.PROTOCOL_METADATA)
        async with contextlib.aclosing(answer(request, context)) as replies:  # type: ignore[type-var]
            async for piece in replies:
                yield piece

    return answer_stream


class _RequestChecker(grpc.aio.ServerInterceptor):
    """Refuses calls whose request can't be parsed."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # unknown method: gRPC answers this itself
        parse = handler.request_deserializer

        def parse_or_error(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                return error

        return handler._replace(
            request_deserializer=parse_or_error,
            unary_unary=_checking_request(handler.unary_unary),
            unary_stream=_checking_request(handler.unary_stream),
        )


def _checking_request(answer: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns a method that refuses unparsable requests before it calls `answer`."""
    if answer is None:
        return None

    async def answer_once(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _refuse_unparsed(request, context)
        return await answer(request, context)

    async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await _refuse_unparsed(request, context)
        async with contextlib.aclosing(answer(request, context)) as replies:
            async for piece in replies:
                yield piece

    return answer_stream if inspect.isasyncgenfunction(answer) else answer_once


async def _refuse_unparsed(request: Any, context: grpc.aio.ServicerContext) -> None:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request can't be read: {request}")
