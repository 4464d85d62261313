"""Owns the stubs that emulated devices have for models: logits as a function of the identity of the prefix alone.

EmulatedTarget says how likely the tokens that may follow a prefix are, EmulatedDraft how well a draft knows it. Neither
has an end of sequence: a request ends by its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

NUM_RANKED = 8
"""Tokens that may follow a prefix; all others are next to impossible."""
MODEL_TEMPERATURE = 0.8
"""The temperature at which the likeliest token has the probability that a target is made with."""

_STEP, _DRAFT_STREAM = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT, _UNIFORM_SHIFT = np.uint64(31), np.uint64(11)
_LOWEST_LOGIT = -30.0
_FALL = 0.5  # a rank's probability over that of the rank before it
_MOST_OF_FIRST = 0.9  # the second rank's probability over the first's, at most

Prefixes = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


def _mixed(values: Prefixes) -> Prefixes:
    """splitmix64's output function (Steele, Lea and Flood 2014), in wrapping arithmetic."""
    for shift, factor in _MIX:
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> _LAST_SHIFT)


class Stub(Protocol):
    """The model of an emulated device."""

    def logits(self, prefixes: Prefixes, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """What follows each prefix.

        Args:
            prefixes: identities, [n].
            lengths: of the prefixes in tokens, [n], at least 1.

        Returns:
            float32 [n, vocab].
        """
        ...


@dataclass(frozen=True)
class EmulatedTarget:
    """The model whose output is served: after each prefix NUM_RANKED tokens, drawn by its identity, in a fixed ranking.

    Attributes:
        vocab_size: columns of the logits.
        num_words: tokens are drawn from ids 0 to num_words - 1; the others, special ones among them, are impossible.
        top_probability: of the first rank at MODEL_TEMPERATURE; what is left falls by half from rank to rank.
    """

    vocab_size: int
    num_words: int
    top_probability: float

    @property
    def rank_logits(self) -> Floats:
        """Logits of the ranks, [NUM_RANKED]."""
        falling = _FALL ** np.arange(NUM_RANKED - 1)
        others = (1.0 - self.top_probability) * falling / falling.sum()
        logits: Floats = MODEL_TEMPERATURE * np.log(np.array([self.top_probability, *others]))
        return logits

    def ranked(self, prefixes: Prefixes) -> npt.NDArray[np.int64]:
        """The likely tokens after each prefix, likeliest first: int64 [n, NUM_RANKED], distinct in a row."""
        draws = _mixed(prefixes[:, None] + np.arange(1, NUM_RANKED + 1, dtype=np.uint64) * _STEP)
        steps = draws % np.uint64(self.num_words // NUM_RANKED) + np.uint64(1)  # together less than once around
        steps[:, 0] = draws[:, 0] % np.uint64(self.num_words)
        return (steps.cumsum(-1) % np.uint64(self.num_words)).astype(np.int64)

    def logits(self, prefixes: Prefixes, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """As Stub.logits; the lengths do not matter."""
        logits = np.full((len(prefixes), self.vocab_size), _LOWEST_LOGIT, dtype=np.float32)
        logits[:, self.num_words :] = -np.inf
        np.put_along_axis(logits, self.ranked(prefixes), self.rank_logits.astype(np.float32)[None], -1)
        return logits


@dataclass(frozen=True)
class Agreement:
    """How well a draft knows its target.

    Attributes:
        alpha: probability that the draft's first token is the target's: (from length of the prefix, alpha), rising.
        recall: probability that it is among the first num_ranked where it is not the first: what a draft can know of
            the token that ends a proposal. It is lowered where a ranking that falls could not give it: with a small
            alpha.
        num_ranked: tokens the draft ranks, 1 to NUM_RANKED - 1.
    """

    alpha: tuple[tuple[int, float], ...] = ((0, 0.8),)
    recall: float = 0.95
    num_ranked: int = 4

    def rank_probs(self, alpha: float) -> Floats:
        """Probability of each rank to hold the target's first token, [num_ranked]; falling, and 1 or less in sum."""
        falling = _FALL ** np.arange(self.num_ranked - 1)
        second = self.recall * (1.0 - alpha) / falling.sum() if len(falling) else 0.0
        return np.array([alpha, *(min(second, _MOST_OF_FIRST * alpha) * falling)])


class EmulatedDraft:
    """A draft that does not know when it is wrong.

    Its ranking is the target's with the first token moved back to a rank drawn by the prefix, or left out. The logits
    of the ranks are always the same, the logarithms of the probabilities of those ranks: so the softmax of its logits
    is calibrated, and says nothing of whether it is right this time.
    """

    def __init__(self, target: EmulatedTarget, agreement: Agreement) -> None:
        self._target, self.agreement = target, agreement
        self._starts = np.array([start for start, _ in agreement.alpha], dtype=np.int64)
        self._probs = np.stack([agreement.rank_probs(alpha) for _, alpha in agreement.alpha])  # [stages, num_ranked]
        rest = (1.0 - self._probs.sum(-1, keepdims=True)) / (target.num_words - agreement.num_ranked)
        lowest = np.exp(_LOWEST_LOGIT)
        self._rank_logits = np.log(self._probs.clip(lowest)).astype(np.float32)
        self._rest_logits = np.log(rest.clip(lowest)).astype(np.float32)

    def _stages(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which alpha holds for each prefix."""
        return np.searchsorted(self._starts, lengths, side="right") - 1

    def true_ranks(self, prefixes: Prefixes, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The draft's rank of the target's first token, from 0; num_ranked where it is left out. int64 [n]."""
        uniforms = (_mixed(prefixes ^ _DRAFT_STREAM) >> _UNIFORM_SHIFT) * 2.0**-53
        passed: npt.NDArray[np.int64] = (uniforms[:, None] >= self._probs.cumsum(-1)[self._stages(lengths)]).sum(-1)
        return passed

    def logits(self, prefixes: Prefixes, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """As Stub.logits."""
        stages, true_ranks = self._stages(lengths), self.true_ranks(prefixes, lengths)[:, None]
        places = np.arange(self.agreement.num_ranked)[None]
        order = np.where(places < true_ranks, places + 1, np.where(places == true_ranks, 0, places))
        ids = np.take_along_axis(self._target.ranked(prefixes), order, -1)
        logits = np.repeat(self._rest_logits[stages], self._target.vocab_size, axis=-1)
        logits[:, self._target.num_words :] = -np.inf
        np.put_along_axis(logits, ids, self._rank_logits[stages], -1)
        return logits

    def acceptance(self, temperature: float, length: int = 1) -> float:
        """Chance that a token this draft samples is accepted: the mean of sum(min(target_probs, draft_probs)).

        At temperature 0 it is alpha. Above, the draft is surer of its first token than the target is of its own, since
        it is calibrated for temperature 0; so it is less, and the less the flatter the target: with alpha 0.8 at
        temperature 0.8 it is 0.68, 0.75 and 0.78 for a top_probability of 0.7, 0.8 and 0.85.
        """
        (stage,) = self._stages(np.array([length]))
        num_ranked, rank_probs = self.agreement.num_ranked, self._probs[stage]
        if temperature == 0.0:
            return float(rank_probs[0])
        target_probs = _softmax(self._target.rank_logits, temperature)
        num_rest = self._target.num_words - num_ranked
        draft_logits = np.concatenate([self._rank_logits[stage], self._rest_logits[stage].repeat(num_rest)])
        ranked, rest = np.split(_softmax(draft_logits, temperature), [num_ranked])
        total = 0.0
        for true_rank, chance in enumerate([*rank_probs, 1.0 - rank_probs.sum()]):
            by_rank = np.insert(target_probs[1:], true_rank, target_probs[0])
            if true_rank == num_ranked:  # left out
                by_rank = np.append(target_probs[1:], target_probs[0])
            common = np.minimum(by_rank, np.append(ranked, rest)[:NUM_RANKED])
            total += float(chance * common.sum())
        return total


def _softmax(logits: npt.NDArray[np.floating], temperature: float) -> Floats:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    probs: Floats = weights / weights.sum()
    return probs
