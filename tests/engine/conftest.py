from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.models import make_folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "target", seed=1)


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model: a bad draft, which is the point."""
    return make_folder(tmp_path_factory.mktemp("models") / "draft", seed=2, layers=1)
