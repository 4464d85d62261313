"""Owns the figures of the view: what the change between two samples says of requests, speculation and engines. Pure.

A figure is None where nothing happened that it could be taken from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deployments.top.samples import ROUTER, Change

DONE = frozenset({"stop", "length", "cancelled"})
"""Outcomes of requests that were neither refused nor failed."""
DID = "none"
"""The reason of a round that speculated as it was asked to."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """One drafter.

    Attributes:
        proposals_per_s: judged.
        acceptance: accepted over drafted tokens.
        num_speculative_tokens: mean K of its proposals.
        acceptance_length: mean tokens of a round with a proposal, recovered or bonus token included.
    """

    name: str
    proposals_per_s: float
    acceptance: float | None
    num_speculative_tokens: float | None
    acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """One router, under the first characters of Ray's id of its process."""

    name: str
    running: int
    waiting: int
    tokens_per_s: float
    rounds_per_s: float
    itl_p50_s: float | None
    itl_p95_s: float | None


@dataclass(frozen=True, slots=True)
class Engine:
    """One replica of target or draft.

    Attributes:
        address: host:port.
        kv_usage: share of KV blocks that sessions hold.
        bubble: of the time with sessions to decode, the share without a forward; targets only, as all below.
        busy: share of the time in forwards.
        forward_s: mean.
    """

    kind: str
    address: str
    sessions: int
    kv_usage: float | None
    blocks_free: int | None
    bubble: float | None = None
    busy: float | None = None
    forwards_per_s: float | None = None
    forward_s: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything the view shows.

    Attributes:
        seconds: that rates are taken over.
        finished_per_s: requests that ended well; failed_per_s: those refused or failed.
        num_speculative_tokens: mean K of all rounds, plain ones counted with 0.
        reasons: share of the rounds by why they did not speculate, most first; without those that did.
        hit_rate: of the rounds behind which a draft ran ahead.
        wasted_per_accepted: tokens drafted ahead in vain for each accepted one.
        dropped_per_s: proposals not judged, by why.
    """

    seconds: float
    running: int
    waiting: int
    finished_per_s: float
    failed_per_s: float
    tokens_per_s: float
    itl_p50_s: float | None
    itl_p95_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    rounds_per_s: float
    num_speculative_tokens: float | None
    drafters: tuple[Drafter, ...]
    reasons: Mapping[str, float]
    bubble: float | None
    hit_rate: float | None
    wasted_per_accepted: float | None
    dropped_per_s: Mapping[str, float]
    failovers: int
    routers: tuple[RouterFigures, ...]
    engines: tuple[Engine, ...]

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints, times in seconds."""
        return asdict(self)


def figures_of(change: Change) -> Figures:
    """What happened between the two samples, and what is the case at the later one."""
    seconds, rounds = change.seconds, change.increase("rounds_total")
    itl, ttft = "inter_token_latency_seconds", "time_to_first_token_seconds"
    ended = change.increases("requests_total", ("outcome",))
    well = sum(count for (outcome,), count in ended.items() if outcome in DONE)
    accepted = change.increase("spec_decode_num_accepted_tokens_total")
    routers = _routers(change)
    return Figures(
        seconds=seconds,
        running=sum(router.running for router in routers),
        waiting=sum(router.waiting for router in routers),
        finished_per_s=well / seconds,
        failed_per_s=(sum(ended.values()) - well) / seconds,
        tokens_per_s=change.increase("generation_tokens_total") / seconds,
        itl_p50_s=change.quantile(itl, 0.50),
        itl_p95_s=change.quantile(itl, 0.95),
        ttft_p50_s=change.quantile(ttft, 0.50),
        ttft_p95_s=change.quantile(ttft, 0.95),
        rounds_per_s=rounds / seconds,
        num_speculative_tokens=_ratio(change.increase("spec_decode_num_draft_tokens_total"), rounds),
        drafters=_drafters(change),
        reasons=_reasons(change),
        bubble=_bubble(change),
        hit_rate=_ratio(
            change.increase("spec_decode_num_early_hits_total"), change.increase("spec_decode_num_rounds_ahead_total")
        ),
        wasted_per_accepted=_ratio(change.increase("spec_decode_num_wasted_draft_tokens_total"), accepted),
        dropped_per_s=_by_label(change, "spec_decode_num_dropped_total", "why"),
        failovers=round(change.increase("failovers_total")),
        routers=routers,
        engines=_engines(change),
    )


def _drafters(change: Change) -> tuple[Drafter, ...]:
    counted = "spec_decode_num"
    found = []
    for (name,), drafts in sorted(change.increases(f"{counted}_drafts_total", ("drafter",)).items()):
        drafted = change.increase(f"{counted}_draft_tokens_total", drafter=name)
        accepted = change.increase(f"{counted}_accepted_tokens_total", drafter=name)
        length = 1.0 + accepted / drafts if drafts else None
        rate = _ratio(min(accepted, drafted), drafted)
        found.append(Drafter(name, drafts / change.seconds, rate, _ratio(drafted, drafts), length))
    return tuple(found)


def _reasons(change: Change) -> dict[str, float]:
    by_reason = {reason: count for (reason,), count in change.increases("rounds_total", ("reason",)).items()}
    rounds = sum(by_reason.values())
    plain = {reason: count / rounds for reason, count in by_reason.items() if count and reason != DID}
    return dict(sorted(plain.items(), key=lambda each: -each[1]))


def _by_label(change: Change, name: str, label: str) -> dict[str, float]:
    grown = change.increases(name, (label,))
    return {value: count / change.seconds for (value,), count in sorted(grown.items()) if count}


def _routers(change: Change) -> tuple[RouterFigures, ...]:
    """Every router that says now what it works on; one that is gone is in the sums, but not listed."""
    sample = change.after
    running, waiting = (sample.gauge(f"num_requests_{state}", ROUTER) for state in ("running", "waiting"))
    itl = "inter_token_latency_seconds"
    return tuple(
        RouterFigures(
            name=name[:8],
            running=round(running[name]),
            waiting=round(waiting.get(name, 0.0)),
            tokens_per_s=change.increase("generation_tokens_total", router=name) / change.seconds,
            rounds_per_s=change.increase("rounds_total", router=name) / change.seconds,
            itl_p50_s=change.quantile(itl, 0.50, router=name),
            itl_p95_s=change.quantile(itl, 0.95, router=name),
        )
        for name in sorted(running)
    )


def _engines(change: Change) -> tuple[Engine, ...]:
    """Targets first; within a kind those with most sessions."""
    sample, found = change.after, []
    for kind in ("target", "draft"):
        usage = sample.gauge("kv_cache_usage_perc", "replica", kind=kind)
        free = sample.gauge("kv_blocks_free", "replica", kind=kind)
        sessions = sample.gauge("engine_sessions", "replica", kind=kind)
        for address in sorted(sessions, key=lambda each: (-sessions[each], each)):
            blocks = free.get(address)
            about = (round(sessions[address]), usage.get(address), None if blocks is None else round(blocks))
            times = _target_times(change, address) if kind == "target" else ()
            found.append(Engine(kind, address, *about, *times))
    return tuple(found)


def _target_times(change: Change, address: str) -> tuple[float | None, ...]:
    """Bubble, busy share, forwards a second, seconds of a forward, as the router says that saw most of it.

    Every router counts what it sees of every target, so their counts are not to be added up.
    """
    busy = change.increases("target_busy_seconds_total", (ROUTER,), target=address)
    forwards = change.increases("target_forwards_total", (ROUTER,), target=address)
    busy_s, number = max(busy.values(), default=0.0), max(forwards.values(), default=0.0)
    share = min(busy_s / change.seconds, 1.0)  # a router looks every two seconds: it may see a little more
    return _bubble(change, target=address), share, number / change.seconds, _ratio(busy_s, number)


def _bubble(change: Change, **where: str) -> float | None:
    idle = change.increase("target_bubble_seconds_total", **where)
    return _ratio(idle, idle + change.increase("target_busy_seconds_total", **where))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None
