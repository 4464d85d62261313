"""Owns the follower actors of a tensor-parallel group: one for each rank but the first, which is the Serve replica.

They lie in the bundles of the replica's own placement group. Ray ends them with the replica that owns them, and Serve
removes the placement group with it, so nothing of a group outlives its leader. The other way round, the leader is told
of the first follower that ends, and ends itself: a group is never repaired in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.parallel import Place
from engine.settings import EngineSettings

_log = logging.getLogger(__name__)


class _Follower:
    """One rank in a process of its own, with one device."""

    def run(self, settings: EngineSettings, place: Place) -> None:
        """Replays the leader's steps until the leader ends them. Raises when the leader or another rank is gone."""
        from engine.follower import follow
        from engine.parallel import join

        follow(settings, join(place, settings.device))


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
        for place, actor in zip(places, self._actors, strict=True):
            actor.run.remote(settings, place).future().add_done_callback(partial(self._ended, place.rank))

    def close(self) -> None:
        """Ends them. Idempotent."""
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
