"""Owns the follower actors of a tensor-parallel group: one for each rank but the first, which is the Serve replica.

They lie in the bundles of the replica's own placement group. Ray ends them with the replica that owns them, and Serve
removes the placement group with it, so nothing of a group outlives its leader. The other way round, the leader is told
of the first follower that ends, and ends itself: a group is never repaired in place.

Of requests a follower knows the `trace` of their sessions only: what its spans, one of each forward for each, hang on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.batch import StepRows
from engine.parallel import Place, TensorParallel
from engine.settings import EngineSettings
from rpc.tracing import begin_work, setup_tracing, shutdown_tracing

_log = logging.getLogger(__name__)

LEAVE_S = 5.0
"""What followers get to send their last spans once their leader has left them."""


class _Follower:
    """One rank in a process of its own, with one device."""

    def run(self, settings: EngineSettings, place: Place) -> None:
        """Replays the leader's steps until the leader ends them. Raises when the leader or another rank is gone."""
        from engine.follower import follow
        from engine.parallel import join

        is_traced = setup_tracing("outrider-target-follower")
        on_forward = partial(_trace_forward, place.rank) if is_traced else None
        follow(settings, join(place, settings.device), on_forward)
        shutdown_tracing()  # in order only: news of a failure must not wait for a collector


def _trace_forward(rank: int, step: StepRows, seconds: float) -> None:
    """A span for each traced session that had rows in a forward that is over now."""
    ended_ns = time.time_ns()
    attributes = {"outrider.rank": rank, "outrider.rows": step.rows, "outrider.forward_ms": seconds * 1e3}
    for rows in step.spans:
        if rows.trace:
            span = begin_work("outrider.follow", rows.trace, attributes, ended_ns - round(seconds * 1e9))
            if span is not None:
                span.end(ended_ns)


class Followers:
    """The followers of one leader.

    Args:
        settings: of the engine, the leader's own.
        places: where each follower belongs; its rank is also its bundle in the placement group.
        options: what each asks of Ray.
        on_loss: told once, on a thread of Ray's, when the first of them ends before `close`, and how.
    """

    def __init__(
        self,
        settings: EngineSettings,
        places: Sequence[Place],
        options: Mapping[str, Any],
        on_loss: Callable[[str], None],
    ) -> None:
        self._on_loss, self._is_over = on_loss, False
        group = get_current_placement_group()
        assert group is not None, "the leader's deployment has placement_group_bundles"
        follower: Any = ray.remote(_Follower)
        self._actors = [
            follower.options(
                **options, scheduling_strategy=PlacementGroupSchedulingStrategy(group, place.rank)
            ).remote()
            for place in places
        ]
        self._runs: list[Future[None]] = [
            actor.run.remote(settings, place).future() for place, actor in zip(places, self._actors, strict=True)
        ]
        for place, run in zip(places, self._runs, strict=True):
            run.add_done_callback(partial(self._ended, place.rank))

    def disband(self, group: TensorParallel) -> None:
        """Has the leader leave `group`, upon which they end in order; after a while, as `close`. Idempotent."""
        self._is_over = True
        group.close()
        wait(self._runs, LEAVE_S)
        self.close()

    def close(self) -> None:
        """Ends them at once. Idempotent."""
        self._is_over = True
        for actor in self._actors:
            ray.kill(actor)

    def _ended(self, rank: int, run: Future[None]) -> None:
        if self._is_over:
            return
        self._is_over = True
        error = run.exception()
        said = "it ended" if error is None else str(error).strip().splitlines()[-1]
        _log.error("rank %d of the target's group is gone: %s", rank, said)
        self._on_loss(f"rank {rank} of the target's group is gone: {said}")
