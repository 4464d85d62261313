"""What a forward takes by its rows, learned from forwards."""

from __future__ import annotations

import math
import random

import pytest

from engine.pace import Pace

BASE_S, ROW_S = 0.020, 0.0005


def seen(sizes: list[int], base_s: float = BASE_S, row_s: float = ROW_S, pace: Pace | None = None) -> Pace:
    pace = pace or Pace()
    for rows in sizes:
        pace.saw(rows, base_s + row_s * rows)
    return pace


def test_nothing_is_known_before_the_first_forward() -> None:
    pace = Pace()
    assert pace.seconds(8) == 0.0
    assert pace.rows_within(1e-9) == math.inf


def test_a_single_forward_is_what_every_forward_takes() -> None:
    pace = seen([8])
    for rows in (1, 8, 100):
        assert pace.seconds(rows) == pytest.approx(BASE_S + 8 * ROW_S)


def test_a_line_is_found_and_goes_on_past_what_was_seen() -> None:
    pace = seen([2, 10, 4, 8, 6] * 4)
    for rows in (1, 7, 50):
        assert pace.seconds(rows) == pytest.approx(BASE_S + rows * ROW_S)


def test_noise_is_averaged_out() -> None:
    rng, pace = random.Random(5), Pace()
    for _ in range(2000):
        rows = rng.randint(1, 40)
        pace.saw(rows, (BASE_S + ROW_S * rows) * rng.uniform(0.8, 1.2))
    assert pace.seconds(1) == pytest.approx(BASE_S + ROW_S, rel=0.15)
    assert pace.seconds(40) == pytest.approx(BASE_S + 40 * ROW_S, rel=0.15)


def test_sizes_that_hardly_differ_tell_no_slope() -> None:
    """A jitter of a microsecond among them would be one of any steepness."""
    pace = Pace()
    for number in range(50):
        pace.saw(8 + number % 2, BASE_S + 1e-4 * (number % 2))
    assert pace.seconds(1000) == pytest.approx(BASE_S, rel=0.01)


def test_more_rows_never_take_less_and_no_rows_never_take_less_than_nothing() -> None:
    falling = seen([2, 10] * 10, base_s=0.020, row_s=-0.001)
    assert falling.seconds(100) == pytest.approx(falling.seconds(2)) == pytest.approx(0.014, rel=0.05)
    steep = seen([2, 10] * 10, base_s=-0.001, row_s=0.001)
    assert steep.seconds(0) == 0.0


def test_old_forwards_fade() -> None:
    pace = seen([2, 10, 6] * 30)
    seen([2, 10, 6] * 100, base_s=3 * BASE_S, pace=pace)
    assert pace.seconds(6) == pytest.approx(3 * BASE_S + 6 * ROW_S, rel=0.01)


def test_one_odd_forward_does_not_count_for_much() -> None:
    pace = seen([2, 10, 6] * 30)
    before = pace.seconds(6)
    pace.saw(6, 10 * before)
    assert pace.seconds(6) < 1.5 * before


def test_the_rows_of_a_time_are_those_that_take_it() -> None:
    pace = seen([2, 10, 6] * 10)
    for rows in (1.0, 12.5, 300.0):
        assert pace.rows_within(pace.seconds(rows)) == pytest.approx(rows)


def test_no_rows_fit_into_less_than_a_forward_takes() -> None:
    assert seen([2, 10] * 10).rows_within(BASE_S / 2) == 0.0
    assert seen([8]).rows_within(BASE_S / 2) == 0.0


def test_rows_that_cost_nothing_fit_without_end() -> None:
    assert seen([2, 10] * 10, row_s=0.0).rows_within(2 * BASE_S) > 1e9
    assert seen([8]).rows_within(1.0) == math.inf
