"""Owns what a round is worth: tokens it brings, time it takes, and so the K that pays best. Pure.

With one acceptance rate α, one session, a draft token that takes `cost` of a plain step, and nothing else that takes
time, the speed as a multiple of plain decoding is (Leviathan et al. 2023, arXiv 2211.17192)

    S = ((1 − α^(K+1)) / (1 − α)) / (1 + K · cost).

The rest generalises each term: acceptance by position, a verification that takes longer with its rows, batches, and
rounds that need not wait for their draft. K may be a mean (4.3, say) and is then taken between its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.simulation.roofline import Device

Misses = Literal["", "wait", "plain"]


def closed_form(alpha: float, num_speculative_tokens: float, cost: float) -> float:
    """The formula above; `cost` is that of a draft token, as a share of a plain step."""
    length = num_speculative_tokens + 1.0
    if alpha < 1.0:
        length = (1.0 - alpha**length) / (1.0 - alpha)
    return length / (1.0 + num_speculative_tokens * cost)


def at_position(acceptance: Sequence[float], position: int) -> float:
    """Chance that draft token `position`, from 0, is accepted if those before it were; the last number holds on."""
    return acceptance[min(position, len(acceptance) - 1)]


def tokens_per_round(acceptance: Sequence[float], num_speculative_tokens: float) -> float:
    """Mean acceptance length, recovered or bonus token included: 1 + a1 + a1·a2 + …"""
    total, reached = 1.0, 1.0
    for position in range(math.ceil(num_speculative_tokens)):
        reached *= at_position(acceptance, position)
        total += reached * min(1.0, num_speculative_tokens - position)
    return total


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that decode side by side, and what they decode on.

    Attributes:
        wait_s: of a round that waits for the draft, what is neither drafting nor verifying.
        gap_s: between two forwards of the target.
        reserve_s: of a verification, what a draft that runs ahead cannot use.
    """

    target: Device
    draft: Device
    num_sessions: int
    wait_s: float = 0.0
    gap_s: float = 0.0
    reserve_s: float = 0.0

    def step_s(self, num_sessions: float, rows_each: float) -> float:
        """A forward of the target and the gap behind it."""
        return self.target.seconds(num_sessions, rows_each) + self.gap_s

    @property
    def plain_s(self) -> float:
        """A step of plain decoding: a token for every session."""
        return self.step_s(self.num_sessions, 1.0)


@dataclass(frozen=True, slots=True)
class Speed:
    """What a way of decoding comes to.

    Attributes:
        num_speculative_tokens: K of the rounds that have a proposal; 0 for plain decoding.
        tokens_per_round: mean over all rounds.
        round_s: mean over all rounds of one session.
        speedup: × plain decoding.
        tokens_per_s: of all sessions together.
        hit_rate: share of rounds whose proposal was there when the one before was over.
        misses: what the other rounds do, where the draft runs ahead.
    """

    num_speculative_tokens: float
    tokens_per_round: float
    round_s: float
    speedup: float
    tokens_per_s: float
    hit_rate: float = 0.0
    misses: Misses = ""


def plain(load: Load) -> Speed:
    """No speculation."""
    return _speed(load, 0.0, 1.0, load.plain_s)


def waiting(load: Load, acceptance: Sequence[float], num_speculative_tokens: float) -> Speed:
    """Every round waits for its draft."""
    tokens = tokens_per_round(acceptance, num_speculative_tokens)
    return _speed(load, num_speculative_tokens, tokens, _round_s(load, num_speculative_tokens, misses=1.0))


def running_ahead(load: Load, acceptance: Sequence[float], num_speculative_tokens: float, hit_rate: float) -> Speed:
    """A hit costs no time of the draft; a miss waits for it or goes on plainly, whichever brings more."""
    tokens, misses = tokens_per_round(acceptance, num_speculative_tokens), 1.0 - hit_rate
    wait_s = _round_s(load, num_speculative_tokens, misses)
    rows_each = 1.0 + hit_rate * num_speculative_tokens
    plain_s = load.step_s(load.num_sessions, rows_each)
    return max(
        _speed(load, num_speculative_tokens, tokens, wait_s, hit_rate, "wait"),
        _speed(load, num_speculative_tokens, hit_rate * tokens + misses, plain_s, hit_rate, "plain"),
        key=lambda speed: speed.speedup,
    )


def best(speeds: Sequence[Speed]) -> Speed:
    """The fastest; of equals the first."""
    return max(speeds, key=lambda speed: speed.speedup)


def _speed(load: Load, size: float, tokens: float, round_s: float, hit_rate: float = 0.0, misses: Misses = "") -> Speed:
    per_s = tokens / round_s
    return Speed(size, tokens, round_s, per_s * load.plain_s, load.num_sessions * per_s, hit_rate, misses)


def _round_s(load: Load, size: float, misses: float) -> float:
    """Mean time of a session's round where the share `misses` of the rounds waits for the draft.

    One session waits for as long as the draft takes. Of many, whoever is ready has a forward at once, and who was not
    waits until it is over: so the sessions fall into groups, one of which is verified while the others draft, and a
    wait takes whole forwards. `passed` is how many; the forwards hold so many sessions less.
    """
    passed = 0
    while True:
        beside = load.num_sessions / (1.0 + misses * passed)
        forward_s = load.step_s(beside, size + 1.0)
        delay_s = load.wait_s + size * load.draft.seconds(max(1.0, beside * misses), 1.0)
        if passed and passed * forward_s >= delay_s:
            return forward_s * (1.0 + misses * passed)
        if passed + 1 >= load.num_sessions:  # nobody else has a forward by then
            return forward_s + misses * delay_s
        passed += 1
