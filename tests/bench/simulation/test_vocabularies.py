"""Which pairs the simulator refuses: by family, and by tokenizer where a folder has one. What nobody knows may pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulation.models import MODELS, Model, check_pair, pick_model
from engine.errors import InvalidArgument, ModelNotFound
from tests.deployments.conftest import byte_tokenizer


def folder(parent: Path, name: str, rows: int, merges: list[tuple[str, str]] | None = None) -> Model:
    """A model folder; with a tokenizer if `merges` are given."""
    made = parent / name
    made.mkdir()
    content = {
        "model_type": "llama", "vocab_size": rows, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(content))
    if merges is not None:
        byte_tokenizer(merges, ["<end>"]).save(str(made / "tokenizer.json"))
    return pick_model(str(made), "--draft")


def refused(target: Model, draft: Model) -> bool:
    try:
        check_pair(target, draft, "--draft")
    except InvalidArgument:
        return True
    return False


@pytest.mark.parametrize(
    ("target", "draft", "is_refused"),
    [
        ("llama-3.3-70b", "llama-3.2-1b", False), ("qwen2.5-72b", "qwen2.5-0.5b", False),
        ("llama-3-70b", "qwen2.5-0.5b", True), ("qwen2.5-72b", "llama-3.2-1b", True),
    ],
)  # fmt: skip
def test_families(target: str, draft: str, is_refused: bool) -> None:
    assert refused(MODELS[target], MODELS[draft]) == is_refused


def test_folders_by_their_tokenizers_however_they_are_padded(tmp_path: Path) -> None:
    target = folder(tmp_path, "target", 300, [("t", "h")])
    assert not refused(target, folder(tmp_path, "padded", 512, [("t", "h")]))
    assert refused(target, folder(tmp_path, "other", 300, [("h", "t")]))


def test_a_folder_against_a_family(tmp_path: Path) -> None:
    llama = MODELS["llama-3-70b"]
    assert refused(llama, folder(tmp_path, "bytes", 128256, [("t", "h")]))
    assert refused(folder(tmp_path, "small", 49152), llama)
    assert not refused(llama, folder(tmp_path, "unknown", 128256))


def test_two_folders_without_tokenizers_are_not_known_to_differ(tmp_path: Path) -> None:
    assert not refused(folder(tmp_path, "one", 512), folder(tmp_path, "two", 1024))


def test_a_tokenizer_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    made = folder(tmp_path, "broken", 512)
    (tmp_path / made.name / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFound, match="is not a tokenizer"):
        pick_model(str(tmp_path / made.name), "--draft")
