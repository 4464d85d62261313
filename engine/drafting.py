"""Owns the draft engine: the same runner as the target's, with a sampling loop in place of a judge.

`advance` is commit and rollback in one: the true sequence is told, the KV that agrees with it is kept. A step runs one
forward for all sessions that owe draft tokens, so that sessions at different depths share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from engine.distributions import sample, target_probs, truncate_to_sparse
from engine.errors import InvalidArgument, OutriderError, Overloaded, PairMismatch, UnknownSession
from engine.info import EngineInfo
from engine.judge import shared_choice
from engine.loading import load_model
from engine.planner import Demand, Span
from engine.proposal import Proposal, SparseProbs, State
from engine.runner import Executor, Runner
from engine.sampling import SamplingParams
from engine.sequence import Sequence
from engine.settings import DraftSettings

DRAFTER = "draft_model"


@dataclass(slots=True)
class _Session:
    """One sequence being drafted.

    Attributes:
        sequence: committed tokens, then the draft tokens of the proposal in the making.
        state: identity of the committed tokens.
        wanted: draft tokens the router asked for; 0 when nothing is owed.
        probs: distributions of the draft tokens so far (sampling, unseeded requests only).
        draft_time_s: device time of this proposal so far.
    """

    sequence: Sequence
    sampling: SamplingParams
    state: State
    wanted: int = 0
    confidence_threshold: float = 0.0
    probs: list[SparseProbs] = field(default_factory=list)
    draft_time_s: float = 0.0

    @property
    def draft_tokens(self) -> list[int]:
        return self.sequence.tokens[self.state.length :]


class DraftEngine:
    """Proposes for many sessions at once.

    Args:
        runner: the device.
        top_probs: tokens a sampled distribution is truncated to.
        seed: of the generator for unseeded requests.

    Raises:
        PairMismatch: a reduced head that maps to ids the tokenizer does not know.
    """

    def __init__(self, runner: Runner, top_probs: int = 32, seed: int = 0) -> None:
        self._runner, self._top_probs = runner, top_probs
        self._head_ids = runner.device.head_token_ids
        if self._head_ids is not None and int(self._head_ids.max()) >= runner.vocab_size:
            raise PairMismatch(f"the draft's head has ids past the {runner.vocab_size} that the tokenizer knows")
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._generator = torch.Generator().manual_seed(seed)

    def open(self, session: int, prompt: Tokens[int], sampling: SamplingParams) -> None:
        """Opens `session`; its prompt is computed with the first proposal.

        Raises:
            InvalidArgument: no tokens, a token out of range, or more than the draft's window.
            Overloaded: max_sessions are open.
        """
        if session in self._sessions:
            raise InvalidArgument("session", session, "an id that is not open")
        if len(self._sessions) >= self._runner.settings.max_sessions:
            raise Overloaded(f"all {self._runner.settings.max_sessions} sessions of this draft are in use", 1.0)
        self._check_tokens(prompt, len(prompt))
        self._sessions[session] = _Session(Sequence(list(prompt), len(prompt)), sampling, State.of(prompt))

    def _check_tokens(self, tokens: Tokens[int], length: int) -> None:
        window, vocab_size = self._runner.max_context_length, self._runner.vocab_size
        if not 0 < length <= window:
            raise InvalidArgument("prompt_token_ids", f"{length} tokens", f"1 to {window} tokens")
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InvalidArgument("prompt_token_ids", token, f"0 to {vocab_size - 1}")

    def advance(
        self,
        session: int,
        base: State,
        tail: Tokens[int],
        num_speculative_tokens: int,
        confidence_threshold: float = 0.0,
    ) -> None:
        """Tells the true sequence and asks for a proposal that continues it.

        Args:
            session: an open session.
            base: the committed state.
            tail: its last tokens, at least all that this draft was not told yet.
            num_speculative_tokens: most draft tokens wanted.
            confidence_threshold: the chain ends with the first token the draft gives less probability.

        Raises:
            UnknownSession: not open.
            InvalidArgument: the tail does not lead from what is known to `base`.
        """
        if session not in self._sessions:
            raise UnknownSession(f"session {session} is not open")
        draft = self._sessions[session]
        known = base.length - len(tail)  # tokens that the tail leaves untold
        self._check_tokens(tail, base.length)
        told = draft.state.length - known
        if not 0 <= told <= len(tail) or draft.sequence.tokens[known : draft.state.length] != list(tail[:told]):
            raise InvalidArgument(
                "tail", f"{len(tail)} tokens to length {base.length}", "one that continues this session"
            )
        state = draft.state.extend(tail[told:])
        if state != base:
            raise InvalidArgument("base.hash", base.hash, f"{state.hash}, the hash of the told tokens")
        self._commit(draft, state, list(tail[told:]))
        draft.wanted = min(num_speculative_tokens, self._runner.max_context_length - state.length)
        draft.confidence_threshold = confidence_threshold

    def _commit(self, draft: _Session, state: State, new: list[int]) -> None:
        """Puts `new` in the place of the draft tokens; the KV of those that agree is kept, the rest is rolled back."""
        known = draft.state.length
        pairs = zip(draft.draft_tokens, new, strict=False)
        num_agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        draft.sequence.tokens[known:] = new
        draft.sequence.roll_back(known + num_agreeing)
        draft.state, draft.probs, draft.draft_time_s = state, [], 0.0

    def close(self, session: int) -> None:
        """Frees the session's blocks. Closing one that is not open changes nothing."""
        closed = self._sessions.pop(session, None)
        if closed is not None:
            closed.sequence.release(self._runner.pool)

    def has_work(self) -> bool:
        return any(draft.wanted > 0 for draft in self._sessions.values())

    def step(self) -> list[tuple[int, Proposal | OutriderError]]:
        """One forward, one more draft token for each session it completed; the proposals that are ready."""
        demands = [Demand(key, draft.sequence) for key, draft in self._sessions.items() if draft.wanted > 0]
        plan = self._runner.plan(demands, {key: draft.sequence for key, draft in self._sessions.items()})
        if plan is None:
            return []
        logits, seconds = self._runner.forward(plan)
        rows: Iterator[torch.Tensor] = iter(logits)
        ready: list[tuple[int, Proposal | OutriderError]] = []
        for span in plan.spans:
            draft = self._sessions[span.key]
            draft.draft_time_s += seconds
            draft.sequence.num_computed = span.start + span.num_catch_up
            if span.completes and self._draft_token(draft, next(rows)):
                ready.append((span.key, self._proposal(draft)))
                self._sessions.move_to_end(span.key)
            self._publish(draft, span)
        return ready

    def _draft_token(self, draft: _Session, logits: torch.Tensor) -> bool:
        """Appends one draft token; whether the proposal is complete with it."""
        token, probability, sparse = self._choose(draft, logits)
        draft.sequence.tokens.append(token)
        if sparse is not None:
            draft.probs.append(sparse)
        return len(draft.draft_tokens) >= draft.wanted or probability < draft.confidence_threshold

    def _choose(self, draft: _Session, logits: torch.Tensor) -> tuple[int, float, SparseProbs | None]:
        """Token, its probability under the draft, and the distribution if the token was drawn from one."""
        if self._head_ids is None:
            logits = logits[: self._runner.vocab_size]  # ids past the tokenizer's are padding
        if draft.sampling.greedy:
            probability, index = torch.softmax(logits.float(), -1).max(-1)
            return int(self._token_ids(index)), float(probability), None
        if draft.sampling.seed is not None:
            # Only the token travels, so nothing is truncated: the closer to the target's choice, the better.
            full = target_probs(logits[None], draft.sampling)[0]
            choice = shared_choice(full, draft.sampling.seed, len(draft.sequence.tokens), self._head_ids)
            return int(self._token_ids(torch.tensor(choice))), float(full[choice]), None
        indices, all_probs = truncate_to_sparse(logits[None], draft.sampling, self._top_probs)
        ids, probs = self._token_ids(indices[0]), all_probs[0]
        choice = int(sample(probs[None], self._generator))
        kept = probs > 0
        sparse = SparseProbs(tuple(ids[kept].tolist()), tuple(probs[kept].tolist()))
        return int(ids[choice]), float(probs[choice]), sparse

    def _token_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """Token ids of rows of the head."""
        return indices if self._head_ids is None else self._head_ids[indices]

    def _proposal(self, draft: _Session) -> Proposal:
        draft.wanted = 0
        return Proposal.chain(
            draft.state,
            draft.draft_tokens,
            draft_probs=tuple(draft.probs) if draft.probs else None,
            drafter=DRAFTER,
            draft_time_s=draft.draft_time_s,
        )

    def _publish(self, draft: _Session, span: Span) -> None:
        """Only committed tokens may enter the prefix cache: draft tokens may yet be rolled back."""
        if span.start + span.num_catch_up <= draft.state.length:
            draft.sequence.publish_full_blocks(self._runner.pool)

    def info(self) -> EngineInfo:
        return self._runner.info(len(self._sessions))

    def check_integrity(self) -> None:
        """Raises RuntimeError when blocks are leaked or shared against the tables."""
        self._runner.pool.check_integrity(draft.sequence.block_table for draft in self._sessions.values())


def build_draft_engine(settings: DraftSettings) -> DraftEngine:
    """Loads the model and makes the engine. Raises ModelNotFound or PairMismatch."""
    runner = Runner(settings.engine, Executor(settings.engine, load_model(settings.engine, settings.target_path)))
    return DraftEngine(runner, settings.top_probs, settings.engine.seed)
