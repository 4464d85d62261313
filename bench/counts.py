"""Owns the counts of speculation that come with every reply, added up over requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

from rpc.pb import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one request or many; by position 0 is the first draft token of a proposal.

    Attributes:
        rounds: target forwards that requests took part in, each request's counted for itself.
        draft_tokens: those that were judged.
        accepted_tokens: those of them that were accepted.
        rounds_ahead: rounds behind which a draft ran ahead.
        early_hits: those after which the target had the next proposal already.
        wasted_draft_tokens: drafted ahead, for outcomes that did not come true.
        dropped_proposals: late, stale or malformed, and never judged.
        drafted_per_position: judged draft tokens.
        accepted_per_position: accepted ones.
    """

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    rounds_ahead: int = 0
    early_hits: int = 0
    wasted_draft_tokens: int = 0
    dropped_proposals: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()

    @classmethod
    def of(cls, stats: pb.SpeculationStats) -> Self:
        return cls(
            rounds=stats.rounds,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            rounds_ahead=stats.rounds_ahead,
            early_hits=stats.early_hits,
            wasted_draft_tokens=stats.wasted_draft_tokens,
            dropped_proposals=stats.dropped_proposals,
            drafted_per_position=tuple(stats.drafted_per_position),
            accepted_per_position=tuple(stats.accepted_per_position),
        )

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Self:
        """Of all of them together."""
        each = list(counts)
        return cls(
            rounds=sum(one.rounds for one in each),
            draft_tokens=sum(one.draft_tokens for one in each),
            accepted_tokens=sum(one.accepted_tokens for one in each),
            rounds_ahead=sum(one.rounds_ahead for one in each),
            early_hits=sum(one.early_hits for one in each),
            wasted_draft_tokens=sum(one.wasted_draft_tokens for one in each),
            dropped_proposals=sum(one.dropped_proposals for one in each),
            drafted_per_position=_by_position(one.drafted_per_position for one in each),
            accepted_per_position=_by_position(one.accepted_per_position for one in each),
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return _share(self.accepted_tokens, self.draft_tokens)

    @property
    def hit_rate(self) -> float:
        """Of the rounds behind which a draft ran ahead; 0 when none did."""
        return _share(self.early_hits, self.rounds_ahead)

    @property
    def draft_tokens_per_round(self) -> float:
        """K, plain rounds counted with 0."""
        return _share(self.draft_tokens, self.rounds)

    @property
    def wasted_per_accepted(self) -> float:
        """Draft tokens drafted ahead in vain for each accepted one."""
        return _share(self.wasted_draft_tokens, self.accepted_tokens)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """How likely the tokens up to and with each position were all accepted, where there was one."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return tuple(_share(accepted, drafted) for accepted, drafted in pairs)


def _by_position(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
