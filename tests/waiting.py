"""Waiting for what happens in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], within_s: float) -> bool:
    """Whether `holds` becomes true in time."""
    give_up_at = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.05)
    return True
