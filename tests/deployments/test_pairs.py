"""A pair fits when both sides give every id the same meaning; anything else is refused by name (case A10)."""

from __future__ import annotations

import pytest

from deployments.pairs import check_pair
from engine.errors import ModelNotFound, PairMismatch


def test_the_same_vocabulary_fits(model_folder) -> None:
    pair = check_pair(model_folder("draft"), model_folder("target"))
    assert pair.vocab_size == 256 + 2 + 1


def test_embeddings_padded_differently_fit(model_folder) -> None:
    pair = check_pair(model_folder("draft", padding=61), model_folder("target", padding=125))
    assert (pair.vocab_size, pair.draft_rows, pair.target_rows) == (259, 320, 384)


def test_the_first_differing_token_is_named(model_folder) -> None:
    draft = model_folder("draft", merges=[("t", "h"), ("i", "n")])
    with pytest.raises(PairMismatch, match="token id 257 is 'in' in draft but 'the' in target"):
        check_pair(draft, model_folder("target"))


def test_a_longer_vocabulary_is_a_difference(model_folder) -> None:
    draft = model_folder("draft", specials=["<end>", "<tool>"])
    with pytest.raises(PairMismatch, match="token id 259 is '<tool>' in draft but no token in target"):
        check_pair(draft, model_folder("target"))


def test_a_changed_special_token_is_named(model_folder) -> None:
    with pytest.raises(PairMismatch, match="token id 258 is '<stop>' in draft but '<end>' in target"):
        check_pair(model_folder("draft", specials=["<stop>"]), model_folder("target"))


def test_an_embedding_smaller_than_the_tokenizer_is_refused(model_folder) -> None:
    with pytest.raises(PairMismatch, match="draft: its embedding has 256 rows"):
        check_pair(model_folder("draft", padding=-3), model_folder("target"))


def test_a_distilled_draft_borrows_the_tokenizer_of_its_target(model_folder) -> None:
    draft = model_folder("draft", config={"outrider_draft": {}})
    (draft / "tokenizer.json").unlink()
    assert check_pair(draft, model_folder("target")).vocab_size == 259


def test_a_distilled_draft_of_another_target_is_refused(model_folder) -> None:
    draft = model_folder("draft", config={"outrider_draft": {}, "hidden_size": 32})
    with pytest.raises(PairMismatch, match="hidden_size is 32; that of target is 64"):
        check_pair(draft, model_folder("target"))


def test_a_missing_tokenizer_is_named(model_folder) -> None:
    draft = model_folder("draft")
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"draft/tokenizer\.json does not exist"):
        check_pair(draft, model_folder("target"))
