"""Owns what a system under comparison is: the modes it has, and what it gives back for a prompt.

All are asked for the same: the greedy continuation, as many tokens as the prompt's line allows. What else a line says
of sampling is left out, because not every system knows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.prompts import Prompt

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Output:
    """One greedy continuation.

    Attributes:
        token_ids: of the continuation; of a system that gives text only, the text encoded, which differs if and only
            if the text does.
        num_decoded: tokens that came after the first arrival; those that came with it are the prompt's forward's.
        decode_s: seconds from the first arrival to the last.
    """

    token_ids: tuple[int, ...]
    num_decoded: int
    decode_s: float


class Peer(Protocol):
    """A system, with speculation of its own on and off."""

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> Sequence[str]:
        """`bench.modes.PLAIN` first, then the speculative ones."""

    def generate(self, prompt: Prompt, mode: str) -> Output:
        """Runs one prompt to its end; nothing else runs meanwhile. Raises OutriderError."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A mode that is not measured here; `mode` is "" where it is the whole system."""

    system: str
    mode: str
    reason: str


def max_tokens(prompt: Prompt) -> int:
    """Most tokens to generate for a prompt."""
    return int(prompt.sampling.get("max_tokens", DEFAULT_MAX_TOKENS))


class Arrivals:
    """Tokens of one output as they come.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._first_s = self._last_s = 0.0
        self._token_ids: list[int] = []
        self._num_first = 0

    def came(self, token_ids: Iterable[int]) -> None:
        """Some tokens are there now; none at all is no arrival."""
        new = tuple(token_ids)
        if not new:
            return
        self._last_s = self._clock()
        if not self._token_ids:
            self._first_s, self._num_first = self._last_s, len(new)
        self._token_ids += new

    def output(self) -> Output:
        num_decoded = len(self._token_ids) - self._num_first
        return Output(tuple(self._token_ids), num_decoded, self._last_s - self._first_s)
