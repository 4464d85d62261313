"""Owns the comparison of speculation with plain decoding: what is measured, and how it is summed up. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.counts import Counts
from bench.modes import PLAIN, fixed_k
from bench.plot import Mark

EVERY_KIND = "all"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request under one mode.

    Attributes:
        prompt_id: which prompt.
        kind: its class.
        mode: its name.
        token_ids: the output.
        decode_s: seconds from its first token to its last.
        counts: what speculation did.
        router_ms: median over its rounds of what was spent neither in target nor draft: router and transport.
    """

    prompt_id: str
    kind: str
    mode: str
    token_ids: tuple[int, ...]
    decode_s: float
    counts: Counts
    router_ms: float = 0.0

    @property
    def decoded(self) -> int:
        """Tokens that `decode_s` was spent on."""
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Row:
    """A mode on a class of prompts.

    Attributes:
        tokens_per_s: all decoded tokens over all decode seconds.
        speedup: tokens_per_s over that of plain decoding.
        speedup_median: over prompts, with its 10th and 90th percentile.
        acceptance_rate: accepted over drafted tokens.
        mean_acceptance_length: tokens a round.
        hit_rate: share of the rounds with a draft running ahead after which the target had its next proposal already.
        acceptance_by_position: of draft tokens, with all before them.
        router_ms: median over prompts of the router's and the transport's share of a round.
        differing_tokens: positions at which outputs differ from plain ones.
    """

    kind: str
    mode: str
    num_prompts: int
    tokens_per_s: float
    speedup: float
    speedup_median: float
    speedup_p10: float
    speedup_p90: float
    acceptance_rate: float
    mean_acceptance_length: float
    hit_rate: float
    acceptance_by_position: tuple[float, ...]
    router_ms: float
    differing_tokens: int

    def mark(self) -> Mark:
        """For pictures."""
        spread = (self.speedup_p10, self.speedup_p90)
        return Mark(self.kind, self.mode, self.speedup, spread, self.acceptance_by_position)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def summarize(samples: Sequence[Sample]) -> list[Row]:
    """A row for each class and mode, classes in order of appearance, then all of them together."""
    kinds = list(dict.fromkeys(sample.kind for sample in samples))
    modes = list(dict.fromkeys(sample.mode for sample in samples))
    groups = [*kinds, EVERY_KIND] if len(kinds) > 1 else kinds
    return [_row(kind, mode, samples) for kind in groups for mode in modes]


def differing(tokens: Sequence[int], plain: Sequence[int]) -> int:
    """Positions at which two outputs differ, missing ones included."""
    common = sum(1 for mine, theirs in zip(tokens, plain, strict=False) if mine == theirs)
    return max(len(tokens), len(plain)) - common


def short_of_k(samples: Sequence[Sample]) -> list[str]:
    """A sentence for each mode of fixed K that the server never let draft so far."""
    longest: dict[str, int] = {}
    for sample in samples:
        reached = len(sample.counts.drafted_per_position)
        longest[sample.mode] = max(longest.get(sample.mode, 0), reached)
    return [
        f"{mode}: no round had more than {reached} draft tokens"
        for mode, reached in longest.items()
        if reached < (fixed_k(mode) or 0)
    ]


def _row(kind: str, mode: str, samples: Sequence[Sample]) -> Row:
    chosen = [sample for sample in samples if kind in (sample.kind, EVERY_KIND)]
    mine = [sample for sample in chosen if sample.mode == mode]
    plain = {sample.prompt_id: sample for sample in chosen if sample.mode == PLAIN}
    ratios = sorted(_ratio(sample, plain[sample.prompt_id]) for sample in mine)
    counts = Counts.total(sample.counts for sample in mine)
    return Row(
        kind=kind,
        mode=mode,
        num_prompts=len(mine),
        tokens_per_s=_speed(mine),
        speedup=_speed(mine) / _speed(plain.values()),
        speedup_median=statistics.median(ratios),
        speedup_p10=_percentile(ratios, 0.1),
        speedup_p90=_percentile(ratios, 0.9),
        acceptance_rate=counts.acceptance_rate,
        mean_acceptance_length=sum(sample.decoded for sample in mine) / counts.rounds if counts.rounds else 0.0,
        hit_rate=counts.hit_rate,
        acceptance_by_position=counts.acceptance_by_position,
        router_ms=statistics.median(sample.router_ms for sample in mine),
        differing_tokens=sum(differing(s.token_ids, plain[s.prompt_id].token_ids) for s in mine),
    )


def _speed(samples: Iterable[Sample]) -> float:
    decoded, seconds = 0, 0.0
    for sample in samples:
        decoded, seconds = decoded + sample.decoded, seconds + sample.decode_s
    return decoded / seconds if seconds else 0.0


def _ratio(sample: Sample, plain: Sample) -> float:
    speed = _speed([plain])
    return _speed([sample]) / speed if speed else 1.0


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def as_json(samples: Sequence[Sample], about: Mapping[str, Any]) -> dict[str, Any]:
    """What `outrider bench --json` prints: the rows, every sample, and what was measured."""
    each = [
        {"id": s.prompt_id, "class": s.kind, "mode": s.mode, "tokens": len(s.token_ids), "decode_s": s.decode_s,
         "router_ms": s.router_ms, **asdict(s.counts)}
        for s in samples
    ]  # fmt: skip
    return {**about, "rows": [row.as_dict() for row in summarize(samples)], "samples": each}
