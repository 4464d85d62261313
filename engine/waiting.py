"""Owns waiting up to a moment, closely enough for emulated times and without holding the processor. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable

EARLY_S = 60e-6
"""A sleep on Linux ends so much late (measured 70 µs in the median; the timer slack is 50), so it is cut by as much."""


def wait_until(
    moment: float, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Returns at `moment` of `clock` or soon after, never before. The last EARLY_S are spent yielding."""
    while (left := moment - clock()) > 0.0:
        sleep(max(left - EARLY_S, 0.0))
