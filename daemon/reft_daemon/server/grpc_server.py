"""The daemon's gRPC servers: their limits, and their answer to bytes that are no message.

Anyone who reaches a port may send anything before showing a token. gRPC alone would log a traceback
for each such request.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from reft.wire import rpc

CALLS_MAX = 1024  # calls at the same time


def server() -> grpc.aio.Server:
    """Returns a server without services and ports."""
    return grpc.aio.server(options=rpc.OPTIONS, interceptors=[_Refuser()], maximum_concurrent_rpcs=CALLS_MAX)


class _Refuser(grpc.aio.ServerInterceptor):
    """Refuses calls whose request can't be parsed."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # unknown method: gRPC answers this itself
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
    """Returns a method that refuses unparsable requests before it calls `answer`."""
    if answer is None:
        return None

    async def once(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _refuse(request, context)
        return await answer(request, context)

    async def pieces(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await _refuse(request, context)
        async with contextlib.aclosing(answer(request, context)) as replies:
            async for piece in replies:
                yield piece

    return pieces if inspect.isasyncgenfunction(answer) else once


async def _refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request can't be read: {request}")
