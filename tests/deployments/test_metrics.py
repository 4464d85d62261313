"""What observers are told of rounds, requests and engines reaches the metrics as it is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import pytest

from cluster.discovery import Endpoint
from deployments import metrics
from engine.info import EngineInfo
from router.acceptance import SpeculationTotals
from router.events import Complete, RequestRecord, RoundRecord, Timing, Usage

ROUND = RoundRecord("draft_model", 3, 2, 3, "", "", 0.04, 0.03, 0.0, False, None, 0)
INFO = EngineInfo(
    "m", 100, 512, (0,), 8, num_blocks=10, free_blocks=4, block_size=16, running_sessions=2, forwards=5, forward_s=3.0,
    bubble_s=1.0,
)  # fmt: skip


class Recorded:
    """In the place of every Ray metric."""

    totals: ClassVar[Counter[str]] = Counter()
    by_tags: ClassVar[defaultdict[str, Counter[str]]] = defaultdict(Counter)
    gauges: ClassVar[dict[str, float]] = {}

    def __init__(self, name: str, *_: object) -> None:
        self._name = name.removeprefix("outrider_").removeprefix("spec_decode_")

    def inc(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        assert value > 0, "Ray's counters take no zero"
        Recorded.totals[self._name] += value
        Recorded.by_tags[self._name][" ".join((tags or {}).values())] += value

    def observe(self, value: float) -> None:
        Recorded.totals[f"{self._name}.sum"] += value

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        Recorded.gauges[" ".join((self._name, *(tags or {}).values()))] = value


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> metrics.RouterMetrics:
    for name, empty in (("totals", Counter()), ("by_tags", defaultdict(Counter)), ("gauges", {})):
        monkeypatch.setattr(Recorded, name, empty)
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Recorded)
    return metrics.RouterMetrics()


def test_running_ahead_is_counted(observer: metrics.RouterMetrics) -> None:
    for is_hit, num_wasted in ((True, 5), (True, 0), (False, 8), (None, 0), (None, 2)):
        observer.round_finished(replace(ROUND, is_hit=is_hit, num_wasted=num_wasted))
    observer.report()
    expected = {"num_rounds_ahead": 3, "num_early_hits": 2, "num_wasted_draft_tokens": 15, "num_drafts": 5}
    assert {name: Recorded.totals[name] for name in expected} == expected


def test_proposals_are_counted_by_drafter_class_and_position(observer: metrics.RouterMetrics) -> None:
    observer.round_finished(replace(ROUND, workload="code"))
    observer.round_finished(replace(ROUND, drafter="ngram", num_proposed=1, num_accepted=0, num_tokens=1))
    observer.round_finished(replace(ROUND, drafter="", num_proposed=0, num_accepted=0, num_tokens=1))
    observer.report()
    by_tags = Recorded.by_tags
    assert by_tags["num_draft_tokens"] == {"draft_model code": 3, "ngram none": 1}
    assert by_tags["num_accepted_tokens"] == {"draft_model code": 2}
    assert by_tags["num_draft_tokens_per_pos"] == {f"draft_model {at}": 1 for at in range(3)} | {"ngram 0": 1}
    assert by_tags["num_accepted_tokens_per_pos"] == {"draft_model 0": 1, "draft_model 1": 1}
    assert Recorded.totals["rollback_tokens.sum"] == 2
    assert Recorded.totals["num_speculative_tokens.sum"] == 4


def test_reasons_switches_and_drops_are_counted(observer: metrics.RouterMetrics) -> None:
    observer.round_finished(replace(ROUND, reason="load", is_switch=True, dropped="late", num_stale=2))
    observer.round_finished(replace(ROUND, reason="load"))
    observer.round_finished(replace(ROUND, is_switch=True))
    observer.report()
    assert Recorded.by_tags["rounds"] == {"load": 2, "none": 1}
    assert Recorded.by_tags["speculation_switches"] == {"load": 1, "none": 1}
    assert Recorded.by_tags["num_dropped"] == {"late": 1, "stale": 2}


def test_rounds_are_reported_together_and_at_the_latest_with_their_request(observer: metrics.RouterMetrics) -> None:
    times = [0.0]
    observer = metrics.RouterMetrics(lambda: times[-1], period_s=1.0)
    for now, reported in ((0.0, 1), (0.5, 1), (0.9, 1), (1.0, 4), (1.9, 4)):
        times.append(now)
        observer.round_finished(ROUND)
        assert Recorded.totals["rounds"] == Recorded.totals["num_drafts"] == reported
    observer.request_finished(RequestRecord("stop", None))
    assert Recorded.totals["rounds"] == Recorded.totals["num_drafts"] == 5
    assert Recorded.totals["target_forward_seconds.sum"] == pytest.approx(5 * ROUND.forward_s)


def test_requests_count_what_they_delivered_however_they_ended(observer: metrics.RouterMetrics) -> None:
    timing = Timing(120.0, 0.0, 0.0, 0.0, 20.0, 0.0)
    complete = Complete("stop", None, Usage(30, 7, 16), SpeculationTotals(), timing, failovers=2)
    observer.request_finished(RequestRecord("stop", complete, 7, 0.5))
    observer.request_finished(RequestRecord("Unavailable", None, 3, 0.25))
    observer.request_finished(RequestRecord("Overloaded", None))
    assert Recorded.by_tags["requests"] == {"stop": 1, "Unavailable": 1, "Overloaded": 1}
    names = (
        "generation_tokens",
        "prompt_tokens",
        "prompt_tokens_cached",
        "failovers",
        "e2e_request_latency_seconds.sum",
    )
    assert [Recorded.totals[name] for name in names] == [10, 30, 16, 2, 0.75]
    assert Recorded.totals["time_to_first_token_seconds.sum"] == pytest.approx(0.12)
    assert Recorded.totals["request_queue_time_seconds.sum"] == pytest.approx(0.02)


def test_times_of_a_target_count_from_the_first_look_on(observer: metrics.RouterMetrics) -> None:
    observer.engines_seen("target", [Endpoint("a", INFO)])
    assert Recorded.gauges["kv_cache_usage_perc target a"] == pytest.approx(0.6)
    assert Recorded.gauges["engine_sessions target a"] == 2
    assert not Recorded.by_tags["target_busy_seconds"], "what was before the first look is not of now"
    later = replace(INFO, forwards=9, forward_s=3.5, bubble_s=1.25)
    observer.engines_seen("target", [Endpoint("a", later), Endpoint("b", INFO)])
    observer.engines_seen("target", [Endpoint("b", INFO)])
    assert Recorded.by_tags["target_busy_seconds"] == {"a": 0.5}
    assert Recorded.by_tags["target_bubble_seconds"] == {"a": 0.25}
    assert Recorded.by_tags["target_forwards"] == {"a": 4}


def test_the_load_of_the_router_is_shown(observer: metrics.RouterMetrics) -> None:
    observer.load_seen(3, 1)
    assert (Recorded.gauges["num_requests_running"], Recorded.gauges["num_requests_waiting"]) == (3, 1)
