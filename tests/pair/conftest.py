"""The default pair, fetched and converted once into the user's own cache: these tests are about the real models."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deployments.models import resolve_model
from router.tokenizer import Tokenizer

_HOME = os.environ.get("OUTRIDER_HOME")  # as it was before any test had a home of its own
PROMPTS = Path(__file__).parents[2] / "bench" / "prompts.jsonl"


@pytest.fixture(scope="session")
def target_folder() -> Path:
    with pytest.MonkeyPatch.context() as patch:
        if _HOME is None:
            patch.delenv("OUTRIDER_HOME", raising=False)
        else:
            patch.setenv("OUTRIDER_HOME", _HOME)
        return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def draft_folder() -> Path:
    return resolve_model("smollm2-135m-draft")


@pytest.fixture(scope="session")
def prompts(target_folder: Path) -> list[list[int]]:
    """Token ids of the benchmark's prompts, through the chat template."""
    tokenizer = Tokenizer(target_folder)
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [tokenizer.encode_chat(line["messages"]) for line in lines]
