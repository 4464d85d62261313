"""The shared noise: fixed bits, right distribution, no dependence between tokens, positions and seeds."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare, kstest, pearsonr

from engine.distributions import target_probs
from engine.judge import shared_choice
from engine.noise import gumbel, gumbel_rows
from engine.sampling import SamplingParams

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
GOLDEN = [0.06942098740603596, -0.25007259451348574, 1.9421787565110795]


def mixed(z: int) -> int:
    """splitmix64's output function in plain integers."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_reference_is_splitmix64() -> None:
    """The generator's published first outputs for seed 0."""
    assert [mixed(i * STEP) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (42, 7), (-1, 100_000), (2**63 - 1, 1), (-(2**63), 5)])
def test_wrapping_tensor_arithmetic_gives_the_bits_of_plain_integers(seed: int, position: int) -> None:
    stream = mixed(mixed(seed + STEP) ^ mixed(position + 2 * STEP))
    ids = [0, 1, 11, 151_935]
    bits = [mixed(stream + (token + 1) * STEP) >> 12 for token in ids]
    expected = [-math.log(-math.log((b + 0.5) * 2.0**-52)) for b in bits]
    assert gumbel(seed, position, torch.tensor(ids)).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_noise_of_a_seed_never_changes() -> None:
    """A request resumed on a newer version must go on as it began."""
    noise = gumbel(1234, 56, torch.tensor([0, 1, 49_151]))
    assert noise.tolist() == pytest.approx(GOLDEN, rel=1e-12)


def test_a_part_of_the_vocabulary_gets_the_noise_of_the_whole() -> None:
    whole = gumbel(3, 9, torch.arange(1000))
    part = torch.tensor([999, 0, 512])
    assert torch.equal(gumbel(3, 9, part), whole[part])
    assert torch.equal(gumbel_rows([1, 3], [9, 9], part.expand(2, -1))[1], whole[part])


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_gumbel_and_independent_along_every_axis(axis: str) -> None:
    count = torch.arange(40_000)
    if axis == "token":
        noise = gumbel(5, 5, count)
    elif axis == "position":
        noise = gumbel_rows([5] * 40_000, count.tolist(), torch.full((40_000, 1), 5)).squeeze(-1)
    else:
        noise = gumbel_rows(count.tolist(), [5] * 40_000, torch.full((40_000, 1), 5)).squeeze(-1)
    assert noise.dtype == torch.float64
    assert kstest(noise.numpy(), "gumbel_r").pvalue > 0.01
    assert pearsonr(noise[:-1].numpy(), noise[1:].numpy()).pvalue > 0.01


def test_the_noisy_argmax_draws_from_the_target_jointly() -> None:
    """Over seeds, the choices at three positions are independent draws from the filtered distribution."""
    logits = 2.0 * torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    probs = target_probs(logits, SamplingParams(temperature=0.8, top_k=4))[0]
    seeds, vocab = list(range(60_000)), torch.arange(8).expand(60_000, -1)
    choices = [(probs.log() + gumbel_rows(seeds, [at] * 60_000, vocab)).argmax(-1) for at in (10, 11, 12)]
    counts = (choices[0] * 64 + choices[1] * 8 + choices[2]).bincount(minlength=512).double()
    expected = 60_000 * torch.einsum("i,j,k->ijk", probs, probs, probs).flatten()
    assert counts[expected == 0].sum() == 0
    assert expected[expected > 0].min() > 5
    assert chisquare(counts[expected > 0].numpy(), expected[expected > 0].numpy()).pvalue > 0.01
    assert [shared_choice(probs, seed, 10) for seed in seeds[:50]] == choices[0][:50].tolist()
