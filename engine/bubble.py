"""Owns the measure of the target forward bubble: time in which sessions wait for tokens and no forward runs."""

from __future__ import annotations

from collections.abc import Callable


class BubbleMeter:
    """Adds up seconds in which at least one session was decoding, less those spent in forwards.

    Args:
        clock: seconds, monotonic.
        forward_s: seconds in forwards so far, as the engine counts them.
    """

    def __init__(self, clock: Callable[[], float], forward_s: float) -> None:
        self.seconds = 0.0
        self._clock, self._counted_until, self._forward_s = clock, clock(), forward_s
        self._decoding: set[int] = set()

    def mark(self, session: int, decoding: bool) -> None:
        """From now on `session` waits for a further forward, or does not."""
        if decoding:
            self._decoding.add(session)
        else:
            self._decoding.discard(session)

    def count(self, forward_s: float) -> None:
        """Counts what has passed since the last call; to be called before any `mark` that ends this stretch."""
        now = self._clock()
        if self._decoding:
            self.seconds += max(0.0, now - self._counted_until - (forward_s - self._forward_s))
        self._counted_until, self._forward_s = now, forward_s

    def clear(self) -> None:
        """Nobody is decoding any more."""
        self._decoding.clear()
