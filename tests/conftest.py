"""Fixtures for all tests: nothing reads or writes outside a temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Ray reads these when it is first imported, by whichever test that is. Token authentication, which is on otherwise,
# needs a token before that; tests/serve/test_serve_command.py covers it in a process of its own.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(autouse=True)
def outrider_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, so that no test sees a developer's models or a running server's address."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("OUTRIDER_HOME", str(home))
    monkeypatch.delenv("OUTRIDER_ADDRESS", raising=False)
    return home
