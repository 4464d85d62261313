"""Owns the model folder of emulated devices: a byte-level tokenizer and sizes, and no weights. Made, never fetched."""

from __future__ import annotations

import json
import os
import string
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

EMULATED = "emulated"
"""Name of the model in configurations."""

_SPACE = "Ġ"  # how byte-level tokenizers write it
_VOWELS = "aeiou"
_CONSONANTS = sorted(set(string.ascii_lowercase) - set(_VOWELS))
_MERGES = [
    *((_SPACE, letter) for letter in string.ascii_lowercase),
    *((consonant, vowel) for consonant in _CONSONANTS for vowel in _VOWELS),
    *((vowel, consonant) for consonant in _CONSONANTS for vowel in _VOWELS),
]
_WORDS = [_SPACE, *string.ascii_letters, *string.digits, *string.punctuation, *map("".join, _MERGES)]
_END = "<end>"

NUM_WORDS = len(_WORDS)
"""Ids below it are words: text that is whole by itself, which is what emulated targets write."""
VOCAB_SIZE = 512
"""Rows of the head; the tokenizer knows fewer, as is usual."""
WINDOW = 4096

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def make_folder(folder: Path) -> Path:
    """Makes `folder`, or what of it is missing or outdated. Several processes may do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files().items():
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:
            made.write(content)
        os.replace(made.name, path)
    return folder


def _files() -> dict[str, bytes]:
    tokenizer = _tokenizer()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": WINDOW,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(_END),
    }
    no_tensors = b"{}"
    return {
        "config.json": json.dumps(config, indent=2).encode(),
        "tokenizer.json": tokenizer.to_str().encode(),
        "chat_template.jinja": _CHAT_TEMPLATE.encode(),
        "model.safetensors": struct.pack("<Q", len(no_tensors)) + no_tensors,
    }


def _tokenizer() -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(_WORDS))
    vocab = {token: index for index, token in enumerate([*_WORDS, *others])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return tokenizer
