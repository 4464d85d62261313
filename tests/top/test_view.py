"""Figures are shares and rates without NaN, and the view of them fits a terminal of 80 × 24."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from deployments.top.figures import Figures, figures_of
from deployments.top.view import render
from tests.top.made import AFTER, BEFORE, QUIET, change


def shown(figures: Figures, failures: dict[str, str] | None = None, height: int = 24) -> list[str]:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(render(figures, "outrider top", failures or {}, height))
    return capture.get().splitlines()


def test_rates_are_differences_over_seconds() -> None:
    figures = figures_of(change(BEFORE, AFTER))
    assert (figures.running, figures.waiting) == (3, 1)
    assert (figures.tokens_per_s, figures.rounds_per_s) == (50.0, 10.0)
    assert (figures.finished_per_s, figures.failed_per_s) == (0.4, 0.1)
    assert figures.num_speculative_tokens == 3.2
    assert figures.reasons == {"temperature": 0.2}
    assert (figures.hit_rate, figures.wasted_per_accepted) == (0.8, 2.0)
    assert figures.bubble == 0.25
    assert figures.itl_p50_s == pytest.approx(0.00625)
    assert figures.itl_p95_s == pytest.approx(0.01 + 0.04 * 15 / 18)
    (drafter,) = figures.drafters
    assert (drafter.acceptance, drafter.num_speculative_tokens, drafter.acceptance_length) == (0.75, 4.0, 4.0)


def test_engines_have_their_own_lines() -> None:
    target, draft = figures_of(change(BEFORE, AFTER)).engines
    assert (target.kind, target.sessions, target.kv_usage, target.blocks_free) == ("target", 3, 0.25, 768)
    assert (target.bubble, target.busy, target.forwards_per_s, target.forward_s) == (0.25, 0.6, 12.0, 0.05)
    assert (draft.kind, draft.kv_usage, draft.busy) == ("draft", None, None)


def test_without_traffic_there_are_no_figures_rather_than_nan() -> None:
    figures = figures_of(change(BEFORE, BEFORE))
    assert (figures.tokens_per_s, figures.bubble, figures.hit_rate, figures.itl_p50_s) == (0.0, None, None, None)
    assert figures.drafters[0].acceptance is None
    assert "NaN" not in json.dumps(figures.as_json())
    lines = shown(figures_of(change(QUIET, QUIET)))
    assert any(line.startswith("rounds   0.0/s  ·  K –  ·  bubble –") for line in lines)


def test_everything_is_shown_in_80_columns() -> None:
    lines = shown(figures_of(change(BEFORE, AFTER)), {"http://other:8080/metrics": "connection refused"})
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in (
        "no answer from http://other:8080/metrics: connection refused",
        "requests 3 running, 1 waiting  ·  0.40 done/s  ·  0.10 failed/s",
        "off      temperature 20% of rounds",
        "bubble 25%",
        "ahead: 80% hits",
    ):
        assert part in text
    row = next(line for line in lines if line.startswith("draft_model"))
    assert row.split() == ["draft_model", "75%", "4.0", "4.0", "8.0"]
    row = next(line for line in lines if line.startswith("target"))
    assert row.split() == ["target", "10.0.0.1:41", "3", "25%", "768", "25%", "60%", "12.0", "50.0"]


@pytest.mark.parametrize("height", [24, 40])
def test_many_replicas_are_counted_where_there_is_no_room(height: int) -> None:
    figures = figures_of(change(BEFORE, AFTER))
    many = replace(figures, routers=figures.routers * 20, engines=figures.engines * 20)
    lines = shown(many, height=height)
    assert len(lines) <= height
    assert sum(line.startswith("…") for line in lines) == 2
