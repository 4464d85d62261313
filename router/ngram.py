"""Owns the n-gram drafter (prompt lookup): proposes what followed the last tokens when they occurred before.

An index over prompt and committed tokens keeps, per n-gram of the two shortest lengths, its latest position and for
each position the one before it with the same n-gram. Adding a token is O(1); a lookup visits at most
`max_candidates` earlier places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """How the drafter looks things up.

    Attributes:
        max_ngram: matches longer than this count as equally good.
        min_ngram: shortest match that is used, 1 or 2.
        max_candidates: earlier places that one lookup compares.
    """

    max_ngram: int = 12
    min_ngram: int = 1
    max_candidates: int = 8


@dataclass(frozen=True, slots=True)
class NgramMatch:
    """A continuation found earlier in the sequence.

    Attributes:
        tokens: the proposed chain, at least one token.
        match_length: how many of the last tokens agree with the place it was copied from, at most max_ngram.
        num_places: earlier places that match as long as this one.
        agreement: share of them that continue with the first proposed token.
    """

    tokens: tuple[int, ...]
    match_length: int
    num_places: int = 1
    agreement: float = 1.0


class NgramDrafter:
    """One session's index. Grows with the committed tokens and is never rolled back: it only sees committed ones."""

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        # before[n - 1][i]: the previous position where the n-gram that ends at i ended, or -1.
        self._before: tuple[list[int], list[int]] = ([], [])

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds committed tokens; O(len(tokens))."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens) - 1
            for size, before in enumerate(self._before, start=1):
                key = tuple(self._tokens[-size:])
                before.append(self._latest.get(key, -1) if end >= size - 1 else -1)
                self._latest[key] = end

    def lookup(self, num_tokens: int) -> NgramMatch | None:
        """Up to `num_tokens` tokens that followed the longest earlier match; None without a match."""
        places = self._places()
        longest = max((length for _, length in places), default=0)
        if num_tokens < 1 or longest < max(1, self._config.min_ngram):
            return None
        starts = [start for start, length in places if length == longest]
        tokens = self._continuation(starts, num_tokens)
        agreeing = sum(self._tokens[start] == tokens[0] for start in starts)
        return NgramMatch(tokens, longest, len(starts), agreeing / len(starts))

    def _places(self) -> list[tuple[int, int]]:
        """Earlier positions (of the token that continues there) with their match length, latest first."""
        end = len(self._tokens) - 1
        if end < 1:
            return []
        before = self._before[1] if self._before[1][end] >= 0 else self._before[0]
        places: list[tuple[int, int]] = []
        position = before[end]
        while position >= 0 and len(places) < self._config.max_candidates:
            places.append((position + 1, self._match_length(position, end)))
            position = before[position]
        return places

    def _match_length(self, position: int, end: int) -> int:
        """How many tokens up to `position` equal those up to `end`."""
        length = 0
        limit = min(self._config.max_ngram, position + 1)
        while length < limit and self._tokens[position - length] == self._tokens[end - length]:
            length += 1
        return length

    def _continuation(self, starts: list[int], num_tokens: int) -> tuple[int, ...]:
        """Follows the token that most of the places continue with, the latest place where they tie.

        A copy that reaches the end of the sequence goes on in what it has copied itself, so a loop is proposed whole.
        """
        copied: list[int] = []
        for offset in range(num_tokens):
            following = [self._token_at(start + offset, copied) for start in starts]
            token = max(following, key=following.count)
            starts = [start for start, other in zip(starts, following, strict=True) if other == token]
            copied.append(token)
        return tuple(copied)

    def _token_at(self, position: int, copied: list[int]) -> int:
        known = len(self._tokens)
        return self._tokens[position] if position < known else copied[position - known]
