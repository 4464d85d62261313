from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import InvalidArgument, ModelNotFound
from router.tokenizer import Tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "Say hi to 안녕 👋  "}],
    [
        {"role": "system", "content": 'You are <b>bold</b> & "quoted".'},
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": ""},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_equals_that_of_transformers(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(tokenizer.folder)
    text = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.render_chat(messages) == text
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == ids


def test_encode_and_decode_are_inverse(tokenizer: Tokenizer) -> None:
    text = "the fox 👨‍👩‍👧‍👦 안녕 <|im_end|> \ufffd"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace("<|im_end|>", "")
    assert tokenizer.count(text) == len(ids)


def test_ids_without_a_token_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox")
    padded = tokenizer.vocab_size + 7
    assert tokenizer.token(padded) is None
    assert tokenizer.decode([*ids, padded]) == "fox"


@pytest.fixture
def own_folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(tokenizer_folder / name, tmp_path / name)
    return tmp_path


def test_eos_comes_from_the_most_specific_file(own_folder: Path) -> None:
    (own_folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (own_folder / "config.json").write_text('{"eos_token_id": 1}')
    assert Tokenizer(own_folder).eos_token_ids == (2, 0)
    (own_folder / "generation_config.json").unlink()
    assert Tokenizer(own_folder).eos_token_ids == (1,)
    (own_folder / "config.json").unlink()
    eos = Tokenizer(own_folder)
    assert [eos.token(token_id) for token_id in eos.eos_token_ids] == ["<|im_end|>"]


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_malformed_file_is_named(own_folder: Path, name: str) -> None:
    (own_folder / name).write_text("{ no json")
    with pytest.raises(ModelNotFound, match=name):
        Tokenizer(own_folder)


def test_template_in_the_settings_is_used_by_its_name(own_folder: Path) -> None:
    settings = json.loads((own_folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "{{ eos_token }}!"},
    ]
    (own_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(own_folder).render_chat([{"role": "user", "content": "x"}]) == "<|im_end|>!"


def test_model_without_template_refuses_chat(own_folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="chat"):
        Tokenizer(own_folder).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('not like this') }}", None),
        ("{{ messages.append(1) }}", None),
        ("{{ ''.__class__.__mro__ }}", None),
        ("{{ {'a': '<&\u00fc>'} | tojson }}", '{"a": "<&\u00fc>"}'),
        ("{% for m in messages %}{% break %}{% endfor %}done", "done"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
    ],
)
def test_templates_run_in_a_sandbox_with_what_they_are_written_for(
    own_folder: Path, template: str, expected: str | None
) -> None:
    (own_folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(own_folder)
    messages = [{"role": "user", "content": "x"}]
    if expected is None:
        with pytest.raises(InvalidArgument, match=r"chat\.messages"):
            tokenizer.render_chat(messages)
    else:
        assert tokenizer.render_chat(messages) == expected


def test_fingerprint_changes_with_any_token(own_folder: Path) -> None:
    same = Tokenizer(own_folder).fingerprint()
    assert Tokenizer(own_folder).fingerprint() == same
    content = (own_folder / "tokenizer.json").read_text()
    (own_folder / "tokenizer.json").write_text(content.replace("<|im_end|>", "<|other|>"))
    assert Tokenizer(own_folder).fingerprint() != same


def test_raw_prompt_does_not_double_the_leading_token(own_folder: Path) -> None:
    content = json.loads((own_folder / "tokenizer.json").read_text())
    start = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (own_folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(own_folder)
    assert tokenizer.encode_prompt("fox") == tokenizer.encode("<|im_start|>fox")
    assert tokenizer.encode_prompt("<|im_start|>fox") == tokenizer.encode("<|im_start|>fox")
