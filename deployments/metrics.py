"""Owns the Prometheus metrics of a router: what its sessions and rounds tell an Observer, as Ray metrics."""

from __future__ import annotations

from collections.abc import Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from cluster.discovery import Endpoint
from router.events import RequestRecord, RoundRecord

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
_TOKENS = [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 11.5, 15.5, 31.5]
_ACCEPTANCE_WEIGHT = 0.02
"""Weight of one proposal in the acceptance gauge: about the last fifty count."""


class RouterMetrics:
    """An Observer of one router, and of the engines it sees."""

    def __init__(self) -> None:
        self._drafts = Counter("outrider_spec_decode_num_drafts", "Proposals that were judged.", ("drafter",))
        self._draft_tokens = Counter("outrider_spec_decode_num_draft_tokens", "Draft tokens judged.", ("drafter",))
        self._accepted = Counter("outrider_spec_decode_num_accepted_tokens", "Draft tokens accepted.", ("drafter",))
        self._dropped = Counter("outrider_spec_decode_num_dropped", "Proposals not judged.", ("why",))
        self._ahead = Counter("outrider_spec_decode_num_rounds_ahead", "Rounds behind which a draft ran ahead.")
        self._hits = Counter("outrider_spec_decode_num_early_hits", "Of those, the next proposal was in time.")
        self._wasted = Counter("outrider_spec_decode_num_wasted_draft_tokens", "Drafted ahead for nothing.")
        self._rounds = Counter(
            "outrider_rounds", "Rounds by why they did not speculate; none if they did.", ("reason",)
        )
        self._requests = Counter("outrider_requests", "Requests by how they ended.", ("outcome",))
        self._tokens = Counter("outrider_generation_tokens", "Tokens delivered.")
        self._acceptance = Gauge("outrider_spec_decode_acceptance_rate", "Accepted over drafted, recent.", ("drafter",))
        self._proposed = Histogram("outrider_num_speculative_tokens", "Draft tokens of a round.", _TOKENS)
        self._itl = Histogram("outrider_inter_token_latency_seconds", "Time of a round per token.", _SECONDS)
        self._ttft = Histogram("outrider_time_to_first_token_seconds", "From admission to first token.", _SECONDS)
        self._forward = Histogram("outrider_target_forward_seconds", "Target forward of a round.", _SECONDS)
        self._draft_wait = Histogram("outrider_draft_wait_seconds", "Waiting for the draft in a round.", _SECONDS)
        self._bubble = Gauge("outrider_target_forward_bubble", "Share of decoding time without a forward.", ("target",))
        self._blocks = Gauge("outrider_kv_blocks_free", "Free KV blocks.", ("kind", "replica"))
        self._recent: dict[str, float] = {}

    def round_finished(self, record: RoundRecord) -> None:
        self._rounds.inc(1, {"reason": record.reason or "none"})
        if record.dropped:
            self._dropped.inc(1, {"why": record.dropped})
        if record.num_proposed:
            self._judged(record)
        self._ran_ahead(record)
        self._proposed.observe(record.num_proposed)
        self._forward.observe(record.forward_s)
        self._draft_wait.observe(record.draft_wait_s)
        if record.num_tokens:
            self._itl.observe(record.round_s / record.num_tokens)

    def request_finished(self, record: RequestRecord) -> None:
        self._requests.inc(1, {"outcome": record.outcome})
        if record.num_delivered:  # Ray's counters take no zero
            self._tokens.inc(record.num_delivered)
        if record.complete is not None:
            self._ttft.observe(record.complete.timing.ttft_ms / 1e3)

    def engines_seen(self, kind: str, endpoints: Sequence[Endpoint]) -> None:
        """Bubble and free blocks of the replicas found at a look; kind is "target" or "draft"."""
        for endpoint in endpoints:
            info = endpoint.info
            self._blocks.set(info.free_blocks, {"kind": kind, "replica": endpoint.address})
            busy_s = info.bubble_s + info.forward_s
            if kind == "target" and busy_s:
                self._bubble.set(info.bubble_s / busy_s, {"target": endpoint.address})

    def _ran_ahead(self, record: RoundRecord) -> None:
        if record.is_hit is not None:
            self._ahead.inc(1)
        if record.is_hit:
            self._hits.inc(1)
        if record.num_wasted:
            self._wasted.inc(record.num_wasted)

    def _judged(self, record: RoundRecord) -> None:
        tags = {"drafter": record.drafter}
        self._drafts.inc(1, tags)
        self._draft_tokens.inc(record.num_proposed, tags)
        if record.num_accepted:
            self._accepted.inc(record.num_accepted, tags)
        share = record.num_accepted / record.num_proposed
        before = self._recent.get(record.drafter, share)
        self._recent[record.drafter] = before + _ACCEPTANCE_WEIGHT * (share - before)
        self._acceptance.set(self._recent[record.drafter], tags)
