"""What the emulated models say, without an engine: the tokens that must come, whatever a fuzzer does beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from engine.distributions import target_probs
from engine.emulated import extended, identity_of
from engine.errors import InvalidArgument
from engine.judge import shared_choice
from engine.sampling import SamplingParams
from engine.stubs import Stub
from tests.fuzz.stage import EMULATION

TARGET, DRAFT = EMULATION.target_stub(), EMULATION.draft_stub()


def is_foreseeable(sampling: SamplingParams) -> bool:
    """Whether values that are allowed leave only one output: otherwise it depends on an engine's generator."""
    try:
        sampling.validate()
    except InvalidArgument:
        return False
    return sampling.greedy or sampling.seed is not None


def continuation(
    stub: Stub, vocab_size: int, tokens: Sequence[int], num_tokens: int, sampling: SamplingParams
) -> list[int]:
    """What `stub` puts behind `tokens` in a greedy or seeded request."""
    prefix, found = identity_of(tokens), []
    for length in range(len(tokens), len(tokens) + num_tokens):
        found.append(_next(stub, vocab_size, prefix, length, sampling))
        prefix = extended(prefix, found[-1])
    return found


@lru_cache(maxsize=1 << 16)
def _next(stub: Stub, vocab_size: int, prefix: int, length: int, sampling: SamplingParams) -> int:
    row = stub.logits(np.array([prefix], dtype=np.uint64), np.array([length]))[:, :vocab_size]
    if sampling.greedy:
        return int(row[0].argmax())
    assert sampling.seed is not None
    return shared_choice(target_probs(torch.from_numpy(row), sampling)[0], sampling.seed, length)
