"""Filters against their definitions and against transformers; ties; what a draft sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.distributions import greedy_tokens, sample, target_probs, truncate_to_sparse
from engine.proposal import Proposal, SparseProbs, State
from engine.sampling import SamplingParams


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def by_definition(row: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """One row, everything sorted: temperature, top-k, top-p, min-p."""
    scores = row.astype(np.float64)
    weights = np.exp((scores - scores.max()) / sampling.temperature)
    order = np.lexsort((np.arange(len(row)), -scores))[: sampling.top_k or None]
    probs = weights[order] / weights[order].sum()
    if sampling.top_p < 1.0:
        probs = probs[: int((probs.cumsum() - probs < sampling.top_p).sum())]
    probs = np.where(probs >= sampling.min_p * probs[0], probs, 0.0)
    return np.bincount(order[: len(probs)], weights=probs / probs.sum(), minlength=len(row))


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.01, 0.5, 1.0, 2.0)),
    top_k=st.sampled_from((0, 1, 5, 300, 10_000)),
    top_p=st.sampled_from((0.01, 0.5, 0.9, 0.999, 1.0)),
    min_p=st.sampled_from((0.0, 0.1, 1.0)),
)


@settings(deadline=None)
@given(samplings, st.sampled_from((3, 200, 1000, 5000)), st.integers(0, 1000), st.booleans())
def test_target_probs_follow_the_definitions(sampling: SamplingParams, vocab: int, seed: int, coarse: bool) -> None:
    """Coarse logits tie by the hundred, as bfloat16 does, so that every cut falls among equals."""
    logits = random_logits(2, vocab, seed)
    logits = logits.round() if coarse else logits
    expected = np.array([by_definition(row, sampling) for row in logits.numpy()])
    np.testing.assert_allclose(target_probs(logits, sampling).numpy(), expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.8, 0.0), (50, 0.95, 0.05)]
)
def test_target_probs_equal_those_of_transformers(top_k: int, top_p: float, min_p: float) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    logits = random_logits(4, 2000, seed=5)
    expected = warpers(torch.zeros(4, 1, dtype=torch.int64), logits.double()).softmax(-1)
    ours = target_probs(logits, SamplingParams(0.7, top_k, top_p, min_p))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-15)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """One row needs a full sort, the other a few ranks: together they are what they are alone."""
    logits = torch.cat((random_logits(1, 9000, 1, 0.1), random_logits(1, 9000, 2, 8.0)))
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    together = target_probs(logits, sampling)
    assert torch.equal(together[0], target_probs(logits[:1], sampling)[0])
    assert torch.equal(together[1], target_probs(logits[1:], sampling)[0])


def test_banned_ids_have_no_probability() -> None:
    probs = target_probs(random_logits(3, 10), SamplingParams(temperature=1.0), banned={2, 9})
    assert (probs[:, [2, 9]] == 0.0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, dtype=torch.float64))
    assert greedy_tokens(torch.eye(4), banned=(1,)) == [0, 0, 2, 3]


def test_the_lowest_temperature_is_still_a_distribution() -> None:
    probs = target_probs(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), SamplingParams(temperature=5e-324))
    assert probs.tolist() == [[0.0, 0.5, 0.5, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lower_of_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 1000, dtype=dtype)
    logits[0, [700, 300]] = 1.0
    assert greedy_tokens(logits) == [300, 0]


@pytest.mark.parametrize("row", [[float("nan"), 1.0], [float("inf"), 1.0], [-float("inf")] * 2])
def test_broken_rows_are_an_error(row: list[float]) -> None:
    logits = torch.tensor([[0.0, 1.0], row])
    for call in (
        lambda: greedy_tokens(logits),
        lambda: target_probs(logits, SamplingParams(temperature=1.0)),
        lambda: truncate_to_sparse(logits, SamplingParams(temperature=1.0), 2),
    ):
        with pytest.raises(RuntimeError, match="not finite"):
            call()


@settings(deadline=None)
@given(samplings, st.sampled_from((1, 4, 64)), st.integers(0, 1000))
def test_a_draft_sends_the_top_of_its_own_distribution(sampling: SamplingParams, num_tokens: int, seed: int) -> None:
    logits = random_logits(2, 500, seed)
    ids, probs = truncate_to_sparse(logits, sampling, num_tokens)
    assert ids.shape == probs.shape == (2, num_tokens)
    assert probs.dtype == torch.float32
    for row in range(2):
        expected = by_definition(logits[row].numpy(), sampling)[ids[row].numpy()]
        np.testing.assert_allclose(probs[row].numpy(), expected / expected.sum(), rtol=1e-5, atol=1e-9)
        sparse = SparseProbs(tuple(ids[row].tolist()), tuple(probs[row].tolist()))
        assert Proposal.chain(State(), ids[row, :1].tolist(), draft_probs=(sparse,)).flaw(500, 8) is None


def test_a_draft_never_asks_for_more_than_the_vocabulary() -> None:
    ids, _ = truncate_to_sparse(random_logits(1, 5), SamplingParams(temperature=1.0, top_k=9), 64)
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3, 4]


def test_draws_follow_the_probabilities_and_never_hit_a_zero() -> None:
    probs = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]).repeat(50_000, 1)
    counts = sample(probs, torch.Generator().manual_seed(3)).bincount(minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    from scipy.stats import chisquare

    assert chisquare(counts[[1, 3, 4]].numpy(), [10_000, 25_000, 15_000]).pvalue > 0.01
