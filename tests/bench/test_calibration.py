"""From measurements to a profile: lines, acceptance by position, and what the simulator makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from bench.calibration import (
    LEAST_TRIALS,
    Calibration,
    Devices,
    Forward,
    Ranks,
    Timed,
    acceptance_of,
    by_position,
    calibrate,
    constant_acceptance,
    fit_times,
    worst_miss,
)
from bench.comparison import Sample
from bench.counts import Counts
from bench.emulation import DeviceTimes
from bench.simulation.roofline import ProfiledDevice
from bench.simulation.speedup import tokens_per_round

TARGET = DeviceTimes(step_s=0.02, row_share=0.005, prompt_row_share=0.004, context_token_s=2e-6)
DRAFT = DeviceTimes(step_s=0.002, row_share=0.01, prompt_row_share=0.01, context_token_s=0.0)


def timed(times: DeviceTimes) -> Timed:
    """What a device of these times would be measured to take."""
    device = {context: ProfiledDevice(times, context) for context in (64, 256, 1024)}
    sizes = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (8, 1)]
    generated = [
        Forward(number, rows, context, device[context].seconds(number, rows))
        for (number, rows), context in product(sizes, (64, 1024))
    ]
    prompt_s = times.step_s * (1.0 + 255 * (times.prompt_row_share or 0.0)) + 256 * times.context_token_s
    return Timed(tuple(generated), (Forward(1, 256, 256, prompt_s),))


@pytest.mark.parametrize("times", [TARGET, DRAFT])
def test_the_times_of_a_device_are_found_again(times: DeviceTimes) -> None:
    found = fit_times(timed(times))
    assert found.model_dump() == pytest.approx(times.model_dump(), rel=1e-3, abs=1e-9)
    assert worst_miss(found, timed(times).generated) < 1e-3


def test_forwards_that_were_held_up_do_not_bend_the_line() -> None:
    clean = timed(TARGET)
    held_up = [
        replace(each, seconds=each.seconds * (3.0 if number % 5 == 0 else 1.0))
        for number, each in enumerate(clean.generated)
    ]
    found = fit_times(replace(clean, generated=tuple(held_up)))
    assert found.model_dump() == pytest.approx(TARGET.model_dump(), rel=0.01)


def test_what_would_be_negative_is_left_out() -> None:
    faster_with_rows = [Forward(1, rows, 64, 0.02 - 1e-5 * rows) for rows in (1, 2, 4, 8)]
    longer = [replace(each, context=1024, seconds=each.seconds + 0.002) for each in faster_with_rows]
    found = fit_times(Timed((*faster_with_rows, *longer), (Forward(1, 64, 64, 0.01),)))
    assert (found.row_share, found.prompt_row_share) == (0.0, 0.0)
    assert found.context_token_s == pytest.approx(0.002 / 960, rel=0.01)


def counts(*by_rounds: tuple[int, int]) -> Counts:
    """Of rounds as (drafted, accepted)."""
    longest = max(drafted for drafted, _ in by_rounds)
    return Counts(
        rounds=len(by_rounds),
        drafted_per_position=tuple(sum(i < drafted for drafted, _ in by_rounds) for i in range(longest)),
        accepted_per_position=tuple(sum(i < accepted for _, accepted in by_rounds) for i in range(longest)),
    )


def test_each_position_counts_where_those_before_it_were_accepted() -> None:
    assert by_position(counts(*[(3, 3)] * 40, *[(3, 2)] * 20, *[(3, 1)] * 20, *[(3, 0)] * 20)) == (0.8, 0.75, 0.6667)


def test_shorter_proposals_do_not_make_later_positions_look_worse() -> None:
    long, short = [(2, 2)] * 40 + [(2, 1)] * 40 + [(2, 0)] * 20, [(1, 1)] * 400 + [(1, 0)] * 100
    assert by_position(counts(*long, *short)) == (0.8, 0.5)


def test_what_was_hardly_tried_has_no_number() -> None:
    often = [(2, 0)] * (LEAST_TRIALS - 1) + [(2, 1)] * (LEAST_TRIALS - 1)
    assert by_position(counts(*often)) == (0.5,)
    assert by_position(counts((2, 1))) == ()
    assert by_position(Counts()) == ()


@pytest.mark.parametrize("rates", [(0.8,), (0.9, 0.5, 0.7), (0.0,), (1.0,)])
def test_a_constant_acceptance_brings_as_many_tokens(rates: tuple[float, ...]) -> None:
    alpha = constant_acceptance(rates, 5)
    assert tokens_per_round((alpha,), 5) == pytest.approx(tokens_per_round(rates, 5))


def test_ranks_beside_the_first_make_the_recall() -> None:
    found = Ranks()
    for rank in (0, 0, 1, 3, 4, None):
        found = found.seen(rank, 4)
    assert (found, found.recall) == (Ranks(2, 2, 6), 0.5)
    assert Ranks(3, 0, 3).recall == 0.0


RATES = {"code": (0.8, 0.75), "chat": (0.5, 0.5)}
CONTEXT = 500


def samples() -> list[Sample]:
    """Two classes, each with 400 rounds, of a system that does what the simulator says with `wait_s` 3 ms."""
    made = []
    for kind, (first, second) in RATES.items():
        seen = counts(
            *[(2, 2)] * round(400 * first * second),
            *[(2, 1)] * round(400 * first * (1.0 - second)),
            *[(2, 0)] * round(400 * (1.0 - first)),
        )
        plain_s = ProfiledDevice(TARGET, CONTEXT).seconds(1, 1) + 0.001
        made.append(Sample(f"{kind} 1", kind, "off", (0,) * 401, 400 * plain_s, Counts(rounds=400)))
        for size in (1, 2):
            tokens = round(400 * tokens_per_round((first, second), size))
            draft_s = size * ProfiledDevice(DRAFT, CONTEXT).seconds(1, 1)
            round_s = ProfiledDevice(TARGET, CONTEXT).seconds(1, size + 1) + 0.001 + draft_s + 0.003
            one = counts(*[(1, 1)] * round(400 * first), *[(1, 0)] * round(400 * (1.0 - first)))
            its = seen if size == 2 else one
            made.append(Sample(f"{kind} 1", kind, f"sync:{size}", (0,) * (tokens + 1), 400 * round_s, its, 2.5))
        ahead = replace(seen, rounds_ahead=200, early_hits=150)
        made.append(Sample(f"{kind} 1", kind, "draft_model", (0,) * 900, 6.0, ahead))
    return made


@pytest.fixture
def calibration() -> Calibration:
    devices = Devices(timed(TARGET), timed(DRAFT), draft_wait_s=0.0012)
    queued = tuple(replace(each, queue_s=0.0003) for each in devices.target.generated)
    return calibrate(
        replace(devices, target=replace(devices.target, generated=queued)), samples(), Ranks(60, 30, 100), CONTEXT
    )


def test_acceptance_is_by_class_and_over_all(calibration: Calibration) -> None:
    assert calibration.acceptance == {"code": (0.8, 0.75), "chat": (0.5, 0.5), "all": (0.65, 0.6538)}
    assert acceptance_of([sample for sample in samples() if sample.mode == "off"]) == {}


def test_what_is_not_in_forwards_is_put_together(calibration: Calibration) -> None:
    assert calibration.gap_s == pytest.approx(0.001, rel=1e-3)
    assert calibration.wait_s == pytest.approx(0.0025 + 0.0003 - 0.001 + 0.0012, rel=1e-3)
    assert (calibration.hit_rate, calibration.max_draft_tokens, calibration.context) == (0.75, 2, 500)


def test_the_emulation_is_of_the_same_pair(calibration: Calibration) -> None:
    emulation = calibration.emulation
    assert emulation.target.step_s == pytest.approx(TARGET.step_s)
    assert (emulation.recall, emulation.num_ranked) == (0.75, 4)
    assert tokens_per_round((emulation.alpha,), 2) == pytest.approx(tokens_per_round((0.65, 0.6538), 2), rel=1e-3)


def test_the_simulator_meets_what_follows_its_own_model(calibration: Calibration) -> None:
    checks = calibration.checks(samples())
    assert [check.num_speculative_tokens for check in checks] == [1, 2]
    assert all(abs(check.miss) < 0.01 for check in checks), checks
    assert checks[0].measured > 1.0
