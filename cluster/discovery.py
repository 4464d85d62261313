"""Owns finding the live replicas of a Serve deployment: on a short period, and at once when asked to look."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.info import EngineInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A replica that answers.

    Attributes:
        address: host:port of its own gRPC server. A restarted replica has another one.
        info: its engine, when it was asked.
    """

    address: str
    info: EngineInfo


class BroadcastHandle(Protocol):
    """The part of a Serve DeploymentHandle that discovery needs."""

    def broadcast(self, method_name: str) -> Any: ...


class Discovery:
    """Watches one deployment.

    Args:
        handle: of the deployment, whose replicas have a method `endpoint`.
        on_found: told the endpoints after every look that succeeded, changed or not.
        on_missed: told of every look that failed. One replica that hangs makes a whole look of Serve's time out, so
            whoever knows replicas must ask them one by one which it is.
        period_s: seconds between two looks.
        timeout_s: a replica that has not answered by then counts as absent.
    """

    def __init__(
        self,
        handle: BroadcastHandle,
        on_found: Callable[[Sequence[Endpoint]], Awaitable[None]],
        on_missed: Callable[[], Awaitable[None]],
        *,
        period_s: float,
        timeout_s: float = 2.0,
    ) -> None:
        self._handle, self._on_found, self._on_missed = handle, on_found, on_missed
        self._period_s, self._timeout_s = period_s, timeout_s
        self._wanted = asyncio.Event()
        self._last_failure = ""

    def look_now(self) -> None:
        """Something failed: do not wait for the period to end."""
        self._wanted.set()

    async def look(self) -> list[Endpoint]:
        """The endpoints that answer now."""
        response = self._handle.broadcast("endpoint")
        answers = await response.results_async(timeout_s=self._timeout_s, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, Endpoint)]

    async def run(self) -> None:
        """Looks until cancelled. A look that fails is tried again after the period: Serve may be restarting."""
        while True:
            self._wanted.clear()
            try:
                await self._on_found(await self.look())
            except Exception as error:
                self._report(str(error) or type(error).__name__)
                await self._on_missed()
            else:
                self._last_failure = ""
            try:
                await asyncio.wait_for(self._wanted.wait(), self._period_s)
            except TimeoutError:
                continue

    def _report(self, failure: str) -> None:
        """Says a failure once, not every period that it lasts."""
        if failure != self._last_failure:
            _log.warning("looking for replicas failed: %s", failure)
        self._last_failure = failure
