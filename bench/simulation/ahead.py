"""Owns how far a draft gets that runs ahead: which outcomes of a proposal it drafted for, and how many tokens.

It has the time of the verification, less a reserve, and one forward of its own takes all branches of all sessions a
token further. Wide is a better hit rate, narrow is a larger K; the width that is fastest is taken, as `engine.ahead`
does with what it measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from bench.simulation.speedup import Load, Speed, at_position, best, plain, running_ahead, waiting
from engine.ahead import Choice, Outcome, outcomes
from engine.stubs import Agreement


@dataclass(frozen=True, slots=True)
class Foresight:
    """How well a draft can tell what the target will make of its proposal.

    Attributes:
        recall: chance that the target's choice is among the draft's first `num_ranked` where it is not the first.
        num_ranked: tokens it goes on from at each position, 1 to 7.
        in_time: share of what was drafted for that is at the target in time.
        hit_rate: where it was measured, and is not to be worked out.
    """

    recall: float
    num_ranked: int
    in_time: float = 1.0
    hit_rate: float | None = None


def best_ahead(load: Load, acceptance: Sequence[float], max_draft_tokens: int, foresight: Foresight) -> list[Speed]:
    """For every cap on K, from 1 to `max_draft_tokens`: the fastest way with a draft that may run ahead.

    What there is no time for is not drafted ahead, so from some cap on all are the same. Where running ahead gets too
    little done, waiting for the draft is faster, or plain decoding: then it is that.
    """
    found = [plain(load)]
    for size in range(1, max_draft_tokens + 1):
        options = _options(load, acceptance, size, foresight)
        found.append(best([found[-1], waiting(load, acceptance, size), *options]))
    return found[1:]


def _options(load: Load, acceptance: Sequence[float], size: int, foresight: Foresight) -> list[Speed]:
    """With proposals of `size` tokens: one for each number of branches that there is time for."""
    found = outcomes(_trunk(acceptance, size, foresight), None)
    speeds = []
    for width, forwards in product(range(1, len(found) + 1), (size, size + 1)):
        hits, mean_size = _drafted(found[:width], size, forwards)
        hit_rate = hits * foresight.in_time if foresight.hit_rate is None else foresight.hit_rate
        verify_s = load.target.seconds(load.num_sessions, 1.0 + hit_rate * mean_size)
        needed_s = forwards * load.draft.seconds(load.num_sessions, width)
        if hits > 0.0 and needed_s <= verify_s - load.reserve_s:
            speeds.append(running_ahead(load, acceptance, mean_size, hit_rate))
    return speeds


def _trunk(acceptance: Sequence[float], size: int, foresight: Foresight) -> list[Choice]:
    """A proposal of a draft whose probabilities are right: each rank's is the chance that the target chooses it."""
    agreement = Agreement(recall=foresight.recall, num_ranked=foresight.num_ranked)
    choices = []
    for position in range(size):
        probs = agreement.rank_probs(at_position(acceptance, position))
        choices.append(Choice(0, float(probs[0]), tuple(enumerate(map(float, probs)))))
    return choices


def _drafted(chosen: Sequence[Outcome], size: int, forwards: int) -> tuple[float, float]:
    """Chance that one of the outcomes comes true and has tokens behind it, and how many those are on average.

    What follows the whole proposal is not known before one forward, so those branches are a token shorter.
    """
    lengths = [min(size, forwards - (outcome.token is None)) for outcome in chosen]
    hits = sum(outcome.weight for outcome, length in zip(chosen, lengths, strict=True) if length > 0)
    tokens = sum(outcome.weight * length for outcome, length in zip(chosen, lengths, strict=True) if length > 0)
    return hits, tokens / hits if hits else 0.0
