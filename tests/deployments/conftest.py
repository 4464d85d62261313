"""Made-up model folders: a byte-level tokenizer and a configuration, no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

ModelFolder = Callable[..., Path]


def byte_tokenizer(merges: list[tuple[str, str]], specials: list[str]) -> tokenizers.Tokenizer:
    """Bytes, a few merges, special tokens at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(specials)
    return made


@pytest.fixture
def model_folder(tmp_path: Path) -> ModelFolder:
    """Makes a folder: model_folder("draft", merges=…, specials=…, padding=…, config=…)."""

    def make(
        name: str,
        merges: list[tuple[str, str]] | None = None,
        specials: list[str] | None = None,
        padding: int = 0,
        config: dict[str, object] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        tokenizer = byte_tokenizer(merges or [("t", "h"), ("th", "e")], specials or ["<end>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        content = {
            "vocab_size": tokenizer.get_vocab_size() + padding,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "eos_token_id": tokenizer.token_to_id("<end>"),
            **(config or {}),
        }
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    return make
