"""Owns the round loop of one request: plan → propose → verify → commit → stream.

Only `_commit` changes what is committed. When a target is lost, what it was asked is void: the loop has `TargetLink`
open the sequence on another one and plans its next round, and its caller sees a pause. Whatever ends the loop (finish,
error, deadline, cancellation, a caller that closes the generator), both sides are closed exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine

from engine.errors import EngineFault
from engine.proposal import State, Verdict
from router.events import Complete, Delta, Event, Usage
from router.requests import SessionRequest
from router.rounds import Round
from router.shared import Shared
from router.speculation import Speculator
from router.stopping import Output
from router.stopwatch import Stopwatch
from router.target_link import TargetLink

_closing: set[asyncio.Task[None]] = set()  # closes that outlive the cancelled task that began them


class Session:
    """One request, on one target at a time. `events` is consumed once.

    Args:
        output: has taken what was resumed.
    """

    def __init__(self, request: SessionRequest, output: Output, stopwatch: Stopwatch, shared: Shared) -> None:
        self._request, self._output, self._stopwatch = request, output, stopwatch
        self._tokens = [*request.prompt, *request.resumed]  # prompt and committed tokens
        self._state = State.of(self._tokens)
        self._target = TargetLink(request, shared.peers, shared.clock, shared.config.target_link)
        self._speculator = Speculator(request, shared, self._target.propose_early)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Deltas, then one Complete.

        Raises:
            Unavailable: no target is there, or one after another was lost.
            DeadlineExceeded: deadline_s passed.
            OutriderError: whatever else the target says.
        """
        try:
            while self._output.finish_reason is None:
                round_ = await self._begin_round()
                try:
                    while self._target.owes_verdict and self._output.finish_reason is None:
                        verdict = await self._target.verdict()
                        delta = None if verdict is None else self._commit(verdict, round_)
                        self._go_on(round_)
                        if delta is not None:
                            yield delta
                finally:
                    if round_ is not None and round_.span is not None:
                        round_.span.end()
            yield self._complete()
        finally:
            await _finish_though_cancelled(self._close())

    async def _begin_round(self) -> Round | None:
        """What the target is asked next. None: the sequence was opened on it, and its first verdict is of no round."""
        if not self._target.is_open:
            info = await self._target.open(self._tokens[len(self._request.prompt) :])
            self._speculator.target_opened(info, self._tokens)
            return None
        round_ = await self._speculator.propose(self._state, self._tokens, self._tokens_left)
        traceparent = round_.traceparent
        if round_.is_early:
            self._target.goes_on(round_.plan.plain_tokens)
            if round_.then is not None:
                self._target.decode_next(round_.then.plain_tokens, traceparent)
        elif round_.is_stretch:
            self._target.decode(round_.plan.plain_tokens, traceparent)
        else:
            self._target.propose(round_.proposal, traceparent)
        return round_

    def _go_on(self, round_: Round | None) -> None:
        """Has a stretch of plain decoding go on where it would end and the next round be another."""
        if round_ is None or not round_.is_stretch or not self._target.is_at_last or self._output.finish_reason:
            return
        more = self._speculator.prolong(round_, self._state, self._tokens, self._tokens_left)
        if more:
            self._target.prolong(more, round_.traceparent)

    def _commit(self, verdict: Verdict, round_: Round | None) -> Delta | None:
        """Takes a verdict's tokens as true; returns what there is to deliver."""
        if verdict.base != self._state:
            raise EngineFault(
                f"the target judged a sequence of {verdict.base.length} tokens, "
                f"the committed one has {self._state.length}"
            )
        self._tokens += verdict.tokens
        self._state = self._state.extend(verdict.tokens)
        self._speculator.saw_tokens(verdict.tokens)
        if round_ is not None:
            self._stopwatch.spent_in_router(self._speculator.learn(round_, verdict, self._state))
        delta = self._new_output(verdict)
        self._stopwatch.delivered(len(delta.token_ids))
        return delta if delta.text or delta.token_ids else None

    def _new_output(self, verdict: Verdict) -> Delta:
        if not self._request.smooth_stream:
            piece = self._output.take(verdict.tokens, verdict.finish_reason)
            return Delta(piece.text, piece.token_ids)
        pieces = self._output.take_singly(verdict.tokens, verdict.finish_reason)
        deltas = tuple(Delta(each.text, each.token_ids) for each in pieces)
        return Delta("".join(each.text for each in deltas), sum((each.token_ids for each in deltas), ()), deltas)

    @property
    def _tokens_left(self) -> int:
        return self._request.stops.max_tokens - (len(self._tokens) - len(self._request.prompt))

    def _complete(self) -> Complete:
        output, target = self._output, self._target
        assert output.finish_reason is not None
        return Complete(
            output.finish_reason,
            output.matched_stop,
            Usage(len(self._request.prompt), output.num_tokens, target.cached_tokens),
            self._speculator.totals,
            self._stopwatch.timing(),
            target.failovers,
        )

    async def _close(self) -> None:
        """Frees both sides at the same time."""
        await asyncio.gather(self._target.close(), self._speculator.close())


async def _finish_though_cancelled(work: Coroutine[object, object, None]) -> None:
    """Runs `work` to its end; a cancellation meanwhile ends the waiting, not the work."""
    task = asyncio.ensure_future(work)
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    await asyncio.shield(task)
