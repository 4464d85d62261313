"""Owns fakes of the router's ports: a target and drafts that are pure functions of a prefix, in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.errors import OutriderError
from engine.info import EngineInfo
from engine.proposal import EarlyProposals, Proposal, RunAhead, State, Verdict
from engine.sampling import SamplingParams, StopParams
from engine.stopping import cut

NextToken = Callable[[Sequence[int]], int]
# What befalls a target before its n-th verdict, counted over all its sessions: an error that ends the session, or None.
Fault = Callable[[int], OutriderError | None]
# What a draft makes of its n-th answer: another proposal, an error to raise, or None to stay silent.
Behaviour = Callable[[int, Proposal], Proposal | OutriderError | None]


class VirtualClock:
    """Seconds that pass only when a fake spends them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def engine_info(model: str, vocab_size: int, window: int, eos: tuple[int, ...] = ()) -> EngineInfo:
    """An idle engine that verifies up to seven draft tokens."""
    return EngineInfo(model, vocab_size, window, eos, 7, 64, 64, 16, 0)


@dataclass
class FakeTarget:
    """router.ports.TargetPort over `next_token`.

    Attributes:
        verify_s: virtual seconds of one forward.
        overhead_s: virtual seconds of a round trip, which a stretch of plain decoding pays once.
        fault: makes sessions fail.
        open_sessions: sessions not closed yet.
        openings: committed tokens of every sequence that was opened.
        num_rests: stretches of plain decoding behind which it had nothing to do.
    """

    info: EngineInfo
    next_token: NextToken
    clock: VirtualClock = field(default_factory=VirtualClock)
    verify_s: float = 0.038
    overhead_s: float = 0.002
    fault: Fault = lambda _: None
    open_sessions: int = 0
    openings: list[list[int]] = field(default_factory=list)
    num_verdicts: int = 0
    num_rests: int = 0
    proposals: list[Proposal] = field(default_factory=list)

    def open(
        self,
        prompt: Sequence[int],
        committed: Sequence[int],
        sampling: SamplingParams,
        stops: StopParams,
        *,
        deadline_s: float = 0.0,
        traceparent: str = "",
    ) -> FakeTargetSession:
        self.open_sessions += 1
        self.openings.append(list(committed))
        return FakeTargetSession(self, [*prompt, *committed], len(prompt), stops)


class FakeTargetSession:
    """Judges greedily; a verdict is made when it is read."""

    def __init__(self, port: FakeTarget, tokens: list[int], num_prompt: int, stops: StopParams) -> None:
        self._port, self._tokens, self._num_prompt, self._stops = port, tokens, num_prompt, stops
        self._ending = stops.ending_ids(port.info.eos_token_ids)
        self._state = State.of(tokens)
        self._asked: deque[Proposal | None] = deque([None])  # None: plain, without a round trip
        self._failed: OutriderError | None = None
        self._closed = False
        self.cached_tokens = 0

    def propose(self, proposal: Proposal, *, traceparent: str = "") -> None:
        self._port.proposals.append(proposal)
        self._port.clock.spend(self._port.overhead_s)
        self._asked.append(proposal)

    def decode(self, max_tokens: int, *, traceparent: str = "") -> None:
        self._port.clock.spend(self._port.overhead_s)
        self._asked.extend([None] * max_tokens)

    async def verdict(self) -> Verdict:
        await asyncio.sleep(0)
        if self._failed is None:
            self._failed = self._port.fault(self._port.num_verdicts)
            self._port.num_verdicts += 1
        if self._failed is not None:
            raise self._failed
        if not self._asked:
            await asyncio.get_running_loop().create_future()  # nothing was asked: nothing comes
        self._port.clock.spend(self._port.verify_s)
        asked = self._asked.popleft()
        self._port.num_rests += int(asked is None and not self._asked)
        return self._judge(asked or Proposal(self._state))

    async def close(self) -> None:
        await asyncio.sleep(0)
        if not self._closed:
            self._closed = True
            self._port.open_sessions -= 1

    def _judge(self, proposal: Proposal) -> Verdict:
        if proposal.base != self._state:
            raise AssertionError("a proposal for another state reached the target")
        base, room = self._state, self._stops.max_tokens - (len(self._tokens) - self._num_prompt)
        true, num_accepted = [self._next()], 0
        for token in proposal.tokens:
            if token != true[-1]:
                break
            num_accepted += 1
            true.append(self._next(*true))
        kept = cut(tuple(true), num_accepted, self._ending, room)
        self._tokens += kept.tokens
        self._state = self._state.extend(kept.tokens)
        return Verdict(
            base,
            len(proposal.tokens),
            kept.num_accepted,
            kept.tokens,
            kept.finish_reason,
            forward_time_s=self._port.verify_s,
            rows=8,
        )

    def _next(self, *more: int) -> int:
        return self._port.next_token([*self._tokens, *more])


@dataclass
class FakeDraft:
    """router.ports.DraftPort over `next_token`.

    Attributes:
        token_s: virtual seconds one draft token takes.
        confidence: the draft's own probability of the token it says next.
        behaviour: makes the draft late, wrong or dead.
    """

    info: EngineInfo
    next_token: NextToken
    clock: VirtualClock = field(default_factory=VirtualClock)
    token_s: float = 0.003
    confidence: Callable[[Sequence[int]], float] = lambda prefix: 1.0
    behaviour: Behaviour = lambda _, proposal: proposal
    open_sessions: int = 0
    num_opened: int = 0
    num_answers: int = 0
    longest: int = 0

    def open(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        on_early: Callable[[EarlyProposals], None],
        traceparent: str = "",
    ) -> FakeDraftSession:
        if len(prompt) > self.info.max_context_length:
            raise AssertionError("a prompt past the draft's window reached the draft")
        self.open_sessions += 1
        self.num_opened += 1
        return FakeDraftSession(self, list(prompt))


class FakeDraftSession:
    """Answers every advance that asks for tokens, unless its port's behaviour says otherwise."""

    def __init__(self, port: FakeDraft, tokens: list[int]) -> None:
        self._port, self._tokens = port, tokens
        self._answers: asyncio.Queue[Proposal | OutriderError] = asyncio.Queue()
        self._closed = False

    def advance(
        self,
        base: State,
        tail: Sequence[int],
        num_speculative_tokens: int,
        *,
        confidence_threshold: float = 0.0,
        run_ahead: RunAhead | None = None,
        traceparent: str = "",
    ) -> None:
        known = base.length - len(tail)
        if known > len(self._tokens) or State.of(self._tokens[:known]).extend(tail) != base:
            raise AssertionError("the tail does not lead to the base")
        self._tokens = [*self._tokens[:known], *tail]
        self._port.longest = max(self._port.longest, base.length + num_speculative_tokens)
        if not num_speculative_tokens:
            return  # told of what is verified, and asked for nothing
        drafted: list[int] = []
        while len(drafted) < num_speculative_tokens:
            prefix = [*self._tokens, *drafted]
            drafted.append(self._port.next_token(prefix))
            if self._port.confidence(prefix) < confidence_threshold:
                break
        draft_s = self._port.token_s * len(drafted)
        proposal = Proposal.chain(base, drafted, drafter="draft_model", draft_time_s=draft_s)
        answer = self._port.behaviour(self._port.num_answers, proposal)
        self._port.num_answers += 1
        if answer is not None:
            self._answers.put_nowait(answer)

    async def proposal(self) -> Proposal:
        answer = await self._answers.get()
        if isinstance(answer, OutriderError):
            raise answer
        self._port.clock.spend(answer.draft_time_s)
        return answer

    async def close(self) -> None:
        await asyncio.sleep(0)
        if not self._closed:
            self._closed = True
            self._port.open_sessions -= 1


def scripted(prompt: Sequence[int], output: Sequence[int], filler: int) -> NextToken:
    """A model that says `output` after `prompt`, then only `filler`."""

    def next_token(prefix: Sequence[int]) -> int:
        position = len(prefix) - len(prompt)
        return output[position] if position < len(output) else filler

    return next_token


def wandering(vocab_size: int) -> NextToken:
    """A model whose next token is a hash of the last two: arbitrary, and with time it repeats itself."""

    def next_token(prefix: Sequence[int]) -> int:
        return State.of(prefix[-2:]).hash % vocab_size

    return next_token


def agreeing(model: NextToken, percent: int, vocab_size: int) -> NextToken:
    """A draft that says what `model` says in `percent` of a hundred prefixes, else something else."""

    def next_token(prefix: Sequence[int]) -> int:
        token = model(prefix)
        agrees = State.of([*prefix[-8:], len(prefix)]).hash % 100 < percent
        return token if agrees else (token + 1) % vocab_size

    return next_token
