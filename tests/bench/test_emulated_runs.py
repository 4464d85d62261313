"""How runs on emulated devices become rows, and the bound they are held against."""

from __future__ import annotations

from typing import Any

import pytest

from bench.counts import Counts
from bench.emulated_runs import Run, no_overhead_bound, summarize_runs, title
from bench.emulation import DeviceTimes, Emulation

TARGET = DeviceTimes(step_s=0.02, row_share=0.01)
CPU = {"router": 0.0}


def run(mode: str, repeat: int, decode_s: float, counts: Counts, num_sessions: int = 2, **rest: Any) -> Run:
    """100 tokens by all sessions together."""
    given = {"wrong_tokens": 0, "forward_s": 1.0, "bubble_s": 0.0, "forwards": 50, "cpu_s": CPU, **rest}
    return Run(num_sessions, mode, repeat, 100, decode_s, 64.0, counts, router_ms=0.1, **given)


def test_the_bound_is_tokens_per_round_over_what_its_rows_cost() -> None:
    assert no_overhead_bound(TARGET, 1, 3.6, 5.0, 100.0) == pytest.approx(3.6 / 1.05)
    assert no_overhead_bound(TARGET, 8, 3.6, 5.0, 100.0) == pytest.approx(3.6 * (1 + 0.07) / (1 + 0.47))
    assert no_overhead_bound(TARGET, 8, 1.0, 0.0, 100.0) == 1.0


def test_context_costs_plain_steps_and_verification_alike() -> None:
    far = TARGET.model_copy(update={"context_token_s": 1e-4})
    assert no_overhead_bound(far, 2, 3.0, 4.0, 100.0) == pytest.approx(
        3.0 * (0.02 * 1.01 + 2 * 100.0 * 1e-4) / (0.02 * 1.09 + 2 * 100.0 * 1e-4)
    )


def test_speed_is_that_of_all_sessions_and_compared_within_a_repeat() -> None:
    runs = [
        run("off", 0, 8.0, Counts(rounds=100)),
        run("off", 1, 10.0, Counts(rounds=100)),
        run("off", 2, 4.0, Counts(rounds=100)),
        run("auto", 0, 4.0, Counts(rounds=40, draft_tokens=80)),
        run("auto", 1, 2.5, Counts(rounds=20, draft_tokens=40)),
        run("auto", 2, 1.25, Counts(rounds=40, draft_tokens=120)),
    ]
    plain, auto = summarize_runs(runs, TARGET)
    assert (plain.tokens_per_s, plain.speedup, plain.bound) == (25.0, 1.0, 1.0)
    assert auto.tokens_per_s == 80.0
    assert (auto.speedup_min, auto.speedup, auto.speedup_max) == (2.0, 3.2, 4.0)
    assert (auto.mean_acceptance_length, auto.draft_tokens_per_round) == (3.0, 2.4)
    assert auto.bound == pytest.approx(3.0 * 1.01 / 1.058)


def test_shares_are_of_all_repeats_together() -> None:
    counts = Counts(50, 100, 60, rounds_ahead=20, early_hits=19, wasted_draft_tokens=90)
    runs = [
        run("off", 0, 8.0, counts, wrong_tokens=1, bubble_s=0.0, cpu_s={"router": 0.01}),
        run("off", 1, 8.0, counts, wrong_tokens=2, bubble_s=0.5, cpu_s={"router": 0.02}),
    ]
    (row,) = summarize_runs(runs, TARGET)
    assert (row.hit_rate, row.wasted_per_accepted, row.wrong_tokens) == (0.95, 1.5, 3)
    assert row.bubble == pytest.approx(0.2)
    assert row.forward_ms == pytest.approx(20.0)
    assert row.cpu_us["router"] == pytest.approx(300.0)


def test_every_load_is_compared_with_its_own_plain_decoding() -> None:
    runs = [
        run(mode, 0, seconds, Counts(rounds=50), n) for n, seconds in ((1, 4.0), (8, 6.0)) for mode in ("off", "auto")
    ]
    assert [(row.num_sessions, row.mode, row.speedup) for row in summarize_runs(runs, TARGET)] == [
        (1, "off", 1.0), (1, "auto", 1.0), (8, "off", 1.0), (8, "auto", 1.0),
    ]  # fmt: skip
    assert [row.mark().group for row in summarize_runs(runs, TARGET)][::2] == ["1 session", "8 sessions"]


def test_sampled_outputs_have_no_wrong_tokens_to_count() -> None:
    (row,) = summarize_runs([run("off", 0, 1.0, Counts(rounds=50), wrong_tokens=None)], TARGET)
    assert row.wrong_tokens is None


def test_the_title_says_that_nothing_was_computed_and_with_what() -> None:
    emulation = Emulation(target=TARGET, draft=TARGET, alpha=0.7, alpha_changes={100: 0.2}, dilation=2.0)
    assert title("70b", emulation.varied(draft_rtt_s=0.002), 0.8) == (
        "EMULATED devices, profile 70b: alpha 0.7, 0.2 from token 100, recall 0.95, temperature 0.8, "
        "RTT to target 0 ms and to draft 2 ms, dilation 2"
    )
