from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.proposal import FinishReason
from router.detokenizer import Detokenizer
from router.stopping import Output, Piece, StopStrings, TextStream
from router.tokenizer import Tokenizer


class Spelled(Detokenizer):
    """Token i is the text `spelling[i]`; the last one stays back until the end."""

    def __init__(self, spelling: list[str], tail: str = "") -> None:
        self._spelling, self._tail = spelling, tail

    def push(self, *token_ids: int) -> str:
        return "".join(self._spelling[token_id] for token_id in token_ids)

    def flush(self) -> str:
        return self._tail


def run(spelling: list[str], blocks: list[int], stops: StopStrings, tail: str = "") -> tuple[str, int, str | None]:
    """Text, number of tokens and stop of an output that arrives in blocks and then ends by length."""
    stream = TextStream(Spelled(spelling, tail), stops)
    text, delivered, position = "", 0, 0
    for size in blocks:
        piece = stream.push(range(position, min(position + size, len(spelling))))
        position += size
        text, delivered = text + piece.text, delivered + len(piece.token_ids)
        if piece.matched_stop is not None:
            return text, delivered, piece.matched_stop
    last = stream.finish()
    return text + last.text, delivered, last.matched_stop


def oracle(spelling: list[str], stops: StopStrings, tail: str = "") -> tuple[str, int, str | None]:
    """Looks through all prefixes of the whole output, one token longer each time."""
    prefixes = list(itertools.accumulate(spelling, initial=""))
    for count in range(1, len(spelling) + 2):
        last = count == len(spelling) + 1
        text = prefixes[-1] + tail if last else prefixes[count]
        num_tokens = min(count, len(spelling))
        if num_tokens <= stops.min_tokens:
            continue
        before = len(prefixes[count - 1])
        found = [
            (start, order, stop)
            for order, stop in enumerate(stops.strings)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if found:
            start, _, stop = min(found)
            return text[: start + (len(stop) if stops.include_in_output else 0)], num_tokens, stop
    return prefixes[-1] + tail, len(spelling), None


words = st.text("ab", max_size=3)


@given(
    spelling=st.lists(words, max_size=12),
    blocks=st.lists(st.integers(1, 5), min_size=12, max_size=12),
    strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
    tail=words,
)
@settings(max_examples=600, deadline=None)
def test_equals_the_oracle_however_tokens_arrive(
    spelling: list[str], blocks: list[int], strings: list[str], min_tokens: int, include: bool, tail: str
) -> None:
    stops = StopStrings(tuple(strings), min_tokens, include)
    assert run(spelling, blocks, stops, tail) == oracle(spelling, stops, tail)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stop_inside_a_block_cuts_text_and_ids_together(size: int) -> None:
    stops = StopStrings(("STOP",))
    assert run(["one ", "ST", "OP two", " three"], [size] * 4, stops) == ("one ", 3, "STOP")


def test_text_that_may_become_a_stop_is_held_back_and_only_that() -> None:
    stream = TextStream(Spelled(["say </", "tool", "s>"]), StopStrings(("</tool>",)))
    assert stream.push([0]) == Piece("say ", (0,))
    assert stream.push([1]) == Piece("", (1,))
    assert stream.push([2]) == Piece("</tools>", (2,))


def test_stop_that_ends_within_min_tokens_does_not_count() -> None:
    spelling = ["a", "stop", "b", "stop"]
    assert run(spelling, [4], StopStrings(("stop",), min_tokens=2)) == ("astopb", 4, "stop")
    assert run(spelling, [4], StopStrings(("stop",), min_tokens=1)) == ("a", 2, "stop")


def test_ending_token_is_delivered_as_a_token_and_as_text_only_if_asked() -> None:
    for include, text in ((False, ""), (True, "END")):
        stream = TextStream(Spelled(["END"]), StopStrings(include_in_output=include))
        assert stream.finish(0) == Piece(text, (0,))


def test_stop_made_of_an_unfinished_character_is_seen_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x👋")[:-1]
    stream = TextStream(Detokenizer(tokenizer), StopStrings(("\ufffd",)))
    assert stream.push(ids).text == "x"
    assert stream.finish() == Piece("", (), "\ufffd")


def delivered(output: Output, blocks: list[list[int]], finish: FinishReason, *, singly: bool) -> tuple[object, ...]:
    """Text, ids and end of an output that takes `blocks`, the last of which the target ended."""
    pieces: list[Piece] = []
    for number, block in enumerate(blocks, start=1):
        finish_reason = finish if number == len(blocks) else None
        if singly:
            new = output.take_singly(block, finish_reason)
            assert all(len(piece.token_ids) <= 1 for piece in new)
        else:
            new = [output.take(block, finish_reason)]
        pieces += new
        if output.finish_reason is not None:
            break
    text, ids = "".join(piece.text for piece in pieces), [id_ for piece in pieces for id_ in piece.token_ids]
    return text, ids, output.finish_reason, output.matched_stop, output.num_tokens


@given(
    written=st.text(st.sampled_from("ab👋é\ufffd"), max_size=12),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    strings=st.lists(st.text(st.sampled_from("ab👋\ufffd"), min_size=1, max_size=3), max_size=2),
    finish=st.sampled_from(["stop", "length"]),
    unfinished=st.integers(0, 2),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_token_by_token_an_output_is_the_same(
    tokenizer: Tokenizer, written: str, cuts: list[int], strings: list[str], finish: FinishReason, unfinished: int
) -> None:
    ids = tokenizer.encode(written)
    ids = [*ids[: len(ids) - unfinished], 2]
    blocks, position = [], 0
    for size in cuts:
        if position < len(ids):
            blocks.append(ids[position : position + size])
            position += size
    blocks += [ids[position:]] if position < len(ids) else []

    def fresh() -> Output:
        return Output(TextStream(Detokenizer(tokenizer), StopStrings(tuple(strings))))

    whole = delivered(fresh(), [ids], finish, singly=False)
    assert delivered(fresh(), blocks, finish, singly=False) == whole
    assert delivered(fresh(), blocks, finish, singly=True) == whole


def test_an_output_that_ends_without_a_token_ends_token_by_token_too(tokenizer: Tokenizer) -> None:
    output = Output(TextStream(Detokenizer(tokenizer), StopStrings(("the",))))
    ids = tokenizer.encode("th")
    assert [piece.text for piece in output.take_singly(ids, None)] == [""] * len(ids)
    assert output.take_singly((), "length") == [Piece("th", ())]
    assert (output.finish_reason, output.num_tokens) == ("length", len(ids))
