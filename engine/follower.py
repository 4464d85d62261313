"""Owns what ranks other than 0 do: load their part of the target, then replay each forward that rank 0 plans."""

from __future__ import annotations

from engine.batch import StepRows
from engine.loading import load_model
from engine.parallel import TensorParallel
from engine.runner import Executor
from engine.settings import EngineSettings


def follow(settings: EngineSettings, parallel: TensorParallel) -> None:
    """Replays the leader's forwards until it closes the group; leaves the group in any case.

    Args:
        settings: the leader's own.
        parallel: the joined group.

    Raises:
        InvalidArgument, ModelNotFound: as load_model.
        Unavailable: the leader or another rank is gone, or hangs in a forward.
    """
    try:
        executor = Executor(settings, load_model(settings, parallel=parallel))
        parallel.wait_until_loaded()
        while (packed := parallel.next_step()) is not None:
            with parallel.together("forward"):
                executor.forward(StepRows.unpacked(packed))
    finally:
        parallel.close()
