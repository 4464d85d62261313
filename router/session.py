"""Owns the round loop of one request: plan → propose → verify → commit → stream.

Only `_commit` changes what is committed. Whatever ends the loop (finish, error, deadline, cancellation, a caller that
closes the generator), both sides are closed exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass

from opentelemetry.trace import Span

from engine.errors import DeadlineExceeded, EngineFault
from engine.proposal import FinishReason, State, Verdict
from engine.sampling import SamplingParams, StopParams
from router.events import Complete, Delta, Event, Usage
from router.policy import SpeculationControl
from router.ports import TargetPort, TargetSession
from router.speculation import Round, Shared, Speculator
from router.stopping import TextStream
from router.stopwatch import Stopwatch
from rpc.tracing import traceparent_of

_closing: set[asyncio.Task[None]] = set()  # closes that outlive the cancelled task that began them


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A checked request.

    Attributes:
        prompt: token ids, at least one; prompt and max_tokens together fit the target's window.
        stops: what the target stops at.
        control: what the request asked of speculation.
        deadline_s: seconds from now after which the session ends; 0: never.
        span: of the request; None while it is not traced.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: StopParams
    control: SpeculationControl
    deadline_s: float = 0.0
    span: Span | None = None


class Session:
    """One request on one target. `events` is consumed once."""

    def __init__(self, request: SessionRequest, text: TextStream, stopwatch: Stopwatch, shared: Shared) -> None:
        self._request, self._text, self._stopwatch, self._shared = request, text, stopwatch, shared
        self._tokens = list(request.prompt)  # prompt and committed tokens
        self._state = State.of(request.prompt)
        self._speculator = Speculator(request.sampling, request.control, shared, request.span)
        self._deadline = shared.clock() + request.deadline_s
        self._num_delivered = 0
        self._finish: FinishReason | None = None
        self._matched_stop: str | None = None

    async def events(self) -> AsyncGenerator[Event, None]:
        """Deltas, then one Complete.

        Raises:
            Unavailable: no target, or it was lost.
            DeadlineExceeded: deadline_s passed.
            OutriderError: whatever else the target says.
        """
        name, port = self._shared.peers.pick_target()
        target = self._open(port)
        self._shared.peers.targets.took(name)
        try:
            self._speculator.open(self._tokens, port.info.max_proposal_tokens, port.info.vocab_size)
            delta = self._commit(await self._verdict(target))
            if delta is not None:
                yield delta
            while self._finish is None:
                round_ = await self._speculator.propose(self._state, self._tokens, self._tokens_left)
                try:
                    self._send(round_, target)
                    while round_.verdicts_left and self._finish is None:
                        delta = self._commit(await self._verdict(target), round_)
                        if delta is not None:
                            yield delta
                finally:
                    if round_.span is not None:
                        round_.span.end()
            yield self._complete(target)
        finally:
            await _finish_though_cancelled(self._close(target, name))

    def _open(self, port: TargetPort) -> TargetSession:
        request = self._request
        return port.open(
            request.prompt,
            (),
            request.sampling,
            request.stops,
            deadline_s=request.deadline_s,
            traceparent=traceparent_of(request.span),
        )

    def _send(self, round_: Round, target: TargetSession) -> None:
        """A plain stretch needs no round trip per token: the target runs on by itself."""
        traceparent = traceparent_of(round_.span)
        if round_.is_stretch:
            target.decode(round_.verdicts_left, traceparent=traceparent)
        else:
            target.propose(round_.proposal, traceparent=traceparent)

    async def _verdict(self, target: TargetSession) -> Verdict:
        if not self._request.deadline_s:
            return await target.verdict()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - self._shared.clock())):
                return await target.verdict()
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline of {self._request.deadline_s:.3f} s passed") from None

    def _commit(self, verdict: Verdict, round_: Round | None = None) -> Delta | None:
        """Takes a verdict's tokens as true; returns what there is to deliver. The first verdict belongs to no round."""
        if verdict.base != self._state:
            raise EngineFault(
                f"the target judged a sequence of {verdict.base.length} tokens, "
                f"the committed one has {self._state.length}"
            )
        self._tokens += verdict.tokens
        self._state = self._state.extend(verdict.tokens)
        self._speculator.saw_tokens(verdict.tokens)
        if round_ is not None:
            self._stopwatch.spent_in_router(self._speculator.learn(round_, verdict))
        return self._deliver(verdict)

    def _deliver(self, verdict: Verdict) -> Delta | None:
        """Ends the request at a stop string, or where the target ended it."""
        by_id = verdict.finish_reason == "stop"
        piece = self._text.push(verdict.tokens[:-1] if by_id else verdict.tokens)
        text, token_ids, matched = piece.text, piece.token_ids, piece.matched_stop
        if matched is None and verdict.finish_reason is not None:
            rest = self._text.finish(verdict.tokens[-1] if by_id else None)
            text, token_ids, matched = text + rest.text, token_ids + rest.token_ids, rest.matched_stop
        self._matched_stop = matched
        self._finish = "stop" if matched is not None else verdict.finish_reason
        self._num_delivered += len(token_ids)
        self._stopwatch.delivered(len(token_ids))
        return Delta(text, token_ids) if text or token_ids else None

    @property
    def _tokens_left(self) -> int:
        return self._request.stops.max_tokens - (len(self._tokens) - len(self._request.prompt))

    def _complete(self, target: TargetSession) -> Complete:
        assert self._finish is not None
        usage = Usage(len(self._request.prompt), self._num_delivered, target.cached_tokens)
        return Complete(self._finish, self._matched_stop, usage, self._speculator.totals, self._stopwatch.timing())

    async def _close(self, target: TargetSession, target_name: str) -> None:
        """Frees both sides at the same time."""
        try:
            await asyncio.gather(target.close(), self._speculator.close())
        finally:
            self._shared.peers.targets.gave_back(target_name)


async def _finish_though_cancelled(work: Coroutine[object, object, None]) -> None:
    """Runs `work` to its end; a cancellation meanwhile ends the waiting, not the work."""
    task = asyncio.ensure_future(work)
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    await asyncio.shield(task)
