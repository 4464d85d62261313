from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.ngram import NgramConfig, NgramDrafter, NgramMatch

tokens = st.lists(st.integers(0, 4), max_size=60)


def drafter(sequence: list[int], **config: int) -> NgramDrafter:
    made = NgramDrafter(NgramConfig(**config))
    made.extend(sequence)
    return made


def longest_suffix_seen_before(sequence: list[int], limit: int) -> int:
    """Length of the longest suffix that also ends earlier, by trying all of them."""
    seen = 0
    for length in range(1, min(limit, len(sequence) - 1) + 1):
        suffix = sequence[-length:]
        if any(sequence[end - length : end] == suffix for end in range(length, len(sequence))):
            seen = length
    return seen


@given(tokens)
@settings(max_examples=300, deadline=None)
def test_match_is_the_longest_there_is(sequence: list[int]) -> None:
    match = drafter(sequence, max_ngram=6, max_candidates=1000).lookup(5)
    expected = longest_suffix_seen_before(sequence, 6)
    assert (0 if match is None else match.match_length) == expected


@given(tokens, st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_proposal_continues_an_earlier_place_with_the_same_ending(sequence: list[int], num_tokens: int) -> None:
    match = drafter(sequence).lookup(num_tokens)
    if match is None:
        return
    assert len(match.tokens) == num_tokens
    ending = sequence[-match.match_length :]
    extended = sequence + list(match.tokens)
    places = [end for end in range(1, len(sequence)) if sequence[max(0, end - len(ending)) : end] == ending]
    assert any(extended[end : end + num_tokens] == list(match.tokens) for end in places)


@given(tokens, st.data())
@settings(max_examples=100, deadline=None)
def test_growing_in_steps_equals_growing_at_once(sequence: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(sequence)))
    grown = drafter(sequence[:cut])
    grown.extend(sequence[cut:])
    assert grown.lookup(7) == drafter(sequence).lookup(7)


def test_copies_on_through_a_repeated_passage() -> None:
    passage = [5, 6, 7, 8, 9, 10, 11, 12]
    match = drafter([*passage, 1, 2, *passage[:4]]).lookup(4)
    assert match == NgramMatch((9, 10, 11, 12), 4)


def test_loop_is_proposed_whole() -> None:
    match = drafter([1, 2, 3, 1, 2, 3, 1]).lookup(7)
    assert match is not None
    assert match.tokens == (2, 3, 1, 2, 3, 1, 2)


def test_the_commonest_continuation_wins_and_says_how_common_it_is() -> None:
    match = drafter([7, 2, 0, 7, 3, 4, 7, 2, 5, 7]).lookup(1)
    assert match == NgramMatch((2,), 1, 3, 2 / 3)


@pytest.mark.parametrize("sequence", [[], [1], [1, 2, 3]])
def test_nothing_seen_before_is_no_match(sequence: list[int]) -> None:
    assert drafter(sequence).lookup(5) is None


def test_no_tokens_wanted_is_no_match() -> None:
    assert drafter([1, 1, 1]).lookup(0) is None


def test_single_token_matches_can_be_ruled_out() -> None:
    sequence = [1, 9, 2, 9]
    assert drafter(sequence, min_ngram=1).lookup(1) == NgramMatch((2,), 1)
    assert drafter(sequence, min_ngram=2).lookup(1) is None


def test_lookup_looks_at_a_bounded_number_of_places() -> None:
    rng = random.Random(0)
    sequence = [rng.randrange(3) for _ in range(5000)]
    match = drafter(sequence, max_candidates=8).lookup(7)
    assert match is not None
    assert match.num_places <= 8
