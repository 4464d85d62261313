"""Owns the process that makes speculative sampling lossless, drawn many times over distributions that are known.

A token x of the draft is accepted with probability min(1, target_probs[x] / draft_probs[x]). The first one that is not
is replaced by one recovered from normalize(max(0, target_probs − draft_probs)) over the whole vocabulary; behind a
proposal that was accepted whole a bonus token is drawn from target_probs. (Leviathan et al. 2023, arXiv 2211.17192;
Chen et al. 2023, arXiv 2302.01318.) `engine.judge` does the same on logits, one session at a time.

The next token depends on the one before it: target_probs is float64 [vocab, vocab], a row for each token that may come
before. That is enough for a fault in any step to show in the tokens that follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.simulation.speedup import at_position

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NUM_LIKELY = 4


class Process:
    """The two draws that follow acceptance, each for many chains at once."""

    def recovered(self, target_probs: Floats, draft_probs: Floats, rejected: Ints, rng: np.random.Generator) -> Ints:
        """In place of each rejected token.

        Args:
            target_probs: [n, vocab].
            draft_probs: what the rejected tokens were drawn from, [n, vocab].
            rejected: the tokens, [n]; the exact process has no use for them.
            rng: where chance comes from.
        """
        return draw(np.maximum(target_probs - draft_probs, 0.0), rng)

    def bonus(self, target_probs: Floats, rng: np.random.Generator) -> Ints:
        """Behind proposals that were accepted whole; target_probs is [n, vocab]."""
        return draw(target_probs, rng)


@dataclass(frozen=True, slots=True)
class Rounds:
    """What came of many chains.

    Attributes:
        lengths: tokens of each round, int64 [rounds, chains].
        transitions: how often each token followed each other one, int64 [vocab, vocab].
    """

    lengths: Ints
    transitions: Ints


def draw(weights: Floats, rng: np.random.Generator) -> Ints:
    """A token for each row of weights, [n, vocab], which need not sum to 1 but have to be positive somewhere."""
    below = weights.cumsum(-1)
    # Sides are taken such that a token of weight 0 is never drawn: 0 <= u < 1, and the first sum above u · total.
    tokens: Ints = (below <= rng.random((len(weights), 1)) * below[:, -1:]).sum(-1)
    return tokens


def run(
    target_probs: Floats,
    draft_probs: Floats,
    shape: tuple[int, int],
    rng: np.random.Generator,
    process: Process | None = None,
) -> Rounds:
    """Speculative sampling of many chains, side by side.

    Args:
        target_probs: [vocab, vocab]; each row sums to 1.
        draft_probs: [K, vocab, vocab]: of each draft token by its position and by the token before it.
        shape: rounds, and chains.
        rng: where chance comes from.
        process: another one than the exact.
    """
    process = process or Process()
    num_rounds, num_chains = shape
    lengths = np.zeros(shape, dtype=np.int64)
    transitions = np.zeros_like(target_probs, dtype=np.int64)
    last = np.zeros(num_chains, dtype=np.int64)
    for index in range(num_rounds):
        lengths[index] = _round(target_probs, draft_probs, last, transitions, (process, rng))
    return Rounds(lengths, transitions)


def _round(
    target_probs: Floats,
    draft_probs: Floats,
    last: Ints,
    transitions: Ints,
    chance: tuple[Process, np.random.Generator],
) -> Ints:
    """One round of all chains: updates `last` and `transitions`, returns the lengths, int64 [chains]."""
    process, rng = chance
    lengths = np.ones(len(last), dtype=np.int64)
    going = np.arange(len(last))  # chains of which all tokens so far were accepted

    def commit(chains: Ints, tokens: Ints) -> None:
        np.add.at(transitions, (last[chains], tokens), 1)
        last[chains] = tokens

    for by_token in draft_probs:
        target, draft = target_probs[last[going]], by_token[last[going]]
        tokens = draw(draft, rng)
        rows = np.arange(len(going))
        accepted = rng.random(len(going)) * draft[rows, tokens] < target[rows, tokens]
        if not accepted.all():
            rejected = ~accepted
            commit(going[rejected], process.recovered(target[rejected], draft[rejected], tokens[rejected], rng))
        going = going[accepted]
        commit(going, tokens[accepted])
        lengths[going] += 1
    commit(going, process.bonus(target_probs[last[going]], rng))
    return lengths


def distributions(acceptance: Sequence[float], num_speculative_tokens: int) -> tuple[Floats, Floats]:
    """A target, [vocab, vocab], and a draft, [K, vocab, vocab], of exactly this acceptance at each position.

    The target is the same after every token. The draft is the target with the probability of acceptance, and otherwise
    one of as many tokens again that the target never chooses: the sum of min(target_probs, draft_probs) is acceptance.
    """
    likely = np.arange(_NUM_LIKELY, 0, -1) / np.arange(1, _NUM_LIKELY + 1).sum()
    nothing = np.zeros(_NUM_LIKELY)
    target = np.concatenate([likely, nothing])
    wrong = np.concatenate([nothing, likely])
    shares = [at_position(acceptance, position) for position in range(num_speculative_tokens)]
    rows = np.array([share * target + (1.0 - share) * wrong for share in shares]).reshape(-1, 1, 2 * _NUM_LIKELY)
    return np.tile(target, (2 * _NUM_LIKELY, 1)), np.tile(rows, (1, 2 * _NUM_LIKELY, 1))


@dataclass(frozen=True, slots=True)
class Replies:
    """Tokens per round of whole replies: how much of a difference is luck.

    Attributes:
        mean: over all rounds.
        low: of one reply in ten, at most.
        high: of one reply in ten, at least.
    """

    num_replies: int
    num_tokens: int
    mean: float
    low: float
    high: float


def replies(
    acceptance: Sequence[float], num_speculative_tokens: int, rng: np.random.Generator, num_tokens: int = 256
) -> Replies:
    """Draws a thousand replies of `num_tokens` tokens."""
    num_replies = 1000
    target_probs, draft_probs = distributions(acceptance, num_speculative_tokens)
    lengths = run(target_probs, draft_probs, (num_tokens, num_replies), rng).lengths  # a token a round at least
    rounds = (lengths.cumsum(0) < num_tokens).sum(0) + 1
    per_round = num_tokens / rounds
    low, high = np.quantile(per_round, (0.1, 0.9))
    return Replies(num_replies, num_tokens, float(lengths.mean()), float(low), float(high))
