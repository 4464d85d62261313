"""Owns what runs of many sessions on emulated devices come to: rows of the table, and the bound no system passes. Pure.

Seconds are those of the emulated devices, i.e. this machine's over the dilation, except where CPU time is meant.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.counts import Counts
from bench.emulation import DeviceTimes, Emulation
from bench.modes import PLAIN
from bench.plot import Mark


@dataclass(frozen=True, slots=True)
class Run:
    """All sessions of one mode side by side, once.

    Attributes:
        num_sessions: requests at once.
        mode: its name.
        repeat: those of one number have the same prompts and are compared with each other.
        decoded_tokens: of all sessions, each without its first.
        decode_s: from first token to last, added up over sessions.
        context: tokens a session had on average, prompt included.
        counts: what speculation did, over all sessions.
        wrong_tokens: positions that differ from the reference; None where outputs are sampled and have none.
        forward_s: the target spent in forwards.
        bubble_s: the target had decoding sessions and no forward running.
        forwards: of the target.
        router_ms: median over sessions of what a round spends in router and transport.
        cpu_s: CPU seconds by kind of process, not emulated and not dilated.
        reasons: why sessions did not speculate at their end.
    """

    num_sessions: int
    mode: str
    repeat: int
    decoded_tokens: int
    decode_s: float
    context: float
    counts: Counts
    wrong_tokens: int | None
    forward_s: float
    bubble_s: float
    forwards: int
    router_ms: float
    cpu_s: Mapping[str, float]
    reasons: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together, while all of them decode: what one gets on average, times their number."""
        return self.num_sessions * self.decoded_tokens / self.decode_s


@dataclass(frozen=True, slots=True)
class EmulatedRow:
    """A mode at a number of sessions.

    Attributes:
        tokens_per_s: of all sessions together; median over repeats.
        speedup: tokens_per_s over that of plain decoding in the same repeat; median, least and most over repeats.
        bound: what `speedup` would be if nothing but forwards took time and none were waited for.
        mean_acceptance_length: tokens a round.
        draft_tokens_per_round: K, plain rounds counted with 0.
        hit_rate: share of the rounds with a draft running ahead after which the target had its next proposal already.
        bubble: share of the target's time with decoding sessions in which no forward ran.
        wasted_per_accepted: tokens drafted ahead in vain for each accepted one.
        wrong_tokens: over all repeats; None where outputs are sampled.
        forward_ms: mean length of the target's forwards.
        router_ms: median of a round's share in router and transport.
        cpu_us: microseconds of CPU per session and round, by kind of process; what a process does anyway is included.
        reasons: why sessions did not speculate at their end.
    """

    num_sessions: int
    mode: str
    tokens_per_s: float
    speedup: float
    speedup_min: float
    speedup_max: float
    bound: float
    mean_acceptance_length: float
    draft_tokens_per_round: float
    hit_rate: float
    bubble: float
    wasted_per_accepted: float
    wrong_tokens: int | None
    forward_ms: float
    router_ms: float
    cpu_us: Mapping[str, float]
    acceptance_by_position: tuple[float, ...]
    reasons: tuple[str, ...]

    def mark(self) -> Mark:
        """For pictures."""
        group = f"{self.num_sessions} session{'s' if self.num_sessions > 1 else ''}"
        spread = (self.speedup_min, self.speedup_max)
        return Mark(group, self.mode, self.speedup, spread, self.acceptance_by_position)


def summarize_runs(runs: Sequence[Run], target: DeviceTimes) -> list[EmulatedRow]:
    """A row for each number of sessions and mode, in order of appearance. Each number has runs of plain decoding."""
    cells = dict.fromkeys((run.num_sessions, run.mode) for run in runs)
    return [_row(num_sessions, mode, runs, target) for num_sessions, mode in cells]


def no_overhead_bound(
    target: DeviceTimes, num_sessions: int, tokens_per_round: float, draft_tokens_per_round: float, context: float
) -> float:
    """Most a mode can reach as a multiple of plain decoding: tokens per round over what its verification costs.

    Both forwards have a row for each session; the verifying one has K more of each.

    Args:
        context: mean length of a session in tokens.
    """
    one = target.seconds(num_sessions, 1.0, context)
    return tokens_per_round * one / target.seconds(num_sessions, 1.0 + draft_tokens_per_round, context)


def about(profile: str, emulation: Emulation, temperature: float) -> dict[str, Any]:
    """What was emulated, for JSON."""
    return {"emulated": True, "profile": profile, "temperature": temperature, **emulation.model_dump(mode="json")}


def title(profile: str, emulation: Emulation, temperature: float) -> str:
    """What was emulated, for the head of a table."""
    target_ms, draft_ms = 1e3 * emulation.target.rtt_s, 1e3 * emulation.draft.rtt_s
    shifts = "".join(f", {alpha:g} from token {at}" for at, alpha in sorted(emulation.alpha_changes.items()))
    return (
        f"EMULATED devices, profile {profile}: alpha {emulation.alpha:g}{shifts}, recall {emulation.recall:g}, "
        f"temperature {temperature:g}, RTT to target {target_ms:g} ms and to draft {draft_ms:g} ms, "
        f"dilation {emulation.dilation:g}"
    )


def as_json(rows: Sequence[EmulatedRow], runs: Sequence[Run]) -> dict[str, Any]:
    """Rows, and every run behind them."""
    return {"rows": [asdict(row) for row in rows], "runs": [asdict(run) for run in runs]}


def _row(num_sessions: int, mode: str, runs: Sequence[Run], target: DeviceTimes) -> EmulatedRow:
    beside = [run for run in runs if run.num_sessions == num_sessions]
    mine = [run for run in beside if run.mode == mode]
    plain = {run.repeat: run.tokens_per_s for run in beside if run.mode == PLAIN}
    ratios = [run.tokens_per_s / plain[run.repeat] for run in mine]
    counts = Counts.total(run.counts for run in mine)
    length = sum(run.decoded_tokens for run in mine) / counts.rounds
    forward_s, bubble_s = sum(run.forward_s for run in mine), sum(run.bubble_s for run in mine)
    context = statistics.mean(run.context for run in mine)
    return EmulatedRow(
        num_sessions=num_sessions,
        mode=mode,
        tokens_per_s=statistics.median(run.tokens_per_s for run in mine),
        speedup=statistics.median(ratios),
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        bound=no_overhead_bound(target, num_sessions, length, counts.draft_tokens_per_round, context),
        mean_acceptance_length=length,
        draft_tokens_per_round=counts.draft_tokens_per_round,
        hit_rate=counts.hit_rate,
        bubble=bubble_s / (bubble_s + forward_s),
        wasted_per_accepted=counts.wasted_per_accepted,
        wrong_tokens=_wrong(mine),
        forward_ms=1e3 * forward_s / sum(run.forwards for run in mine),
        router_ms=statistics.median(run.router_ms for run in mine),
        cpu_us={kind: 1e6 * sum(run.cpu_s[kind] for run in mine) / counts.rounds for kind in mine[0].cpu_s},
        acceptance_by_position=counts.acceptance_by_position,
        reasons=tuple(sorted({reason for run in mine for reason in run.reasons})),
    )


def _wrong(runs: Sequence[Run]) -> int | None:
    wrong = [run.wrong_tokens for run in runs if run.wrong_tokens is not None]
    return sum(wrong) if len(wrong) == len(runs) else None
