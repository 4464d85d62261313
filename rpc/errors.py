"""Owns the one mapping between the classes of engine.errors and gRPC status codes, on servers and on clients.

What engine.errors does not know leaves a server as INTERNAL with an id; its traceback stays in the log under that id.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import grpc
import grpc.aio

from engine.errors import (
    DeadlineExceeded,
    EngineFault,
    InternalError,
    InvalidArgument,
    ModelNotFound,
    OutriderError,
    Overloaded,
    PairMismatch,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    UnknownSession,
    presentable,
)
from rpc.handlers import rewrapped
from rpc.pb import session_pb2 as pb

FIELD_TRAILER = "outrider-field"
RETRY_TRAILER = "outrider-retry-after-s"
DELIVERED_TRAILER = "outrider-delivered-tokens"
REQUEST_ID_TRAILER = "outrider-request-id"
_MAX_MESSAGE_CHARS = 2000  # a status travels in HTTP/2 headers, which peers limit to 8 KiB
_MAX_ID_CHARS = 256  # for the same reason; of a longer request id, where one is allowed, the beginning travels

_CODES: dict[type[OutriderError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    PairMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    ModelNotFound: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    UnknownSession: grpc.StatusCode.NOT_FOUND,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    EngineFault: grpc.StatusCode.INTERNAL,
    InternalError: grpc.StatusCode.INTERNAL,
}
_CLASSES_OF_MESSAGE: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: PairMismatch,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.NOT_FOUND: UnknownSession,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}
_CODE_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Status:
    """An error as it travels, in trailers or in a SessionFailed."""

    code: grpc.StatusCode
    message: str
    field: str = ""
    retry_after_s: float = 0.0


class _Verbatim(str):
    """Text whose repr is the text, for values that were turned into text before they travelled."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def status_of(error: BaseException) -> Status:
    """The status of an error. Logs what was not meant for people and hides it behind an id."""
    shown = presentable(error, "call")
    code = next((_CODES[cls] for cls in type(shown).__mro__ if cls in _CODES), grpc.StatusCode.INTERNAL)
    return Status(
        code,
        str(shown)[:_MAX_MESSAGE_CHARS],
        shown.field if isinstance(shown, InvalidArgument) else "",
        shown.retry_after_s if isinstance(shown, Overloaded) else 0.0,
    )


def trailers_of(status: Status) -> list[tuple[str, str]]:
    """What travels beside code and message in the trailers of a call."""
    trailers: list[tuple[str, str]] = []
    if status.field:
        trailers.append((FIELD_TRAILER, status.field.encode("ascii", "backslashreplace").decode()))
    if status.retry_after_s:
        trailers.append((RETRY_TRAILER, f"{status.retry_after_s:.3f}"))
    return trailers


def request_id_trailer(request_id: str) -> tuple[str, str]:
    """What says which request a call was. A caller may name it in any script, so it is percent-encoded (RFC 3986)."""
    return REQUEST_ID_TRAILER, quote(request_id[:_MAX_ID_CHARS], safe="/:@+=,")


def request_id_in(trailers: Mapping[str, str]) -> str:
    """The request id that a call's trailers tell; "" where whoever ended it knew none."""
    return unquote(trailers.get(REQUEST_ID_TRAILER, ""))


def error_of(status: Status) -> OutriderError:
    """The error a status stands for. FAILED_PRECONDITION comes back as PairMismatch, which is what a peer checks."""
    if (plain := _CLASSES_OF_MESSAGE.get(status.code)) is not None:
        return plain(status.message)
    if status.code == grpc.StatusCode.INVALID_ARGUMENT:
        found, _, allowed = status.message.removeprefix(f"{status.field}: found ").rpartition(", allowed is ")
        return InvalidArgument(status.field or "request", _Verbatim(found), allowed)
    if status.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(status.message.rpartition("; retry in ")[0] or status.message, status.retry_after_s)
    before, _, incident = status.message.rpartition(" under id ")
    return InternalError(incident) if before else EngineFault(status.message)


def encode_failure(session: int, error: BaseException) -> pb.SessionFailed:
    status = status_of(error)
    return pb.SessionFailed(
        session=session,
        code=status.code.value[0],
        message=status.message,
        field=status.field,
        retry_after_s=status.retry_after_s,
    )


def decode_failure(message: pb.SessionFailed) -> OutriderError:
    code = _CODE_BY_NUMBER.get(message.code, grpc.StatusCode.UNKNOWN)
    return error_of(Status(code, message.message, message.field, message.retry_after_s))


def error_of_call(error: grpc.aio.AioRpcError) -> OutriderError:
    """The error that a failed call stands for, from its code, details and trailers."""
    trailers = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    retry_after_s = float(trailers.get(RETRY_TRAILER, 0.0))
    return error_of(Status(error.code(), error.details() or "", trailers.get(FIELD_TRAILER, ""), retry_after_s))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call that raises with the mapped status. Cancellation and deliberate aborts pass through."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else rewrapped(handler, _guard)


def _guard(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    return (_guard_generator if inspect.isasyncgenfunction(behaviour) else _guard_coroutine)(behaviour)


def _guard_coroutine(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.BaseError:  # an abort, or the peer is gone
            raise
        except Exception as error:
            await _abort(context, error)

    return guarded


def _guard_generator(behaviour: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            await _abort(context, error)

    return guarded


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    status = status_of(error)
    await context.abort(status.code, status.message, tuple(trailers_of(status)))
