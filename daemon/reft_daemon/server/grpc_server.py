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
    return grpc.aio.server(options=rpc.OPTIONS, interceptors=[_RequestChecker()], maximum_concurrent_rpcs=CALLS_MAX)


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
