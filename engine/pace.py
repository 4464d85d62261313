"""Owns what a forward costs by its rows, fitted to the forwards there were, so that an engine can plan with time."""

from __future__ import annotations

_FORGET = 0.999  # a forward; halves in 700: forwards of much the same size tell nothing of what a row costs
_FORGET_LEVEL = 0.95  # halves in 14: what all of them take may change at any time
_LEAST_SPREAD = 1.0  # variance of rows below which no slope can be told


class _Means:
    """Fading means of rows, seconds, rows² and rows × seconds."""

    def __init__(self, forget: float) -> None:
        self._forget = forget
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: float, seconds: float) -> None:
        self._weight = self._weight * self._forget + 1.0
        self._rows = self._rows * self._forget + rows
        self._seconds = self._seconds * self._forget + seconds
        self._squares = self._squares * self._forget + rows * rows
        self._products = self._products * self._forget + rows * seconds

    @property
    def rows(self) -> float:
        return self._rows / self._weight

    @property
    def seconds(self) -> float:
        return self._seconds / self._weight

    @property
    def slope(self) -> float:
        """By least squares; 0 where the rows were all but the same."""
        spread = self._squares / self._weight - self.rows**2
        if spread < _LEAST_SPREAD:
            return 0.0
        return max(0.0, (self._products / self._weight - self.rows * self.seconds) / spread)


class Pace:
    """Seconds of a forward as a line over its rows. What a row costs fades slowly, what all have in common fast."""

    def __init__(self) -> None:
        self._all, self._latest = _Means(_FORGET), _Means(_FORGET_LEVEL)
        self._base = self._slope = 0.0

    def saw(self, rows: int, seconds: float) -> None:
        """One forward."""
        self._all.add(rows, seconds)
        self._latest.add(rows, seconds)
        level = self._latest
        # A row costs no more than its share: few forwards of nearly one size would say anything.
        self._slope = min(self._all.slope, level.seconds / max(level.rows, 1.0))
        self._base = level.seconds - self._slope * level.rows

    def seconds(self, rows: float) -> float:
        """What a forward of so many rows takes; 0 before the first."""
        return self._base + self._slope * rows

    def rows_within(self, seconds: float) -> float:
        """Most rows of a forward that takes no longer; infinite as far as rows seem to cost nothing."""
        if self._base >= seconds:
            return 0.0
        return (seconds - self._base) / self._slope if self._slope > 0.0 else float("inf")
