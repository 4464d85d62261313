"""A byte-level tokenizer small enough to train here, in a folder as Hugging Face lays it out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from router.tokenizer import Tokenizer

TEMPLATE = """{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
    {%- if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{% endif %}
{{- {'html': '<&>ü'} | tojson if tools else '' }}"""

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def main():\n    return 42\n",
    "the fox and the dog and the fox",
]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained one; or the folder that OUTRIDER_TEST_TOKENIZER names, to run the tests with a real vocabulary."""
    if given := os.environ.get("OUTRIDER_TEST_TOKENIZER"):
        return Path(given)
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    settings = {"bos_token": bos, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)
