"""The daemon's gRPC servers: what they allow, and what they answer to bytes that are no message.

A caller that reaches a port may send anything before it has shown a token: gRPC itself would write a traceback for each of these.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from reft.wire import rpc

CALLS_MAX = 1024  # under way at once


def server() -> grpc.aio.Server:
    """A server without services and ports."""
    return grpc.aio.server(options=rpc.OPTIONS, interceptors=[_Refuser()], maximum_concurrent_rpcs=CALLS_MAX)


class _Refuser(grpc.aio.ServerInterceptor):
    """Ends calls whose request can't be read."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # no such method: gRPC says so
        parse = handler.request_deserializer

        def parsed(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                return error

        return handler._replace(
            request_deserializer=parsed,
            unary_unary=_checked(handler.unary_unary),
            unary_stream=_checked(handler.unary_stream),
        )


def _checked(answer: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A method that is only called with what could be read."""
    if answer is None:
        return None

    async def once(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _refuse(request, context)
        return await answer(request, context)

    async def pieces(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await _refuse(request, context)
        async with contextlib.aclosing(answer(request, context)) as found:
            async for piece in found:
                yield piece

    return pieces if inspect.isasyncgenfunction(answer) else once


async def _refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request can't be read: {request}")
