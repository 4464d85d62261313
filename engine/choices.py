"""Owns how a draft chooses tokens: many rows at once, each as its request samples, with the rivals of every choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ahead import Choice
from engine.distributions import NotADistribution, sample, truncate_to_sparse
from engine.noise import gumbel_rows
from engine.proposal import SparseProbs
from engine.sampling import SamplingParams

NUM_CANDIDATES = 6
"""Tokens per position among which running ahead looks for the one that comes true."""
SEEDED_RANKS = 256
"""A seeded draft looks for its choice among so many of its likeliest tokens: noise for a vocabulary costs more than a
forward, and the target seldom goes deeper."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of one request.

    Attributes:
        positions: absolute position of the token that follows each.
        top_probs: tokens a sampled distribution is truncated to.
    """

    sampling: SamplingParams
    positions: Sequence[int]
    top_probs: int


class Chooser:
    """Chooses for one draft.

    Args:
        head_ids: int64 [head_vocab], the token each logit is for; None where logits are for ids 0, 1, ….
        vocab_size: ids past it are padding.
        generator: of unseeded sampling; on CPU.
    """

    def __init__(self, head_ids: Tensor | None, vocab_size: int, generator: torch.Generator) -> None:
        self._head_ids, self._vocab_size, self._generator = head_ids, vocab_size, generator

    def choose(self, logits: Tensor, asked: Sequence[Rows]) -> list[list[Choice] | None]:
        """A choice for every row of `logits` [rows, head_vocab], request by request.

        Returns:
            None for a request in whose rows the model yields NaN or +inf.
        """
        if self._head_ids is None:
            logits = logits[:, : self._vocab_size]
        parts = logits.split([len(rows.positions) for rows in asked])
        greedy = [part for part, rows in zip(parts, asked, strict=True) if rows.sampling.greedy]
        best = iter(self._greedy(torch.cat(greedy)) if greedy else ())
        return [
            _sound([next(best) for _ in rows.positions]) if rows.sampling.greedy else self._drawn(part, rows)
            for part, rows in zip(parts, asked, strict=True)
        ]

    def _drawn(self, logits: Tensor, rows: Rows) -> list[Choice] | None:
        try:
            return self._sampled(logits, rows) if rows.sampling.seed is None else self._seeded(logits, rows)
        except NotADistribution:
            return None

    def _greedy(self, logits: Tensor) -> list[Choice]:
        scores = logits.float()
        values, indices = scores.topk(min(NUM_CANDIDATES, scores.shape[-1]))
        probs = (values - scores.logsumexp(-1, keepdim=True)).exp()
        ranked = zip(self._ids(indices), probs.tolist(), strict=True)
        return [Choice(ids[0], row[0], tuple(zip(ids, row, strict=True))) for ids, row in ranked]

    def _seeded(self, logits: Tensor, rows: Rows) -> list[Choice]:
        """By the noise that the target will add (docs/design.md §5): only tokens travel, so nothing need be exact."""
        assert rows.sampling.seed is not None
        indices, probs = truncate_to_sparse(logits, rows.sampling, SEEDED_RANKS)
        ids = indices if self._head_ids is None else self._head_ids[indices]
        noise = gumbel_rows([rows.sampling.seed] * len(ids), rows.positions, ids)
        values, ranks = (probs.double().log() + noise).topk(min(NUM_CANDIDATES, probs.shape[-1]))
        ranked = zip(
            ids.gather(-1, ranks).tolist(), values.softmax(-1).tolist(), probs.gather(-1, ranks).tolist(), strict=True
        )
        return [Choice(tokens[0], own[0], tuple(zip(tokens, row, strict=True))) for tokens, row, own in ranked]

    def _sampled(self, logits: Tensor, rows: Rows) -> list[Choice]:
        indices, probs = truncate_to_sparse(logits, rows.sampling, rows.top_probs)
        drawn = sample(probs, self._generator).tolist()
        ranked = zip(self._ids(indices), probs.tolist(), drawn, strict=True)
        return [_drawn_choice(ids, row, index) for ids, row, index in ranked]

    def _ids(self, indices: Tensor) -> list[list[int]]:
        """Token ids of rows of the head."""
        ids: list[list[int]] = (indices if self._head_ids is None else self._head_ids[indices]).tolist()
        return ids


def _sound(choices: list[Choice]) -> list[Choice] | None:
    """Greedy choices, unless one has no probability: a row with NaN or +inf in it sums to no number."""
    return None if any(math.isnan(choice.prob) for choice in choices) else choices


def _drawn_choice(ids: list[int], probs: list[float], index: int) -> Choice:
    kept = [(token, prob) for token, prob in zip(ids, probs, strict=True) if prob > 0.0]
    sparse = SparseProbs(tuple(token for token, _ in kept), tuple(prob for _, prob in kept))
    return Choice(ids[index], probs[index], tuple(kept[:NUM_CANDIDATES]), sparse)
