"""Owns the target engine: sessions whose proposals it judges. A step is plan → forward → judge → commit.

Not thread-safe: engine.loop gives it a thread of its own. Only `_commit` changes a session.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import torch

from engine.errors import EngineFault, InvalidArgument, OutriderError, Overloaded, UnknownSession
from engine.info import EngineInfo
from engine.judge import Judgement, judge
from engine.loading import load_model
from engine.parallel import TensorParallel
from engine.planner import Demand, Span
from engine.proposal import EarlyProposals, Proposal, State, Verdict
from engine.runner import Device, Executor, Runner
from engine.sampling import SamplingParams, StopParams
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.stopping import cut
from engine.verifying import Held, TargetSession


class TargetEngine:
    """Verifies proposals for many sessions at once, and decodes plainly where there are none.

    Args:
        runner: the device.
        seed: of the generator for unseeded requests.
        clock: seconds, monotonic.
    """

    def __init__(self, runner: Runner, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner, self._clock = runner, clock
        self._sessions: OrderedDict[int, TargetSession] = OrderedDict()
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
        trace: str = "",
    ) -> None:
        """Opens `session`; the next steps prefill it and yield its first verdict.

        Args:
            session: an id of the caller's, unused so far.
            prompt: token ids, at least one.
            committed: tokens generated earlier (on another replica, say); they count towards max_tokens.
            sampling, stops: validated here.
            trace: ASCII, opaque; every rank is told it with each forward that has rows of the session.

        Raises:
            InvalidArgument: a field is out of range, or prompt and max_tokens exceed the window.
            Overloaded: max_sessions are open.
        """
        self._check_open(session, prompt, committed, sampling, stops)
        if not trace.isascii():
            raise InvalidArgument("trace", trace, "ASCII")
        tokens = [*prompt, *committed]
        sequence = Sequence(tokens, len(prompt), trace=trace)
        ending_ids = stops.ending_ids(self._runner.device.shape.eos_token_ids)
        self._sessions[session] = TargetSession(sequence, sampling, stops, ending_ids, State.of(tokens))

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
        sampling.validate()
        stops.validate(vocab_size)
        if len(committed) >= stops.max_tokens:
            raise InvalidArgument("committed_token_ids", len(committed), f"fewer than max_tokens ({stops.max_tokens})")
        window = self._runner.max_context_length
        if len(prompt) + stops.max_tokens > window:
            allowed = f"prompt and max_tokens of at most {window} tokens together"
            raise InvalidArgument("prompt_token_ids", f"{len(prompt)} + {stops.max_tokens} tokens", allowed)
        for name, tokens in (("prompt_token_ids", prompt), ("committed_token_ids", committed)):  # no more than fit
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InvalidArgument(name, token, f"0 to {vocab_size - 1}")
        if len(self._sessions) >= settings.max_sessions:
            raise Overloaded(f"all {settings.max_sessions} sessions of this target are in use", retry_after_s=1.0)

    def propose(self, session: int, proposal: Proposal) -> None:
        """Hands in a proposal for the present state, in the place of any that is here.

        One that is malformed is dropped; its round goes on plain and its verdict says why. One for another state is
        dropped and counted.
        """
        if not self._session(session).propose(self._held(proposal)):
            self.stale_proposals += 1

    def propose_early(self, session: int, early: EarlyProposals) -> None:
        """Hands in proposals for what may come of the round under way; the one that comes true is judged next.

        If their round is over already, that happens at once. Others are dropped and counted.
        """
        if not self._session(session).propose_early(early, self._held):
            self.stale_proposals += 1

    def _held(self, proposal: Proposal) -> Held:
        runner = self._runner
        flaw = proposal.flaw(runner.vocab_size, runner.budget.max_proposal_tokens)
        if flaw is not None:
            return Held(Proposal(proposal.base), self._clock(), flaw)  # however much of it there is, it goes now
        return Held(proposal, self._clock())

    def decode(self, session: int, max_tokens: int) -> None:
        """Lets the session run on plainly for `max_tokens` rounds more without a round trip; 0 interrupts."""
        target = self._session(session)
        target.allowance = target.allowance + max_tokens if max_tokens else 0
        target.early = None

    def close(self, session: int) -> None:
        """Frees the session's blocks. Closing one that is not open changes nothing."""
        closed = self._sessions.pop(session, None)
        if closed is not None:
            closed.sequence.release(self._runner.pool)

    def _session(self, session: int) -> TargetSession:
        if session not in self._sessions:
            raise UnknownSession(f"session {session} is not open")
        return self._sessions[session]

    # The step.

    def has_work(self) -> bool:
        return any(session.wants_forward for session in self._sessions.values())

    def step(self) -> list[tuple[int, Verdict | OutriderError]]:
        """One forward; a verdict for every session whose round it completed, or the error that ended the session."""
        demands = [
            Demand(key, session.sequence, self._judgeable(session))
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

    def _judgeable(self, session: TargetSession) -> Proposal | None:
        """The proposal to be judged; of a wide tree no more than all blocks could hold behind the session's tokens.

        Otherwise it would wait for ever, and take their blocks from all behind it again and again.
        """
        proposal = session.proposal
        return None if proposal is None else proposal.first(self._runner.num_slots - len(session.sequence.tokens))

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
        waited = began - session.held.arrived if session.held else 0.0
        return self._commit(session, span, judgement, Timing(seconds, max(waited, 0.0), rows))

    def _judge(self, session: TargetSession, span: Span, logits: torch.Tensor) -> Judgement:
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

    def _commit(self, session: TargetSession, span: Span, judgement: Judgement, timing: Timing) -> Verdict:
        """The only place where a session changes: tokens grow, KV is rolled back, the next proposal takes its place."""
        tokens, num_accepted, finish = cut(judgement.tokens, len(judgement.accepted), session.ending_ids, session.room)
        base, held = session.state, session.held
        # Accepted nodes that lie in their natural slot (always so in a chain) are computed; others are caught up.
        num_in_place = next((i for i, node in enumerate(judgement.accepted[:num_accepted]) if node != i), num_accepted)
        session.sequence.tokens += tokens
        self._advance_computed(session, span, num_in_place)
        session.state = base.extend(tokens)
        if held is None:
            session.allowance = max(session.allowance - 1, 0)
        session.finish_reason = finish
        session.pass_on(base, num_accepted, tokens[-1], self._held)
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

    def _advance_computed(self, session: TargetSession, span: Span, num_in_place: int) -> None:
        sequence = session.sequence
        sequence.num_computed = span.start + span.num_catch_up + num_in_place
        sequence.roll_back(sequence.num_computed)
        sequence.publish_full_blocks(self._runner.pool, len(sequence.tokens))

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


def build_target_engine(
    settings: EngineSettings, parallel: TensorParallel | None = None, device: Device | None = None
) -> TargetEngine:
    """Loads the model and makes the engine.

    Args:
        settings: of the engine.
        parallel: the group that this process, as rank 0, leads; the others are in engine.follower.follow.
        device: in the place of one with the model on it, which then is not loaded.

    Raises:
        InvalidArgument, ModelNotFound: as load_model.
        Unavailable: a rank of the group is gone.
    """
    device = device or Executor(settings, load_model(settings, parallel=parallel))
    runner = Runner(settings, device, parallel=parallel)
    if parallel is not None:
        parallel.wait_until_loaded()
    return TargetEngine(runner, settings.seed)
