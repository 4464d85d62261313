"""Owns what ranks other than 0 do: load their part of the target, then replay each forward that rank 0 plans."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.batch import StepRows
from engine.loading import load_model
from engine.parallel import TensorParallel
from engine.runner import Executor
from engine.settings import EngineSettings

OnForward = Callable[[StepRows, float], None]
"""Told of a forward that is over: its rows, and the seconds it took on this rank."""


def follow(settings: EngineSettings, parallel: TensorParallel, on_forward: OnForward | None = None) -> None:
    """Replays the leader's forwards until it closes the group; leaves the group in any case.

    Args:
        settings: the leader's own.
        parallel: the joined group.
        on_forward: the next forward waits for it.

    Raises:
        InvalidArgument, ModelNotFound: as load_model.
        Unavailable: the leader or another rank is gone, or hangs in a forward.
    """
    try:
        executor = Executor(settings, load_model(settings, parallel=parallel))
        parallel.wait_until_loaded()
        while (packed := parallel.next_step()) is not None:
            began = time.perf_counter()
            with parallel.together("forward"):
                step = StepRows.unpacked(packed)
                executor.forward(step)
            if on_forward is not None:
                on_forward(step, time.perf_counter() - began)
    finally:
        parallel.close()
