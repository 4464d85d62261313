"""Owns a request's times: when tokens were delivered and what rounds spent outside target and draft."""

from __future__ import annotations

import math
from collections.abc import Callable

from router.events import Timing


class Stopwatch:
    """Started when the request arrives.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._queue_s = clock, 0.0
        self._started = self._latest = clock()
        self._first: float | None = None
        self._num_tokens = 0
        self._per_token_s: list[float] = []
        self._router_s: list[float] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self._started

    def admitted(self) -> None:
        """The request has got its place."""
        self._queue_s = self.elapsed_s

    def delivered(self, num_tokens: int) -> None:
        """A delta with so many tokens is about to be given out."""
        if not num_tokens:
            return
        now = self._clock()
        if self._first is None:
            self._first = now
        else:
            self._per_token_s += [(now - self._latest) / num_tokens] * num_tokens
        self._num_tokens += num_tokens
        self._latest = now

    def spent_in_router(self, seconds: float) -> None:
        self._router_s.append(max(0.0, seconds))

    def timing(self) -> Timing:
        first = self._latest if self._first is None else self._first
        decoding_s = self._latest - first
        return Timing(
            ttft_ms=1e3 * (first - self._started),
            decode_tokens_per_s=(self._num_tokens - 1) / decoding_s if decoding_s > 0.0 else 0.0,
            itl_ms_p50=1e3 * _percentile(self._per_token_s, 0.50),
            itl_ms_p95=1e3 * _percentile(self._per_token_s, 0.95),
            queue_ms=1e3 * self._queue_s,
            router_ms_p50=1e3 * _percentile(self._router_s, 0.50),
        )


def _percentile(samples: list[float], share: float) -> float:
    """The smallest sample that at least `share` of them do not exceed; 0 without samples."""
    if not samples:
        return 0.0
    ordered = sorted(samples)
    return ordered[math.ceil(share * len(ordered)) - 1]
