"""What rounds are worth: the published formula where nothing else costs, and what each further term does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench.emulated_runs import no_overhead_bound
from bench.emulation import DeviceTimes
from bench.simulation.ahead import Foresight, best_ahead
from bench.simulation.roofline import ProfiledDevice
from bench.simulation.speedup import Load, best, closed_form, plain, running_ahead, tokens_per_round, waiting


@dataclass(frozen=True)
class Steady:
    """The same time whatever is asked of it."""

    step_s: float

    def seconds(self, num_sessions: float, rows_each: float) -> float:
        return self.step_s


def one_session(cost: float = 0.05, **times: float) -> Load:
    return Load(Steady(1.0), Steady(cost), 1, **times)


def test_the_formula_is_the_published_one() -> None:
    assert closed_form(0.8, 5, 0.05) == pytest.approx((1 - 0.8**6) / 0.2 / 1.25)
    assert closed_form(1.0, 4, 0.25) == pytest.approx(2.5)
    assert closed_form(0.0, 4, 0.0) == 1.0


@pytest.mark.parametrize("alpha", [0.0, 0.45, 0.8, 1.0])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_round_of_one_session_without_overhead_is_the_formula(alpha: float, size: int) -> None:
    assert waiting(one_session(), (alpha,), size).speedup == pytest.approx(closed_form(alpha, size, 0.05))


def test_acceptance_goes_by_position_and_the_last_holds_on() -> None:
    assert tokens_per_round((0.9, 0.5), 3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)
    assert tokens_per_round((0.9, 0.5), 1.5) == pytest.approx(1 + 0.9 + 0.225)
    assert tokens_per_round((0.9,), 0) == 1.0


def test_the_best_size_grows_with_acceptance_and_none_is_best_where_nothing_is_accepted() -> None:
    def chosen(alpha: float) -> float:
        load = one_session(0.11)
        options = [plain(load), *(waiting(load, (alpha,), size) for size in range(1, 13))]
        return best(options).num_speculative_tokens

    sizes = [chosen(alpha) for alpha in (0.05, 0.4, 0.6, 0.75, 0.85)]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 0


def test_overhead_counts_once_a_round() -> None:
    free, dear = waiting(one_session(), (0.8,), 4), waiting(one_session(wait_s=0.3), (0.8,), 4)
    assert dear.round_s - free.round_s == pytest.approx(0.3)


def test_hits_cost_no_draft_time() -> None:
    always = running_ahead(one_session(0.2), (0.8,), 4, hit_rate=1.0)
    assert always.round_s == pytest.approx(1.0)
    assert always.speedup == pytest.approx(closed_form(0.8, 4, 0.0))
    assert running_ahead(one_session(0.2), (0.8,), 4, hit_rate=0.0).speedup == pytest.approx(closed_form(0.8, 4, 0.2))


def test_a_miss_goes_on_plainly_where_waiting_is_dearer() -> None:
    slow = running_ahead(one_session(1.0), (0.8,), 4, hit_rate=0.9)
    assert slow.misses == "plain"
    assert slow.tokens_per_round == pytest.approx(0.9 * tokens_per_round((0.8,), 4) + 0.1)
    assert running_ahead(one_session(0.01), (0.8,), 4, hit_rate=0.9).misses == "wait"


def test_without_waiting_speed_is_the_bound_of_the_bench() -> None:
    times = DeviceTimes(step_s=0.02, row_share=0.01, context_token_s=1e-6)
    load = Load(ProfiledDevice(times, 500), Steady(0.002), 8)
    found = running_ahead(load, (0.8,), 4, hit_rate=1.0)
    assert found.speedup == pytest.approx(no_overhead_bound(times, 8, tokens_per_round((0.8,), 4), 4.0, 500.0))


def test_of_two_sessions_one_is_verified_while_the_other_drafts() -> None:
    found = waiting(Load(Steady(1.0), Steady(0.1), 2), (0.8,), 4)
    assert found.round_s == pytest.approx(2.0)
    assert found.speedup == pytest.approx(tokens_per_round((0.8,), 4) / 2.0)


def test_a_slow_draft_lets_several_forwards_pass() -> None:
    assert waiting(Load(Steady(1.0), Steady(0.6), 16), (0.8,), 4).round_s == pytest.approx(1.0 + 3.0)
    assert waiting(Load(Steady(1.0), Steady(0.6), 2), (0.8,), 4).round_s == pytest.approx(1.0 + 2.4)


def test_running_ahead_has_the_time_of_a_verification() -> None:
    foresight = Foresight(recall=1.0, num_ranked=4)
    roomy, tight = (best_ahead(one_session(cost), (0.8,), 12, foresight) for cost in (0.1, 0.4))
    assert len(roomy) == 12
    assert tight[-1].num_speculative_tokens <= 2.0 < roomy[-1].num_speculative_tokens <= 10.0
    assert [speed.speedup for speed in roomy] == sorted(speed.speedup for speed in roomy)


def test_running_ahead_is_never_worse_than_what_it_can_fall_back_to() -> None:
    hopeless = best_ahead(one_session(0.1, reserve_s=2.0), (0.8,), 8, Foresight(0.9, 4))[-1]
    assert hopeless.speedup == max(waiting(one_session(0.1), (0.8,), size).speedup for size in range(1, 9))
    assert best_ahead(one_session(1.0, reserve_s=2.0), (0.1,), 8, Foresight(0.9, 4))[-1] == plain(one_session())


def test_a_measured_hit_rate_takes_the_place_of_the_one_worked_out() -> None:
    load = one_session(0.05)
    worked_out, measured = (best_ahead(load, (0.8,), 6, Foresight(0.9, 4, hit_rate=rate))[-1] for rate in (None, 0.5))
    assert measured.hit_rate == 0.5 < worked_out.hit_rate
    assert measured.speedup < worked_out.speedup
