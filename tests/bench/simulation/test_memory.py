"""Whether a model fits on GPUs that are only named, and what would."""

from __future__ import annotations

import pytest

from bench.simulation.hardware import GPUS
from bench.simulation.memory import MemoryPlan, plan_gpu
from bench.simulation.models import MODELS
from engine.errors import InvalidArgument


def planned(model: str, gpu: str, num_gpus: int, sessions: int, context: int, share: float = 0.9) -> MemoryPlan:
    return plan_gpu(MODELS[model], GPUS[gpu], num_gpus, (sessions, context), share)


def test_a_70b_on_four_gpus() -> None:
    plan = planned("llama-3-70b", "h100-80gb", 4, 64, 2048)
    assert plan.weights == pytest.approx(35.3e9, rel=1e-3)
    assert plan.kv_token == 80 * 1024
    assert plan.num_blocks == 64 * 128 + 1
    assert plan.kv_blocks == plan.num_blocks * 16 * 80 * 1024
    assert plan.headroom == pytest.approx(72e9 - plan.weights - plan.kv_blocks)
    assert (plan.fits, plan.advice()) == (True, "")


def test_what_is_said_to_fit_fits_and_no_more() -> None:
    plan = planned("llama-3-70b", "h100-80gb", 4, 1000, 2048)
    assert not plan.fits
    assert planned("llama-3-70b", "h100-80gb", 4, plan.most_sessions, 2048).fits
    assert not planned("llama-3-70b", "h100-80gb", 4, plan.most_sessions + 1, 2048).fits
    assert planned("llama-3-70b", "h100-80gb", 4, 1000, plan.longest_context).fits
    assert not planned("llama-3-70b", "h100-80gb", 4, 1000, plan.longest_context + 1).fits


def test_more_gpus_are_offered_where_they_help() -> None:
    plan = planned("llama-3-70b", "a100-80gb", 1, 8, 2048)
    assert (plan.most_sessions, plan.longest_context, plan.fitting_sizes) == (0, 0, (4, 8))
    assert plan.advice() == "4 such GPUs"
    assert all(planned("llama-3-70b", "a100-80gb", size, 8, 2048).fits for size in plan.fitting_sizes)


def test_a_slice_offers_no_others_beside_it() -> None:
    plan = planned("llama-3.2-1b", "a100-40gb-1g.5gb", 1, 64, 2048)
    assert plan.fitting_sizes == ()
    assert (
        plan.advice() == f"{plan.most_sessions} sessions of this context or a context of {plan.longest_context} tokens"
    )
    assert planned("llama-3-8b", "a100-40gb-1g.5gb", 1, 1, 16).advice() == "no number of such GPUs"


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="found 3"):
        planned("llama-3-70b", "h100-80gb", 3, 1, 16)
