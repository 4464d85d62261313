"""Owns putting something around the behaviour of a method handler, of whichever of gRPC's four kinds it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc


def rewrapped(
    handler: grpc.RpcMethodHandler[Any, Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler with `wrap(behaviour)` for its behaviour: a coroutine function or an async generator function,
    which must stay what it is.
    """
    requests, responses = (
        "stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming)
    )
    kind = f"{requests}_{responses}"
    made: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{kind}_rpc_method_handler")(
        wrap(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer
    )
    return made
