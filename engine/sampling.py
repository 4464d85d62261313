"""Owns what a caller may ask of sampling and stopping, and the rules for those values. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the target's distribution.

    Attributes:
        temperature: 0 is greedy; above 0 logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        seed: shared-noise mode of docs/design.md §5; None draws from the engine's own generator.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, prefix: str = "sampling_params") -> None:
        """Raises InvalidArgument naming the first field out of range."""
        checks: tuple[tuple[str, float | int | None, bool, str], ...] = (
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("seed", self.seed, self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
        )
        for name, value, ok, allowed in checks:
            if not ok or (isinstance(value, float) and math.isnan(value)):
                raise InvalidArgument(f"{prefix}.{name}", value, allowed)


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends, as far as token ids can tell. Stop *strings* are the router's, which owns the text.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        min_tokens: until so many were generated, EOS and stop token ids cannot be drawn.
        ignore_eos: EOS is an ordinary token.
        stop_token_ids: further ids that end the sequence; the id itself is delivered.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def validate(self, vocab_size: int, prefix: str = "sampling_params") -> None:
        """Raises InvalidArgument naming the first field out of range."""
        if self.max_tokens < 1:
            raise InvalidArgument(f"{prefix}.max_tokens", self.max_tokens, "1 or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidArgument(f"{prefix}.min_tokens", self.min_tokens, f"0 to max_tokens ({self.max_tokens})")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidArgument(f"{prefix}.stop_token_ids", token, f"0 to {vocab_size - 1}")

    def ending_ids(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """Ids that end a sequence under these rules."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))
