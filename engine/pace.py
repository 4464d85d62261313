"""Owns what a forward costs by its rows, fitted to the forwards there were, so that an engine can plan with time."""

from __future__ import annotations

_FORGET = 0.98  # a forward; halves in 34
_LEAST_SPREAD = 1.0  # variance of rows below which no slope can be told


class Pace:
    """Seconds of a forward as a line over its rows, by least squares in which old forwards fade."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def saw(self, rows: int, seconds: float) -> None:
        """One forward."""
        self._weight = self._weight * _FORGET + 1.0
        self._rows = self._rows * _FORGET + rows
        self._seconds = self._seconds * _FORGET + seconds
        self._squares = self._squares * _FORGET + rows * rows
        self._products = self._products * _FORGET + rows * seconds

    def seconds(self, rows: float) -> float:
        """What a forward of so many rows takes; 0 before the first."""
        base, slope = self._line()
        return base + slope * rows

    def rows_within(self, seconds: float) -> float:
        """Most rows of a forward that takes no longer; infinite as far as rows seem to cost nothing."""
        base, slope = self._line()
        if base >= seconds:
            return 0.0
        return (seconds - base) / slope if slope > 0.0 else float("inf")

    def _line(self) -> tuple[float, float]:
        if not self._weight:
            return 0.0, 0.0
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_rows**2
        if spread < _LEAST_SPREAD:
            return mean_seconds, 0.0
        slope = max(0.0, (self._products / self._weight - mean_rows * mean_seconds) / spread)
        return max(0.0, mean_seconds - slope * mean_rows), slope
