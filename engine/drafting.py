"""Owns the draft engine: the same runner as the target's, with a sampling loop in place of a judge.

`advance` is commit and rollback in one: the true sequence is told, the KV that agrees with it is kept. A step runs one
forward for all sessions that owe draft tokens, so that sessions at different depths share it; what room is left goes to
those that run ahead of a proposal that is being verified (engine.lookaheads).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import torch

from engine.ahead import Choice, draft_probs_of
from engine.choices import Chooser, Rows
from engine.draft_session import DraftSession
from engine.errors import EngineFault, InvalidArgument, OutriderError, Overloaded, PairMismatch, UnknownSession
from engine.info import EngineInfo
from engine.loading import load_model
from engine.lookaheads import DRAFTER, Lookaheads
from engine.planner import Demand, Span, StepPlan
from engine.ports import DraftOutput
from engine.proposal import Proposal, RunAhead, State
from engine.runner import Device, Executor, Runner
from engine.sampling import SamplingParams
from engine.sequence import Sequence
from engine.settings import DraftSettings

AHEAD_PROBS = 8
"""Most tokens a sampled distribution of a branch is truncated to: there are many branches, and all of them travel."""

Output = tuple[int, DraftOutput | OutriderError]


class DraftEngine:
    """Proposes for many sessions at once.

    Args:
        runner: the device.
        top_probs: tokens a sampled distribution is truncated to.
        seed: of the generator for unseeded requests.
        clock: seconds, monotonic.

    Raises:
        PairMismatch: a reduced head that maps to ids the tokenizer does not know.
    """

    def __init__(
        self, runner: Runner, top_probs: int = 32, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._runner, self._clock = runner, clock
        head_ids = runner.device.head_token_ids
        if head_ids is not None and int(head_ids.max()) >= runner.vocab_size:
            raise PairMismatch(f"the draft's head has ids past the {runner.vocab_size} that the tokenizer knows")
        self._chooser = Chooser(head_ids, runner.vocab_size, torch.Generator().manual_seed(seed))
        self._top_probs = top_probs
        self._sessions: OrderedDict[int, DraftSession] = OrderedDict()
        self._lookaheads = Lookaheads(self._sessions, runner, clock)

    def open(self, session: int, prompt: Tokens[int], sampling: SamplingParams) -> None:
        """Opens `session`; its prompt is computed with the first proposal.

        Raises:
            InvalidArgument: no tokens, a token out of range, more than the draft's window, or sampling out of range.
            Overloaded: max_sessions are open.
        """
        sampling.validate()
        if session in self._sessions:
            raise InvalidArgument("session", session, "an id that is not open")
        if len(self._sessions) >= self._runner.settings.max_sessions:
            raise Overloaded(f"all {self._runner.settings.max_sessions} sessions of this draft are in use", 1.0)
        self._check_length(len(prompt))
        self._check_tokens("prompt_token_ids", prompt)
        self._sessions[session] = DraftSession(Sequence(list(prompt), len(prompt)), sampling, State.of(prompt))

    def _check_length(self, length: int) -> None:
        window = self._runner.max_context_length
        if not 0 < length <= window:
            raise InvalidArgument("prompt_token_ids", f"{length} tokens", f"1 to {window} tokens")

    def _check_tokens(self, field: str, tokens: Tokens[int]) -> None:
        vocab_size = self._runner.vocab_size
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InvalidArgument(field, token, f"0 to {vocab_size - 1}")

    def advance(
        self,
        session: int,
        base: State,
        tail: Tokens[int],
        num_speculative_tokens: int,
        confidence_threshold: float = 0.0,
        run_ahead: RunAhead | None = None,
    ) -> None:
        """Tells the true sequence and asks for a proposal that continues it.

        Args:
            session: an open session.
            base: the committed state.
            tail: its last tokens, at least all that this draft was not told yet.
            num_speculative_tokens: most draft tokens wanted; 0 where an early proposal of this draft is being verified.
            confidence_threshold: the chain ends with the first token the draft gives less probability.
            run_ahead: how far to draft on behind what is likely to come of that proposal; None: not at all.

        Raises:
            UnknownSession: not open.
            InvalidArgument: the tail does not lead from what is known to `base`.
        """
        if session not in self._sessions:
            raise UnknownSession(f"session {session} is not open")
        draft = self._sessions[session]
        self._check_length(base.length)
        known = base.length - len(tail)  # tokens that the tail leaves untold
        told = draft.state.length - known
        fits = known >= 0 and 0 <= told <= len(tail)
        if not fits or draft.sequence.tokens[known : draft.state.length] != list(tail[:told]):
            raise InvalidArgument(
                "tail", f"{len(tail)} tokens to length {base.length}", "one that continues this session"
            )
        self._check_tokens("tail", tail)
        state = draft.state.extend(tail[told:])
        if state != base:
            raise InvalidArgument("base.hash", base.hash, f"{state.hash}, the hash of the told tokens")
        sources, destinations = draft.commit(state, list(tail[told:]), self._runner.pool)
        if sources:
            self._runner.device.move(sources, destinations)
        draft.sequence.publish_full_blocks(self._runner.pool, state.length)
        draft.wanted = min(num_speculative_tokens, self._runner.max_context_length - state.length)
        draft.confidence_threshold, draft.run_ahead, draft.ahead_since = confidence_threshold, run_ahead, self._clock()
        draft.looks_out = False
        if draft.wanted:
            draft.shorten(draft.wanted)
        elif run_ahead is not None and run_ahead.num_proposed <= len(draft.drafted):
            grown = draft.set_apart(run_ahead.num_proposed)
            draft.looks_out = not draft.drafted and not grown
            if not draft.looks_out:
                self._lookaheads.begin(draft, grown)

    def close(self, session: int) -> None:
        """Frees the session's blocks. Closing one that is not open changes nothing."""
        closed = self._sessions.pop(session, None)
        if closed is not None:
            closed.sequence.release(self._runner.pool)

    def has_work(self) -> bool:
        return any(
            draft.wanted or draft.looks_out or draft.is_ahead or draft.goes_on for draft in self._sessions.values()
        )

    def step(self) -> list[Output]:
        """One forward: one more token for all that is being drafted; the proposals that are ready, early ones too.

        A session in whose rows the model yields NaN ends with an EngineFault, and no other.
        """
        if drafted_ahead := self._proposals():
            return drafted_ahead
        plan = self._plan()
        if plan is not None:
            faults = self._forward(plan)
            return [*faults, *self._proposals(), *self._lookaheads.due()]
        self._lookaheads.stop_growing()  # they get no forward
        return list(self._lookaheads.due())

    def _plan(self) -> StepPlan | None:
        sessions, pool = self._sessions.items(), self._runner.pool
        owing = [Demand(key, draft.sequence) for key, draft in sessions if draft.wanted or draft.looks_out]
        if pool.num_free < sum(
            pool.blocks_for(len(d.sequence.tokens) + 1) - len(d.sequence.block_table) for d in owing
        ):
            self._lookaheads.drop()
        for draft in self._sessions.values():
            if not draft.sequence.block_table:
                draft.lookahead = None  # preempted, and its KV is gone
        ahead = self._lookaheads.demands(len(owing))
        return self._runner.plan([*owing, *ahead], {key: draft.sequence for key, draft in sessions})

    def _forward(self, plan: StepPlan) -> list[Output]:
        """Has every session take what was chosen for it; the faults of those for which nothing could be."""
        began = self._clock()
        logits, seconds = self._runner.forward(plan)
        complete = [span for span in plan.spans if span.completes]
        chosen = self._chooser.choose(logits, [self._rows(span) for span in complete])
        for span in plan.spans:
            if not span.completes:
                self._sessions[span.key].sequence.num_computed = span.start + span.num_catch_up
        faults: list[Output] = []
        for span, choices in zip(complete, chosen, strict=True):
            if choices is None:
                self.close(span.key)
                faults.append((span.key, EngineFault(f"session {span.key}: the draft's logits are not finite numbers")))
            else:
                self._take(self._sessions[span.key], span, choices, seconds)
        if len(complete) == len(plan.spans):
            self._lookaheads.saw_forward(plan.rows, self._clock() - began)
        return faults

    def _rows(self, span: Span) -> Rows:
        """The rows of a span whose logits are wanted, and the positions of the tokens that follow them."""
        draft = self._sessions[span.key]
        if span.proposal is None or span.num_done is None:
            return Rows(draft.sampling, [len(draft.sequence.tokens)], self._top_probs)
        depths: list[int] = []
        for parent in span.proposal.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        positions = [draft.state.length + depth for depth in depths[span.num_done :]]
        return Rows(draft.sampling, positions, min(self._top_probs, AHEAD_PROBS))

    def _take(self, draft: DraftSession, span: Span, choices: list[Choice], seconds: float) -> None:
        """What a forward chose for one session."""
        if draft.looks_out:
            draft.looks_out, draft.sequence.num_computed = False, span.start + span.num_catch_up
            self._lookaheads.begin(draft, choices[:1])
        elif span.num_done is None:
            draft.sequence.num_computed = span.start + span.num_catch_up
            draft.sequence.tokens.append(choices[0].token)
            draft.drafted.append(choices[0])
            draft.draft_time_s += seconds
            draft.sequence.publish_full_blocks(self._runner.pool, draft.state.length)
        elif draft.lookahead is not None:
            draft.lookahead.computed(choices, seconds)
            draft.sequence.num_computed = draft.state.length + min(draft.lookahead.num_done, len(draft.drafted))

    def _proposals(self) -> list[Output]:
        """Of the sessions whose proposal is made."""
        ready: list[Output] = []
        for key in [key for key, draft in self._sessions.items() if draft.is_ready]:
            draft = self._sessions[key]
            draft.wanted, draft.ahead_since = 0, self._clock()
            self._sessions.move_to_end(key)
            self._lookaheads.begin(draft)
            tokens, draft_probs = [choice.token for choice in draft.drafted], draft_probs_of(draft.drafted)
            made = Proposal.chain(
                draft.state, tokens, draft_probs=draft_probs, drafter=DRAFTER, draft_time_s=draft.draft_time_s
            )
            ready.append((key, made))
        return ready

    def info(self) -> EngineInfo:
        return self._runner.info(len(self._sessions))

    def check_integrity(self) -> None:
        """Raises RuntimeError when blocks are leaked or shared against the tables."""
        self._runner.pool.check_integrity(draft.sequence.block_table for draft in self._sessions.values())


def build_draft_engine(settings: DraftSettings, device: Device | None = None) -> DraftEngine:
    """Loads the model, unless there is a `device` without one, and makes the engine.

    Raises:
        ModelNotFound, PairMismatch: as load_model.
    """
    device = device or Executor(settings.engine, load_model(settings.engine, settings.target_path))
    runner = Runner(settings.engine, device)
    return DraftEngine(runner, settings.top_probs, settings.engine.seed)
