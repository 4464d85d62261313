"""Owns the way from logits to a drawn token: bans, temperature, top-k, top-p, min-p, and the draw.

The filters in their usual order: temperature, top-k, top-p over what top-k left, min-p relative to the
likeliest token. All is computed in float64, so that a probability used to accept is the one used to draw.
Among equal logits the lower id ranks first, whatever the device and whatever else is in the batch.

Ids past the tokenizer's vocabulary must never get here: callers slice them away, `logits[:, :vocab_size]`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from engine.sampling import SamplingParams

# Top ranks to try before all are sorted: sorting a vocabulary of 150k costs twenty times as much as the rest.
_RANKS_TO_TRY = (256, 4096)


class NotADistribution(RuntimeError):
    """Logits of which no distribution can be made."""


def greedy_tokens(logits: Tensor, banned: Collection[int] = ()) -> list[int]:
    """The likeliest id of every row, the lower one on a tie.

    Args:
        logits: [rows, vocab], floating point.
        banned: ids that cannot be chosen in any row.

    Raises:
        NotADistribution: a row holds NaN or +inf, or nothing finite is left of it.
    """
    scores = _allowed(logits, banned)
    # On CPU numpy's argmax is ten times faster than torch's. Both return the first of equals, or a NaN.
    best = scores.argmax(-1) if scores.is_cuda else torch.from_numpy(scores.numpy().argmax(-1))
    _require_finite(scores.gather(-1, best.unsqueeze(-1)))
    return best.tolist()


def target_probs(logits: Tensor, sampling: SamplingParams, banned: Collection[int] = ()) -> Tensor:
    """The distribution plain decoding draws from, by row.

    Args:
        logits: [rows, vocab], floating point.
        sampling: shared by all rows; temperature above 0.
        banned: ids that get probability 0 in all rows.

    Returns:
        float64 [rows, vocab], each row sums to 1.

    Raises:
        NotADistribution: a row holds NaN or +inf, or nothing finite is left of it.
    """
    scores, peaks = _scores(logits, banned)
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return _finished(_weights(scores, peaks, sampling), sampling)
    ids, weights = _kept_ranks(scores, peaks, sampling)
    probs = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    return probs.scatter_(-1, ids, _finished(weights, sampling))


def truncate_to_sparse(
    logits: Tensor, sampling: SamplingParams, num_tokens: int, banned: Collection[int] = ()
) -> tuple[Tensor, Tensor]:
    """What a draft draws from: the request's distribution, cut to its top `num_tokens` ids and renormalised.

    The values are float32 so that they survive the wire: a draft that draws from them with `sample` draws
    from exactly what the judge divides by. Ids that a filter dropped stay in place with probability 0.

    Args:
        logits: [rows, vocab], floating point.
        sampling: shared by all rows; temperature above 0.
        num_tokens: ids to keep; clipped to the vocabulary.
        banned: ids that get probability 0 in all rows.

    Returns:
        ids: int64 [rows, num_tokens], likeliest first.
        probs: float32 [rows, num_tokens], sum 1 but for rounding.

    Raises:
        NotADistribution: a row holds NaN or +inf, or nothing finite is left of it.
    """
    scores, peaks = _scores(logits, banned)
    values, ids = _ranked(scores, max(num_tokens, sampling.top_k))
    weights = _nucleus(_weights(values, peaks, sampling), _mass(scores, peaks, sampling), sampling)
    return ids[:, :num_tokens], _finished(weights[:, :num_tokens], sampling).float()


def sample(probs: Tensor, generator: torch.Generator) -> Tensor:
    """Draws one index per row by inverting the cumulative distribution.

    Args:
        probs: [rows, n], not negative; need not sum to 1.
        generator: a CPU generator; one float64 is taken from it per row.

    Returns:
        int64 [rows] on CPU. An index of probability 0 is never drawn.
    """
    # On CPU the sum runs from left to right, hence cannot decrease: the first entry above the threshold has
    # probability above 0, and since a uniform is below 1 there is one.
    cumulative = probs.cpu().to(torch.float64).cumsum(-1)
    uniforms = torch.rand(len(probs), 1, generator=generator, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True).squeeze(-1)


def _scores(logits: Tensor, banned: Collection[int]) -> tuple[Tensor, Tensor]:
    """Allowed logits, float32 [rows, vocab], and each row's highest, [rows, 1]."""
    scores = _allowed(logits, banned)
    peaks = scores.amax(-1, keepdim=True)
    _require_finite(peaks)
    return scores, peaks


def _allowed(logits: Tensor, banned: Collection[int]) -> Tensor:
    """Logits in float32, -inf for the banned ids."""
    scores = logits.detach().float()
    if not banned:
        return scores
    return scores.index_fill(-1, torch.tensor(sorted(banned), device=scores.device), -torch.inf)


def _require_finite(peaks: Tensor) -> None:
    if not peaks.isfinite().all():
        raise NotADistribution("the logits of a token are not finite numbers, or no allowed token is possible")


def _weights(scores: Tensor, peaks: Tensor, sampling: SamplingParams) -> Tensor:
    """Unnormalised probabilities in float64, 1 for the likeliest. No temperature, however low, overflows."""
    return ((scores.to(torch.float64) - peaks) / sampling.temperature).exp_()


def _kept_ranks(scores: Tensor, peaks: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids by rank and their weights after top-k and top-p, [rows, n] each, n enough for all kept ones."""
    vocab_size, mass = scores.shape[-1], _mass(scores, peaks, sampling)
    for count in _RANKS_TO_TRY:
        if sampling.top_k < count < vocab_size:
            values, ids = _ranked(scores, count)
            weights = _nucleus(_weights(values, peaks, sampling), mass, sampling)
            # Which of the ids that tie with the last rank came in is the device's whim, so the result stands
            # only where ranks above that tie decide it.
            settled = (values > values[:, -1:]).sum(-1)
            if ((weights > 0).sum(-1) <= settled).all():
                return ids, weights
    values, ids = _ranked(scores, vocab_size)
    return ids, _nucleus(_weights(values, peaks, sampling), mass, sampling)


def _ranked(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores and their ids, [rows, count] each: falling, lower ids first among equals."""
    if count >= scores.shape[-1]:
        values, ids = scores.sort(descending=True, stable=True)
        return values, ids
    ids = scores.topk(count, sorted=False).indices.sort().values
    values, order = scores.gather(-1, ids).sort(descending=True, stable=True)
    return values, ids.gather(-1, order)


def _mass(scores: Tensor, peaks: Tensor, sampling: SamplingParams) -> Tensor | None:
    """Total weight of the vocabulary, [rows, 1]; None where top-p is off or measures against top-k's mass."""
    if sampling.top_p == 1.0 or sampling.top_k:
        return None
    return _weights(scores, peaks, sampling).sum(-1, keepdim=True)


def _nucleus(weights: Tensor, mass: Tensor | None, sampling: SamplingParams) -> Tensor:
    """Ranked weights [rows, n], zero where top-k or top-p drops a rank; n is at least min(top_k, vocab)."""
    if sampling.top_k:
        weights = weights.clone()
        weights[:, sampling.top_k :] = 0.0
    if sampling.top_p < 1.0:
        mass = weights.sum(-1, keepdim=True) if mass is None else mass
        mass_before = weights.cumsum(-1) - weights
        weights = weights.where(mass_before < sampling.top_p * mass, 0.0)
    return weights


def _finished(weights: Tensor, sampling: SamplingParams) -> Tensor:
    """Weights after min-p, normalised."""
    if sampling.min_p > 0.0:
        weights = weights.where(weights >= sampling.min_p * weights.amax(-1, keepdim=True), 0.0)
    return weights / weights.sum(-1, keepdim=True)
