from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from router.detokenizer import Detokenizer
from router.tokenizer import Tokenizer

TEXTS = [
    "hello 👋 world",
    "안녕하세요 세계",
    "family 👨‍👩‍👧‍👦!",
    "a real one \ufffd",
    "\ufffd\ufffd in front",
    "",
    "e\u0301 combining",
]


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    parts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


def test_text_is_not_held_back_longer_than_its_characters_need(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    detokenizer = Detokenizer(tokenizer)
    for count, token_id in enumerate(ids, start=1):
        assert detokenizer.push(token_id) == tokenizer.decode(ids[:count])[len(tokenizer.decode(ids[: count - 1])) :]


def test_unfinished_character_at_the_end_is_given_out_as_it_is(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x👋")[:-1]
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == "x\ufffd"
    assert parts[-1] == "\ufffd"


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_ids_concatenate_to_the_plain_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    skip = data.draw(st.booleans())
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_text_is_the_same_however_tokens_arrive(tokenizer: Tokenizer, data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=6), max_size=6))
    singly, at_once = Detokenizer(tokenizer), Detokenizer(tokenizer)
    for block in blocks:
        assert at_once.push(*block) == "".join(map(singly.push, block))
    assert at_once.flush() == singly.flush()


def test_later_leading_spaces_survive_a_decoder_that_strips_the_first(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "▁the": 2, "▁fox": 3, "<0xF0>": 4, "<0x9F>": 5, "<0x91>": 6, "<0x8B>": 7}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = [1, 2, 1, 3, 4, 5, 6, 7, 3]
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == "the fox👋 fox"
    assert not any("\ufffd" in part for part in parts)
