"""Owns the values that cross the seams of a round: State, Proposal, Verdict. All frozen, none knows torch or grpc.

A proposal is a tree: `tokens[i]` continues `tokens[parents[i]]`, and parent -1 is the last committed token. A chain,
the common case, has parents -1, 0, 1, ….

EarlyProposals are made while a proposal (their *trunk*) is verified: for outcomes of it that may come true, each the
number of its tokens that are accepted and the token that follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

FinishReason = Literal["stop", "length"]

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class State:
    """Identity of a committed sequence: its length in tokens (prompt included) and a 64-bit rolling hash of them."""

    length: int = 0
    hash: int = 0

    @classmethod
    def of(cls, tokens: Sequence[int]) -> State:
        return cls().extend(tokens)

    def extend(self, tokens: Sequence[int]) -> State:
        """The state after `tokens` follow; O(len(tokens))."""
        value = self.hash
        for token in tokens:
            value = ((value ^ (token + 1)) * _MULTIPLIER) & _MASK
            value ^= value >> 29
        return State(self.length + len(tokens), value)


@dataclass(frozen=True, slots=True)
class SparseProbs:
    """A truncated distribution: `ids` and their probabilities (sum 1). It *is* what the drafter sampled from."""

    ids: tuple[int, ...]
    probs: tuple[float, ...]

    def flaw(self, token: int, vocab_size: int) -> str | None:
        """Why `token` cannot have been drawn from this, or None."""
        if len(self.ids) != len(self.probs) or len(set(self.ids)) != len(self.ids):
            return "a distribution whose ids do not match its probabilities"
        if not all(0 <= i < vocab_size for i in self.ids):
            return "a distribution with ids outside the vocabulary"
        if not all(0.0 <= p <= 1.0 + 1e-3 for p in self.probs) or abs(sum(self.probs) - 1.0) > 1e-3:
            return "a distribution that is not one (NaN, negative, or a sum other than 1)"
        if token not in self.ids or self.probs[self.ids.index(token)] <= 0.0:
            return f"token id {token} has no draft probability"
        return None


def chain_parents(num_tokens: int) -> tuple[int, ...]:
    """Parents of a chain: (-1, 0, 1, …)."""
    return tuple(range(-1, num_tokens - 1))


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for one committed state. No tokens at all means plain decoding.

    Attributes:
        base: the state the proposal continues.
        tokens: draft token ids, parents before children.
        parents: for each token the index of its parent in `tokens`, or -1.
        draft_probs: per token the distribution it was sampled from; None where the drafter chose deterministically
            (temperature 0, seeded shared noise, n-gram), which verification treats as a point mass.
        drafter: name for statistics, e.g. "draft_model" or "ngram".
        draft_time_s: seconds of device time the drafter spent.
    """

    base: State
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draft_probs: tuple[SparseProbs, ...] | None = None
    drafter: str = ""
    draft_time_s: float = 0.0

    @classmethod
    def chain(cls, base: State, tokens: Sequence[int], **rest: object) -> Proposal:
        return cls(base, tuple(tokens), chain_parents(len(tokens)), **rest)  # type: ignore[arg-type]

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.tokens))

    def limited(self, max_depth: int) -> Proposal:
        """Without the tokens that lie more than `max_depth` past the base."""
        depth: list[int] = []
        for parent in self.parents:
            depth.append(depth[parent] + 1 if parent >= 0 else 1)
        kept = [index for index, d in enumerate(depth) if d <= max_depth]
        if len(kept) == len(self.tokens):
            return self
        new_index = {old: new for new, old in enumerate(kept)} | {-1: -1}
        return replace(
            self,
            tokens=tuple(self.tokens[i] for i in kept),
            parents=tuple(new_index[self.parents[i]] for i in kept),
            draft_probs=None if self.draft_probs is None else tuple(self.draft_probs[i] for i in kept),
        )

    def first(self, num_tokens: int) -> Proposal:
        """Its first tokens, which are a tree as well: parents come before their children."""
        if num_tokens >= len(self.tokens):
            return self
        draft_probs = None if self.draft_probs is None else self.draft_probs[:num_tokens]
        return replace(
            self, tokens=self.tokens[:num_tokens], parents=self.parents[:num_tokens], draft_probs=draft_probs
        )

    def flaw(self, vocab_size: int, max_tokens: int) -> str | None:
        """Why this proposal cannot be verified (garbage from a faulty drafter), or None when it is well formed."""
        if len(self.tokens) > max_tokens:
            return f"{len(self.tokens)} tokens, allowed are {max_tokens}"
        if len(self.parents) != len(self.tokens):
            return f"{len(self.parents)} parents for {len(self.tokens)} tokens"
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocab_size:
                return f"token id {token} outside 0..{vocab_size - 1}"
            if not -1 <= parent < index:
                return f"parent {parent} of token {index} is not an earlier token"
        return self._probs_flaw(vocab_size)

    def _probs_flaw(self, vocab_size: int) -> str | None:
        if self.draft_probs is None:
            return None
        if len(self.draft_probs) != len(self.tokens):
            return f"{len(self.draft_probs)} distributions for {len(self.tokens)} tokens"
        flaws = (sparse.flaw(token, vocab_size) for token, sparse in zip(self.tokens, self.draft_probs, strict=True))
        return next((flaw for flaw in flaws if flaw), None)


@dataclass(frozen=True, slots=True)
class Branch:
    """Draft tokens for one outcome of a trunk.

    Attributes:
        num_accepted: of the trunk's tokens.
        token: the recovered or bonus token behind them.
        tokens: a chain that continues it.
        draft_probs: of `tokens`, as in Proposal.
    """

    num_accepted: int
    token: int
    tokens: tuple[int, ...]
    draft_probs: tuple[SparseProbs, ...] | None = None


@dataclass(frozen=True, slots=True)
class EarlyProposals:
    """Proposals for states that may follow `after`.

    Attributes:
        after: the state whose trunk is being verified.
        trunk: the state after all of the trunk; tells it from other proposals for `after`.
        branches: one for each outcome, the likeliest first.
        drafter, draft_time_s: as in Proposal; the time is that of all branches.
        plain_otherwise: if none of their outcomes comes true, the next round is a plain one, at once; otherwise the
            target waits for a proposal then.
    """

    after: State
    trunk: State
    branches: tuple[Branch, ...]
    drafter: str = ""
    draft_time_s: float = 0.0
    plain_otherwise: bool = False

    def find(self, num_accepted: int, token: int) -> Branch | None:
        """The branch for an outcome."""
        outcome = (num_accepted, token)
        return next((each for each in self.branches if (each.num_accepted, each.token) == outcome), None)

    def proposal(self, branch: Branch, base: State) -> Proposal:
        """What `branch` proposes once its outcome has made `base` the committed state."""
        return Proposal.chain(base, branch.tokens, draft_probs=branch.draft_probs, drafter=self.drafter)

    @property
    def num_tokens(self) -> int:
        """Draft tokens of all branches."""
        return sum(len(branch.tokens) for branch in self.branches)


@dataclass(frozen=True, slots=True)
class RunAhead:
    """How far a draft may run ahead of the proposal it has just made.

    Attributes:
        num_speculative_tokens: most draft tokens for one outcome.
        acceptance: chance that a draft token is accepted if the one before it was.
        budget_s: seconds until the early proposals have to be on their way.
        round_s: seconds until the round is over, and word of it may come.
        num_proposed: draft tokens that are being verified, where no proposal is asked for: those of the early proposal
            that came true, none in a plain round.
    """

    num_speculative_tokens: int
    acceptance: float
    budget_s: float = 0.0
    round_s: float = 0.0
    num_proposed: int = 0

    def later(self, seconds: float) -> RunAhead:
        """The same, so many seconds after it was said."""
        return replace(self, budget_s=max(0.0, self.budget_s - seconds), round_s=max(0.0, self.round_s - seconds))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of one proposal (or of an empty one).

    Attributes:
        base: the state that was judged.
        num_proposed: draft tokens that were judged.
        num_accepted: how many of them are in `tokens`.
        tokens: the newly committed tokens: accepted ones, then one recovered or bonus token; cut at a finish.
        finish_reason: set when the sequence ended with the last of `tokens`.
        forward_time_s: seconds the forward took, shared by all sessions in it.
        queue_time_s: seconds between the proposal's arrival and the start of that forward.
        rows: rows of the forward, padding included.
        dropped: why a proposal was not judged ("" when it was); the round went on plain.
    """

    base: State
    num_proposed: int
    num_accepted: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    forward_time_s: float = 0.0
    queue_time_s: float = 0.0
    rows: int = 0
    dropped: str = ""
