"""What observers are told of rounds reaches the counters as it is."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest

from deployments import metrics
from router.events import RoundRecord


class Counted:
    """In the place of every Ray metric."""

    totals: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str, *_: object) -> None:
        self._name = name

    def inc(self, value: float, tags: object = None) -> None:
        assert value > 0, "Ray's counters take no zero"
        Counted.totals[self._name] += value

    def observe(self, value: float) -> None:
        pass

    def set(self, value: float, tags: object = None) -> None:
        pass


def record(*, is_hit: bool | None, num_wasted: int) -> RoundRecord:
    return RoundRecord("draft_model", 3, 2, 3, "", "", 0.04, 0.03, 0.0, False, is_hit, num_wasted)


def test_running_ahead_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "totals", Counter())
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Counted)
    observer = metrics.RouterMetrics()
    for is_hit, num_wasted in ((True, 5), (True, 0), (False, 8), (None, 0), (None, 2)):
        observer.round_finished(record(is_hit=is_hit, num_wasted=num_wasted))
    expected = {"num_rounds_ahead": 3, "num_early_hits": 2, "num_wasted_draft_tokens": 15, "num_drafts": 5}
    assert {name: Counted.totals[f"outrider_spec_decode_{name}"] for name in expected} == expected
