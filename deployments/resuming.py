"""Owns when a failed call is made again: what tells a server that died from one that refuses, and how long to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from engine.errors import OutriderError
from rpc.errors import RETRY_TRAILER, request_id_in

RESUME_FOR_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_BROKEN = (  # how a stream ends that its server did not end
    "RST_STREAM",
    "Stream removed",
    "without a final message",
    "http2 header with status: 50",
)
_CODES_OF_BREAKS = (
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
)


class CallFailed(OutriderError):
    """A call to the server failed; the message is the server's own, or says that nothing answers.

    Args:
        code: gRPC status code.
        retry_after_s: seconds after which the server says it has room again; 0 where it says nothing.
        request_id: by which its trace is found, and which the message ends with; "" where there is none.
    """

    def __init__(self, message: str, code: grpc.StatusCode, retry_after_s: float = 0.0, request_id: str = "") -> None:
        self.code, self.retry_after_s, self.request_id = code, retry_after_s, request_id
        super().__init__(f"{message} (request {request_id})" if request_id else message)

    @classmethod
    def of(cls, error: Any, sent_id: str = "") -> CallFailed:
        """What a call's RpcError says.

        Args:
            error: grpc.RpcError or grpc.aio.AioRpcError.
            sent_id: the request's, if it went with one: a deadline that passes here, say, comes without trailers.
        """
        code, trailers = error.code(), dict(error.trailing_metadata() or ())
        retry_after_s, request_id = float(trailers.get(RETRY_TRAILER, 0.0)), request_id_in(trailers) or sent_id
        return CallFailed(error.details() or code.name, code, retry_after_s, request_id)

    @property
    def server_is_gone(self) -> bool:
        """Whether the server, or what stands before it, went away under the call rather than refuse or end it.

        Seen of a server that is killed: UNAVAILABLE by whoever is connected to it, and CANCELLED (by RST_STREAM with
        error code 8) behind HAProxy, which answers further calls with UNKNOWN (by HTTP status 500, as Serve has it do)
        while no server is there. Other proxies reset streams with codes that gRPC maps to INTERNAL and UNKNOWN.
        """
        if self.code is grpc.StatusCode.UNAVAILABLE:
            return True
        return self.code in _CODES_OF_BREAKS and any(sign in str(self) for sign in _BROKEN)


class NothingAnswers(CallFailed):
    """Nobody listens at the address."""


class Patience:
    """How long a request goes on being tried without a new token.

    Args:
        limit_s: seconds without one after which its failure stands.
        clock: seconds, monotonic.
        chance: uniform in [0, 1), so that the callers of one server do not all come back at once.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self._limit_s, self._clock, self._chance = limit_s, clock, chance
        self._since, self._num_tokens, self._failures = clock(), 0, 0

    def pause_s(self, failure: CallFailed, num_calls: int, num_tokens: int) -> float | None:
        """Seconds until the next call; None when there is none and the failure stands.

        A first call to where nothing listens is a wrong address, not a server that died. A full server refuses a new
        request, but one that has begun waits for its turn.

        Args:
            failure: of the latest call.
            num_calls: calls made.
            num_tokens: tokens that all of them have delivered.
        """
        if num_tokens > self._num_tokens:
            self._since, self._num_tokens, self._failures = self._clock(), num_tokens, 0
        never_answered = num_calls == 1 and isinstance(failure, NothingAnswers)
        waits_for_room = failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and num_calls > 1
        if never_answered or not (failure.server_is_gone or waits_for_room):
            return None
        longest = min(_FIRST_PAUSE_S * 2.0**self._failures, _LONGEST_PAUSE_S)
        self._failures += 1
        pause_s = max(failure.retry_after_s, (0.5 + 0.5 * self._chance()) * longest)
        return pause_s if self._clock() + pause_s - self._since <= self._limit_s else None
