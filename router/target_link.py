"""Owns one session's dealings with a target that may be lost at any time, so that the round loop never has to care.

A lost target answers nothing any more: what it was asked is void, and the session is opened on another one with all
that is committed. The router holds every committed token, so nothing is lost with a target but the forward under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import DeadlineExceeded, OutriderError, Overloaded, Unavailable, UnknownSession
from engine.info import EngineInfo
from engine.proposal import EarlyProposals, Proposal, Verdict
from router.peers import PeerSet
from router.placement import prefix_key
from router.ports import TargetPort, TargetSession
from router.requests import SessionRequest
from rpc.tracing import traceparent_of

_MIN_DEADLINE_S = 1e-3  # 0 would mean none


@dataclass(frozen=True, slots=True)
class TargetLinkConfig:
    """Patience with targets.

    Attributes:
        failover_wait_s: longest wait for a target without a new token meanwhile; 0 fails at once where none is there.
        max_losses: targets lost in a row, without a new token in between, after which the request is given up: it may
            be what brings them down.
        retry_s: pause after the second loss in a row; doubles with each further one.
        close_s: longest wait for a target to acknowledge that its blocks are free; it goes on in the background.
    """

    failover_wait_s: float = 60.0
    max_losses: int = 4
    retry_s: float = 0.25
    close_s: float = 1.0


class TargetLink:
    """The target side of one session. `close` at the end, whatever happened before.

    Attributes:
        failovers: how often the session went on after its target was lost.
        cached_tokens: prompt tokens that the first target's prefix cache already held.
    """

    def __init__(
        self, request: SessionRequest, peers: PeerSet, clock: Callable[[], float], config: TargetLinkConfig
    ) -> None:
        self._request, self._peers, self._clock, self._config = request, peers, clock, config
        self._deadline = clock() + request.deadline_s if request.deadline_s else math.inf
        self._key = prefix_key(request.prompt)
        self._session: TargetSession | None = None
        self._name = ""
        self._port: TargetPort | None = None
        self._owed = 0  # verdicts still to come for what was asked
        self._untold: OutriderError | None = None  # why the target could not even be asked
        self._losses = 0  # since the latest verdict, as is `_wait_s`
        self._wait_s = config.failover_wait_s
        self._has_answered = False
        self._closing: set[asyncio.Task[None]] = set()
        self.failovers = 0
        self.cached_tokens = 0

    @property
    def is_open(self) -> bool:
        return self._session is not None

    @property
    def owes_verdict(self) -> bool:
        """Whether an answer to what was asked is still to come; never once the target is lost."""
        return self._owed > 0

    @property
    def is_at_last(self) -> bool:
        """Whether one verdict only is still to come."""
        return self._owed == 1

    async def open(self, committed: Sequence[int]) -> EngineInfo:
        """Opens the sequence on a target, waiting for one if need be; it owes a first verdict then, of no round.

        Raises:
            Unavailable: none came within failover_wait_s.
            DeadlineExceeded: none came before the deadline.
        """
        while (picked := self._peers.targets.pick_near(self._key)) is None:
            began = self._clock()
            await self._peers.target_ready(self._wait_s, self._time_left_s())
            self._wait_s -= self._clock() - began
        self._name, self._port = picked
        self._owed, self._untold = 1, None
        request = self._request
        try:
            self._session = self._port.open(
                request.prompt,
                committed,
                request.sampling,
                request.stops,
                deadline_s=max(self._time_left_s(), _MIN_DEADLINE_S) if request.deadline_s else 0.0,
                traceparent=traceparent_of(request.span),
            )
        except Unavailable as error:
            self._untold = error
        else:
            self._peers.targets.took(self._name)
        return self._port.info

    def propose(self, proposal: Proposal, traceparent: str) -> None:
        """Asks for the verdict on a proposal."""
        self._ask(1, lambda session: session.propose(proposal, traceparent=traceparent))

    def propose_early(self, early: EarlyProposals) -> None:
        """Proposals for what may come of the round under way. A target that is lost meanwhile has no use for them."""
        if self._session is not None:
            with contextlib.suppress(Unavailable, UnknownSession):  # which the verdict that is owed will say
                self._session.propose_early(early)

    def goes_on(self, num_verdicts: int) -> None:
        """The target has been told already what it does now: its verdicts come without being asked for."""
        self._owed = num_verdicts

    def decode(self, max_tokens: int, traceparent: str) -> None:
        """Asks for a stretch of plain decoding, which takes no round trip per token: one verdict for each."""
        self._ask(max_tokens, lambda session: session.decode(max_tokens, traceparent=traceparent))

    def prolong(self, max_tokens: int, traceparent: str) -> None:
        """Asks for so many tokens more while the target is at the last of a stretch, so that it need not stop."""
        self._ask(self._owed + max_tokens, lambda session: session.decode(max_tokens, traceparent=traceparent))

    def decode_next(self, max_tokens: int, traceparent: str) -> None:
        """Asks for a stretch of plain decoding behind the round under way; its verdicts are owed after `goes_on`."""
        self._ask(self._owed, lambda session: session.decode(max_tokens, traceparent=traceparent))

    async def verdict(self) -> Verdict | None:
        """The next verdict owed; None when the target was lost, and with it all that it owed.

        Raises:
            Unavailable: too many targets were lost in a row.
            DeadlineExceeded: the request's deadline passed.
            OutriderError: whatever else the target says.
        """
        try:
            verdict = await self._next()
        except (Unavailable, UnknownSession) as error:
            await self._lost(error)
            return None
        except Overloaded as error:
            await self._refused(error)
            return None
        self._owed -= 1
        self._losses, self._wait_s = 0, self._config.failover_wait_s
        return verdict

    async def close(self) -> None:
        """Frees the target's blocks. One that does not acknowledge holds up nobody for longer than `close_s`."""
        session, self._session, self._owed = self._session, None, 0
        if session is None:
            return
        closing = asyncio.ensure_future(self._close_session(session, self._name))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.wait({closing}, timeout=self._config.close_s)

    def _ask(self, num_verdicts: int, tell: Callable[[TargetSession], None]) -> None:
        assert self._session is not None
        self._owed = num_verdicts
        try:
            tell(self._session)
        except (Unavailable, UnknownSession) as error:
            self._untold = error

    async def _next(self) -> Verdict:
        if self._untold is not None:
            raise self._untold
        assert self._session is not None
        if self._deadline == math.inf:
            verdict = await self._session.verdict()
        else:
            try:
                async with asyncio.timeout(max(0.0, self._time_left_s())):
                    verdict = await self._session.verdict()
            except TimeoutError:
                raise DeadlineExceeded(f"the deadline of {self._request.deadline_s:.3f} s passed") from None
        if not self._has_answered:
            self._has_answered = True
            self.cached_tokens = min(self._session.cached_tokens, len(self._request.prompt))
        return verdict

    async def _lost(self, error: OutriderError) -> None:
        """Lets go of the target. One that merely does not know the session is there: it may be picked again."""
        assert self._port is not None
        if isinstance(error, Unavailable):
            self._peers.targets.lose(self._name, self._port)
        await self.close()
        self._losses += 1
        if self._request.span is not None:
            found = {"outrider.target": self._name, "outrider.error": type(error).__name__}
            self._request.span.add_event("outrider.target_lost", found)
        if self._losses >= self._config.max_losses:
            raise Unavailable(f"{self._losses} targets were lost in a row; the last: {error}")
        self.failovers += 1
        if self._losses > 1:
            await self._pause(self._config.retry_s * 2.0 ** (self._losses - 2))

    async def _refused(self, error: Overloaded) -> None:
        """A target that is full turns away a new request, but one that lost its target waits for a place."""
        if not self.failovers or self._wait_s <= 0.0:
            raise error
        await self.close()
        await self._pause(min(max(error.retry_after_s, self._config.retry_s), self._wait_s))

    async def _pause(self, seconds: float) -> None:
        """Counts as waiting; a deadline in it is found by the next opening."""
        pause_s = max(0.0, min(seconds, self._time_left_s()))
        self._wait_s -= pause_s
        await asyncio.sleep(pause_s)

    def _time_left_s(self) -> float:
        return self._deadline - self._clock()

    async def _close_session(self, session: TargetSession, name: str) -> None:
        try:
            with contextlib.suppress(OutriderError):  # gone already, and its blocks with it
                await session.close()
        finally:
            self._peers.targets.gave_back(name)
