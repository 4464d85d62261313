"""Owns the Prometheus metrics of a router: what its sessions and rounds tell an Observer, as Ray metrics.

docs/metrics.md has what each means. Where vLLM has the same measure, it has vLLM's name behind our prefix.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from cluster.discovery import Endpoint
from engine.info import EngineInfo
from router.events import Complete, RequestRecord, RoundRecord

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
_LONG_SECONDS = [*_SECONDS, 60.0, 120.0, 300.0]
_TOKENS = [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 11.5, 15.5, 31.5]
_ACCEPTANCE_WEIGHT = 0.02
"""Weight of one proposal in the acceptance gauge: about the last fifty count."""

_Tally = collections.Counter[tuple[str, ...]]


class RouterMetrics:
    """An Observer of one router, and of the engines it sees.

    Args:
        clock: seconds, monotonic.
        period_s: how long what is told of a round may wait for others before it is reported.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, period_s: float = 1.0) -> None:
        self._clock, self._period_s, self._report_at = clock, period_s, float("-inf")
        self._unreported: list[RoundRecord] = []
        self._drafts = Counter("outrider_spec_decode_num_drafts", "Proposals that were judged.", ("drafter",))
        self._draft_tokens = Counter(
            "outrider_spec_decode_num_draft_tokens", "Draft tokens judged.", ("drafter", "workload")
        )
        self._accepted = Counter(
            "outrider_spec_decode_num_accepted_tokens", "Draft tokens accepted.", ("drafter", "workload")
        )
        self._drafted_at = Counter(
            "outrider_spec_decode_num_draft_tokens_per_pos", "By position from 0.", ("drafter", "position")
        )
        self._accepted_at = Counter(
            "outrider_spec_decode_num_accepted_tokens_per_pos", "Of those accepted.", ("drafter", "position")
        )
        self._dropped = Counter("outrider_spec_decode_num_dropped", "Proposals not judged.", ("why",))
        self._ahead = Counter("outrider_spec_decode_num_rounds_ahead", "Rounds behind which a draft ran ahead.")
        self._hits = Counter("outrider_spec_decode_num_early_hits", "Of those, the next proposal was in time.")
        self._wasted = Counter("outrider_spec_decode_num_wasted_draft_tokens", "Drafted ahead for nothing.")
        self._rounds = Counter(
            "outrider_rounds", "Rounds by why they did not speculate; none if they did.", ("reason",)
        )
        self._switches = Counter("outrider_speculation_switches", "Changes of that reason in a request.", ("reason",))
        self._requests = Counter("outrider_requests", "Requests by how they ended.", ("outcome",))
        self._failovers = Counter("outrider_failovers", "Lost targets that requests survived.")
        self._tokens = Counter("outrider_generation_tokens", "Tokens delivered.")
        self._prompt_tokens = Counter("outrider_prompt_tokens", "Prompt tokens of completed requests.")
        self._cached_tokens = Counter("outrider_prompt_tokens_cached", "Of those found in the target's prefix cache.")
        self._bubble_s = Counter("outrider_target_bubble_seconds", "Decoding sessions, no forward.", ("target",))
        self._busy_s = Counter("outrider_target_busy_seconds", "In forwards.", ("target",))
        self._forwards = Counter("outrider_target_forwards", "Forwards.", ("target",))
        self._acceptance = Gauge("outrider_spec_decode_acceptance_rate", "Accepted over drafted, recent.", ("drafter",))
        self._bubble = Gauge("outrider_target_forward_bubble", "Share of decoding time without a forward.", ("target",))
        self._running = Gauge("outrider_num_requests_running", "Requests that this router works on.")
        self._waiting = Gauge("outrider_num_requests_waiting", "Requests that wait for a place.")
        self._sessions = Gauge("outrider_engine_sessions", "Open sessions.", ("kind", "replica"))
        self._blocks = Gauge("outrider_kv_blocks_free", "Free KV blocks.", ("kind", "replica"))
        self._usage = Gauge("outrider_kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", ("kind", "replica"))
        self._proposed = Histogram("outrider_num_speculative_tokens", "Draft tokens of a round.", _TOKENS)
        self._rollback = Histogram("outrider_spec_decode_rollback_tokens", "Draft tokens rolled back.", _TOKENS)
        self._itl = Histogram("outrider_inter_token_latency_seconds", "Time of a round per token.", _SECONDS)
        self._ttft = Histogram("outrider_time_to_first_token_seconds", "From arrival to first token.", _SECONDS)
        self._latency = Histogram("outrider_e2e_request_latency_seconds", "From arrival to the end.", _LONG_SECONDS)
        self._queue = Histogram("outrider_request_queue_time_seconds", "Waiting for a place.", _SECONDS)
        self._forward = Histogram("outrider_target_forward_seconds", "Target forward of a round.", _SECONDS)
        self._target_queue = Histogram("outrider_target_queue_seconds", "A round's wait for a forward.", _SECONDS)
        self._draft_wait = Histogram("outrider_draft_wait_seconds", "Waiting for the draft in a round.", _SECONDS)
        self._recent: dict[str, float] = {}
        self._seen: dict[str, dict[str, EngineInfo]] = {}

    def round_finished(self, record: RoundRecord) -> None:
        """Is reported with others within `period_s` of rounds, or when a request ends."""
        self._unreported.append(record)
        if self._clock() >= self._report_at:
            self.report()

    def report(self) -> None:
        """Brings to Ray what was told of rounds since the last time. Each call of Ray's costs about what counting a
        whole round in Python does, so many rounds are counted together.
        """
        records, self._unreported = self._unreported, []
        self._report_at = self._clock() + self._period_s
        self._count(records)
        self._judged([record for record in records if record.num_proposed])
        for record in records:
            self._proposed.observe(record.num_proposed)
            self._forward.observe(record.forward_s)
            self._target_queue.observe(record.queue_s)
            self._draft_wait.observe(record.draft_wait_s)
            if record.num_tokens:
                self._itl.observe(record.round_s / record.num_tokens)

    def request_finished(self, record: RequestRecord) -> None:
        self.report()
        self._requests.inc(1, {"outcome": record.outcome})
        self._latency.observe(record.elapsed_s)
        if record.num_delivered:  # Ray's counters take no zero
            self._tokens.inc(record.num_delivered)
        if record.complete is not None:
            self._completed(record.complete)

    def engines_seen(self, kind: str, endpoints: Sequence[Endpoint]) -> None:
        """Load and times of the replicas found at a look; kind is "target" or "draft".

        Ray lets go of a gauge that is not set again, so those of a replica that is gone vanish by themselves.
        """
        before = self._seen.get(kind, {})
        found = {endpoint.address: endpoint.info for endpoint in endpoints}
        self._seen[kind] = found
        for address, info in found.items():
            tags = {"kind": kind, "replica": address}
            self._sessions.set(info.running_sessions, tags)
            self._blocks.set(info.free_blocks, tags)
            self._usage.set(1 - info.free_blocks / info.num_blocks, tags)
            if kind == "target":
                self._target_times(address, info, before.get(address, info))

    def load_seen(self, running: int, waiting: int) -> None:
        """Requests that the router works on, and that wait for it."""
        self._running.set(running)
        self._waiting.set(waiting)

    def _target_times(self, address: str, info: EngineInfo, before: EngineInfo) -> None:
        """What happened since the look before. Several routers count the same, so only ratios and maxima mean much."""
        tags = {"target": address}
        for counter, done in (
            (self._bubble_s, info.bubble_s - before.bubble_s),
            (self._busy_s, info.forward_s - before.forward_s),
            (self._forwards, info.forwards - before.forwards),
        ):
            if done > 0:
                counter.inc(done, tags)
        if busy_s := info.bubble_s + info.forward_s:
            self._bubble.set(info.bubble_s / busy_s, tags)

    def _completed(self, complete: Complete) -> None:
        timing, usage = complete.timing, complete.usage
        self._ttft.observe(timing.ttft_ms / 1e3)
        self._queue.observe(timing.queue_ms / 1e3)
        for counter, count in (
            (self._prompt_tokens, usage.prompt_tokens),
            (self._cached_tokens, usage.cached_tokens),
            (self._failovers, complete.failovers),
        ):
            if count:
                counter.inc(count)

    def _count(self, records: Sequence[RoundRecord]) -> None:
        _add(self._rounds, _Tally((record.reason or "none",) for record in records), "reason")
        _add(self._switches, _Tally((record.reason or "none",) for record in records if record.is_switch), "reason")
        dropped = _Tally((record.dropped,) for record in records if record.dropped)
        dropped["stale",] += sum(record.num_stale for record in records)
        _add(self._dropped, dropped, "why")
        _add(self._ahead, _Tally(() for record in records if record.is_hit is not None))
        _add(self._hits, _Tally(() for record in records if record.is_hit))
        _add(self._wasted, _Tally({(): sum(record.num_wasted for record in records)}))

    def _judged(self, records: Sequence[RoundRecord]) -> None:
        drafts, tokens, accepted, drafted_at, accepted_at = (_Tally() for _ in range(5))
        alike = collections.Counter(
            (each.drafter, each.workload or "none", each.num_proposed, each.num_accepted) for each in records
        )
        for (drafter, workload, num_proposed, num_accepted), count in alike.items():
            drafts[drafter,] += count
            tokens[drafter, workload] += count * num_proposed
            accepted[drafter, workload] += count * num_accepted
            for position in range(num_proposed):
                drafted_at[drafter, str(position)] += count
            for position in range(num_accepted):
                accepted_at[drafter, str(position)] += count
        _add(self._drafts, drafts, "drafter")
        _add(self._draft_tokens, tokens, "drafter", "workload")
        _add(self._accepted, accepted, "drafter", "workload")
        _add(self._drafted_at, drafted_at, "drafter", "position")
        _add(self._accepted_at, accepted_at, "drafter", "position")
        self._show_acceptance(records)

    def _show_acceptance(self, records: Sequence[RoundRecord]) -> None:
        for record in records:
            self._rollback.observe(record.num_proposed - record.num_accepted)
            share = record.num_accepted / record.num_proposed
            before = self._recent.get(record.drafter, share)
            self._recent[record.drafter] = before + _ACCEPTANCE_WEIGHT * (share - before)
        for drafter in {record.drafter for record in records}:
            self._acceptance.set(self._recent[drafter], {"drafter": drafter})


def _add(counter: Counter, counts: _Tally, *tags: str) -> None:
    """Adds counts by the values of these tags."""
    for values, count in counts.items():
        if count:  # Ray's counters take no zero
            counter.inc(count, dict(zip(tags, values, strict=True)))
