"""Owns the target engine: sessions whose proposals it judges. A step is plan → forward → judge → commit.

Not thread-safe: engine.loop gives it a thread of its own. Only `_commit` changes a session.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import torch

from engine.errors import EngineFault, InvalidArgument, OutriderError, Overloaded, UnknownSession
from engine.info import EngineInfo
from engine.judge import Judgement, judge
from engine.loading import load_model
from engine.parallel import TensorParallel
from engine.planner import Demand, Span
from engine.proposal import FinishReason, Proposal, State, Verdict
from engine.runner import Executor, Runner
from engine.sampling import SamplingParams, StopParams
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.stopping import cut

MAX_HELD_PROPOSALS = 32  # per session: those whose state has not come true yet


@dataclass(frozen=True, slots=True)
class _Held:
    """A proposal waiting for its state; `dropped` says why it will not be judged after all."""

    proposal: Proposal
    arrived: float
    dropped: str = ""


@dataclass(slots=True)
class _Session:
    """One open sequence.

    Attributes:
        state: identity of the committed tokens, which are sequence.tokens.
        allowance: rounds it may run plainly by itself; opening grants the first.
        held: proposals by the state they continue.
    """

    sequence: Sequence
    sampling: SamplingParams
    stops: StopParams
    ending_ids: frozenset[int]
    state: State
    allowance: int = 1
    held: OrderedDict[State, _Held] = field(default_factory=OrderedDict)
    finish_reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        return len(self.sequence.tokens) - self.sequence.num_prompt

    @property
    def room(self) -> int:
        return self.stops.max_tokens - self.num_generated

    def next_proposal(self) -> _Held | None:
        """The proposal for the present state, if one is here and can be judged."""
        held = self.held.get(self.state)
        return held if held is not None and not held.dropped else None

    @property
    def wants_forward(self) -> bool:
        return self.finish_reason is None and (self.allowance > 0 or self.state in self.held)


class TargetEngine:
    """Verifies proposals for many sessions at once, and decodes plainly where there are none.

    Args:
        runner: the device.
        seed: of the generator for unseeded requests.
        clock: seconds, monotonic.
    """

    def __init__(self, runner: Runner, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner, self._clock = runner, clock
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._generator = torch.Generator().manual_seed(seed)
        self.stale_proposals = 0

    # Commands, applied between steps.

    def open(
        self,
        session: int,
        prompt: Tokens[int],
        committed: Tokens[int],
        sampling: SamplingParams,
        stops: StopParams,
    ) -> None:
        """Opens `session`; the next steps prefill it and yield its first verdict.

        Args:
            session: an id of the caller's, unused so far.
            prompt: token ids, at least one.
            committed: tokens generated earlier (on another replica, say); they count towards max_tokens.
            sampling, stops: validated here.

        Raises:
            InvalidArgument: a field is out of range, or prompt and max_tokens exceed the window.
            Overloaded: max_sessions are open.
        """
        self._check_open(session, prompt, committed, sampling, stops)
        tokens = [*prompt, *committed]
        sequence = Sequence(tokens, len(prompt))
        ending_ids = stops.ending_ids(self._runner.device.shape.eos_token_ids)
        self._sessions[session] = _Session(sequence, sampling, stops, ending_ids, State.of(tokens))

    def _check_open(
        self,
        session: int,
        prompt: Tokens[int],
        committed: Tokens[int],
        sampling: SamplingParams,
        stops: StopParams,
    ) -> None:
        settings, vocab_size = self._runner.settings, self._runner.vocab_size
        if session in self._sessions:
            raise InvalidArgument("session", session, "an id that is not open")
        if not prompt:
            raise InvalidArgument("prompt_token_ids", "nothing", "at least one token")
        for token in (*prompt, *committed):
            if not 0 <= token < vocab_size:
                raise InvalidArgument("prompt_token_ids", token, f"0 to {vocab_size - 1}")
        sampling.validate()
        stops.validate(vocab_size)
        if len(committed) >= stops.max_tokens:
            raise InvalidArgument("committed_token_ids", len(committed), f"fewer than max_tokens ({stops.max_tokens})")
        window = self._runner.max_context_length
        if len(prompt) + stops.max_tokens > window:
            allowed = f"prompt and max_tokens of at most {window} tokens together"
            raise InvalidArgument("prompt_token_ids", f"{len(prompt)} + {stops.max_tokens} tokens", allowed)
        if len(self._sessions) >= settings.max_sessions:
            raise Overloaded(f"all {settings.max_sessions} sessions of this target are in use", retry_after_s=1.0)

    def propose(self, session: int, proposal: Proposal) -> None:
        """Hands in a proposal: for the present state, or an early one for a state that may come true.

        One that is malformed is dropped and counted; its round goes on plain and its verdict says why. One for a state
        that has passed is dropped and counted.
        """
        target = self._session(session)
        if not self._may_come_true(target, proposal.base):
            self.stale_proposals += 1
            return
        runner = self._runner
        flaw = proposal.flaw(runner.vocab_size, runner.budget.max_proposal_tokens)
        target.held[proposal.base] = _Held(proposal, self._clock(), flaw or "")
        if len(target.held) > MAX_HELD_PROPOSALS:
            target.held.popitem(last=False)

    def decode(self, session: int, max_tokens: int) -> None:
        """Lets the session run on plainly for `max_tokens` rounds without a round trip; 0 interrupts."""
        self._session(session).allowance = max_tokens

    def close(self, session: int) -> None:
        """Frees the session's blocks. Closing one that is not open changes nothing."""
        closed = self._sessions.pop(session, None)
        if closed is not None:
            closed.sequence.release(self._runner.pool)

    def _session(self, session: int) -> _Session:
        if session not in self._sessions:
            raise UnknownSession(f"session {session} is not open")
        return self._sessions[session]

    # The step.

    def has_work(self) -> bool:
        return any(session.wants_forward for session in self._sessions.values())

    def step(self) -> list[tuple[int, Verdict | OutriderError]]:
        """One forward; a verdict for every session whose round it completed, or the error that ended the session."""
        demands = [
            Demand(key, session.sequence, self._proposal_for(session))
            for key, session in self._sessions.items()
            if session.wants_forward
        ]
        plan = self._runner.plan(demands, {key: session.sequence for key, session in self._sessions.items()})
        if plan is None:
            return []
        began = self._clock()
        logits, seconds = self._runner.forward(plan)
        rows = torch.split(logits, [span.num_logits for span in plan.spans])
        verdicts: list[tuple[int, Verdict | OutriderError]] = []
        for span, span_logits in zip(plan.spans, rows, strict=True):
            outcome = self._finish_span(span, span_logits, began, seconds, plan.rows)
            if outcome is not None:
                verdicts.append((span.key, outcome))
        return verdicts

    def _proposal_for(self, session: _Session) -> Proposal | None:
        held = session.next_proposal()
        return held.proposal.limited(session.room - 1) if held else None

    def _finish_span(
        self, span: Span, logits: torch.Tensor, began: float, seconds: float, rows: int
    ) -> Verdict | OutriderError | None:
        session = self._sessions[span.key]
        if not span.completes:
            self._advance_computed(session, span, num_in_place=0)
            return None
        try:
            judgement = self._judge(session, span, logits)
        except RuntimeError as error:  # NaN in this session's rows
            self.close(span.key)
            return EngineFault(f"session {span.key}: {error}")
        held = session.held.get(session.state)
        waited = began - held.arrived if held else 0.0
        return self._commit(session, span, judgement, Timing(seconds, max(waited, 0.0), rows))

    def _judge(self, session: _Session, span: Span, logits: torch.Tensor) -> Judgement:
        return judge(
            logits,
            span.proposal,
            session.sampling,
            position=len(session.sequence.tokens),
            vocab_size=self._runner.vocab_size,
            ending_ids=session.ending_ids,
            banned_until=session.sequence.num_prompt + session.stops.min_tokens,
            generator=self._generator,
        )

    def _commit(self, session: _Session, span: Span, judgement: Judgement, timing: Timing) -> Verdict:
        """The only place where a session changes: tokens grow, KV is rolled back, stale proposals go."""
        tokens, num_accepted, finish = cut(judgement.tokens, len(judgement.accepted), session.ending_ids, session.room)
        base, held = session.state, session.held.get(session.state)
        # Accepted nodes that lie in their natural slot (always so in a chain) are computed; others are caught up.
        num_in_place = next((i for i, node in enumerate(judgement.accepted[:num_accepted]) if node != i), num_accepted)
        session.sequence.tokens += tokens
        self._advance_computed(session, span, num_in_place)
        session.state = base.extend(tokens)
        session.allowance = max(session.allowance - 1, 0)
        session.finish_reason = finish
        for state in [state for state in session.held if not self._may_come_true(session, state)]:
            del session.held[state]
        self._sessions.move_to_end(span.key)
        if finish is not None:
            session.sequence.release(self._runner.pool)
        return Verdict(
            base=base,
            num_proposed=len(span.draft_tokens),
            num_accepted=num_accepted,
            tokens=tuple(tokens),
            finish_reason=finish,
            forward_time_s=timing.forward_s,
            queue_time_s=timing.queue_s,
            rows=timing.rows,
            dropped=held.dropped if held else "",
        )

    def _advance_computed(self, session: _Session, span: Span, num_in_place: int) -> None:
        sequence = session.sequence
        sequence.num_computed = span.start + span.num_catch_up + num_in_place
        sequence.roll_back(sequence.num_computed)
        sequence.publish_full_blocks(self._runner.pool)

    @staticmethod
    def _may_come_true(session: _Session, state: State) -> bool:
        return state == session.state or state.length > session.state.length

    # What it says of itself.

    def cached_tokens(self, session: int) -> int:
        """Prompt tokens of the session that the prefix cache already held."""
        return self._session(session).sequence.num_cached

    def info(self) -> EngineInfo:
        return self._runner.info(len(self._sessions))

    def check_integrity(self) -> None:
        """Raises RuntimeError when blocks are leaked or shared against the tables, or a length is impossible."""
        self._runner.pool.check_integrity(s.sequence.block_table for s in self._sessions.values())
        for key, session in self._sessions.items():
            sequence = session.sequence
            if session.state != State.of(sequence.tokens):
                raise RuntimeError(f"session {key}: its state is not that of its tokens")
            held_slots = len(sequence.block_table) * self._runner.pool.block_size
            if not 0 <= sequence.num_computed <= min(len(sequence.tokens), held_slots):
                raise RuntimeError(f"session {key}: {sequence.num_computed} computed tokens in {held_slots} slots")


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one forward as one session saw it: seconds in it, seconds before it, rows with padding."""

    forward_s: float
    queue_s: float
    rows: int


def build_target_engine(settings: EngineSettings, parallel: TensorParallel | None = None) -> TargetEngine:
    """Loads the model and makes the engine.

    Args:
        settings: of the engine.
        parallel: the group that this process, as rank 0, leads; the others are in engine.follower.follow.

    Raises:
        InvalidArgument, ModelNotFound: as load_model.
        Unavailable: a rank of the group is gone.
    """
    device = Executor(settings, load_model(settings, parallel=parallel))
    runner = Runner(settings, device, parallel=parallel)
    if parallel is not None:
        parallel.wait_until_loaded()
    return TargetEngine(runner, settings.seed)
